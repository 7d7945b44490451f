"""Simulated users: whom an agent talks to, and one that a language model plays behind an HTTP endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from verl_turnkey.advantage.params import ConfigError, parse
from verl_turnkey.envs.errors import EnvironmentFailure, EnvironmentKwargsError, JudgeError
from verl_turnkey.envs.http import EndpointConfig, chat_endpoint
from verl_turnkey.envs.model_texts import after_first_thoughts

POLICY = "policy"
"""``url`` of a user played by the model that is trained; the agent loop ``turnkey_env`` replaces it by an address"""
PROBE = "http://probe.invalid/v1"
"""``url`` of a user who always says the same, for trying an environment before there is a model"""
_NOWHERE = "http://policy.invalid/v1"


class Line(NamedTuple):
    """One line of a dialogue."""

    speaker: str
    """agent or user"""
    text: str


class User(Protocol):
    """Somebody who answers the agent."""

    def reply(self, scenario: str, dialogue: Sequence[Line]) -> str:
        """The user's next line, after ``dialogue``, whose last line is the agent's.

        Args:
            scenario: who the user is, what they want, and what they know.

        Raises:
            EnvironmentFailure: of kind ``user``: there is no answer, through no fault of the agent.
        """
        ...


@dataclass(frozen=True)
class UserConfig(EndpointConfig):
    """Address of the model that plays the user. All attempts together stay below ``turnkey.env.step_timeout``, 30 s."""

    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """further fields of the request, such as temperature, max_tokens or seed"""
    timeout: float = 8.0
    """seconds that one attempt may take"""
    retries: int = 2
    """further attempts after an answer 408, 429 or 5xx, a timeout or a broken connection"""
    backoff: float = 0.5
    """seconds before the second attempt, doubled for each further one"""
    silence: str | None = None
    """what the user says where the model says nothing; null: such an episode fails"""


class EndpointUser:
    """A user that a model plays, asked by ``POST <url>/chat/completions``.

    The scenario is the system message, the agent's lines are those of the role ``user``, the user's own those of the
    role ``assistant``. Thoughts at the beginning of an answer are left out.

    Args:
        config: keys of :class:`UserConfig`; ``url`` and ``model`` are required. ``url: policy`` is the model that is
            trained, in an episode of the agent loop ``turnkey_env``; elsewhere nobody answers.

    Raises:
        EnvironmentKwargsError: a key or value of ``config`` is wrong.
    """

    def __init__(self, config: Mapping[str, Any] | UserConfig) -> None:
        if isinstance(config, Mapping) and _is_policy(config):
            config = _at(_NOWHERE, config, 25.0)
        try:
            self.config = config if isinstance(config, UserConfig) else parse(UserConfig, config, "user")
        except ConfigError as error:
            raise EnvironmentKwargsError(str(error)) from None
        self._endpoint = chat_endpoint(self.config, "the simulated user")

    def __deepcopy__(self, memo: dict[int, Any]) -> EndpointUser:
        return EndpointUser(self.config)  # threads cannot be copied, and an endpoint serves one event loop at a time

    def reply(self, scenario: str, dialogue: Sequence[Line]) -> str:
        """As :meth:`User.reply`. Blocks; not to be called from a running event loop."""
        if self.config.url == _NOWHERE:
            raise EnvironmentFailure("user", f"url: {POLICY} is a model only in episodes of the agent loop turnkey_env")
        if self.config.url == PROBE:
            return "I cannot say."
        roles = {"agent": "user", "user": "assistant"}
        lines = [{"role": roles[line.speaker], "content": line.text} for line in dialogue]
        question = {"messages": [{"role": "system", "content": scenario}, *lines]}
        try:
            text = asyncio.run(self._endpoint.ask(question))
        except JudgeError as error:
            raise EnvironmentFailure("user", str(error)) from None
        answer = (after_first_thoughts(text) or "").strip() or self.config.silence
        if not answer:
            raise EnvironmentFailure(
                "user",
                f"the simulated user at {self.config.url} said nothing after its thoughts: raise max_tokens in params, "
                f"or turn thinking off; got {text[-200:]!r}",
            )
        return answer


def asks_policy(kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument of an environment is a user with ``url: policy``."""
    return any(map(_is_policy, kwargs.values()))


def with_policy(kwargs: Mapping[str, Any], url: str, seconds: float = 25.0) -> dict[str, Any]:
    """``kwargs`` of an environment with users of ``url: policy`` at ``url``, who have ``seconds`` for an answer."""
    return {name: _at(url, value, seconds) if _is_policy(value) else value for name, value in kwargs.items()}


def _is_policy(user: Any) -> bool:
    return isinstance(user, Mapping) and user.get("url") == POLICY


def _at(url: str, user: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """``user`` at ``url``. Asked once, as a second request is another sample; nothing is cached, as weights change."""
    defaults = {"model": POLICY, "params": {}, "timeout": seconds, "retries": 0, "silence": "..."}
    return {**defaults, **user, "url": url, "cache": None, "cache_size": 0}
