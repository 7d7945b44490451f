"""The key of the state before a turn of an agent, made of what the agent sent (``turnkey.agent.state``).

Methods that compare states put steps with equal keys into one group. Results of tools hold times, process ids and
addresses, which differ between episodes although the state is the same: keys are made of results in normal form, in
which the patterns of ``forms.yaml`` stand for what they match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import yaml

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.answers import images_key
from verl_turnkey.envs.base import digest
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.gateway.messages import Message, Request, ToolCall
from verl_turnkey.plugins.gateway.tree import plain

KEY = "turnkey.agent.state"
FORMS = Path(__file__).with_name("forms.yaml")


@dataclass(frozen=True)
class View:
    """What a state is made of: all that the agent has sent before a turn."""

    messages: tuple[Message, ...]
    files: Mapping[str, str] | None = None
    """path -> content digest of the agent's files, where the runner can see them"""

    @property
    def step(self) -> int:
        """Turns of the model in these messages."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """All calls so far, in their order."""
        return tuple(call for message in self.messages for call in message.calls)

    @property
    def new(self) -> tuple[Message, ...]:
        """The messages after the model's last turn."""
        start = max((n for n, message in enumerate(self.messages, 1) if message.role == "assistant"), default=0)
        return self.messages[start:]

    @property
    def last(self) -> Message | None:
        """The model's last turn."""
        return next((message for message in reversed(self.messages) if message.role == "assistant"), None)


StateFunction = Callable[[View], str | None]


@cache
def _forms() -> tuple[tuple[re.Pattern[str], str], ...]:
    rows = yaml.safe_load(FORMS.read_text(encoding="utf-8"))
    return tuple((re.compile(row["pattern"]), row["becomes"]) for row in rows)


def normal_form(text: str) -> str:
    """``text`` with a name in the place of each time, duration, address, id, process id and temporary path, and with
    single spaces."""
    for pattern, name in _forms():
        text = pattern.sub(name, text)
    return " ".join(text.split())


_digests: dict[bytes, str] = {}
"""of normal forms, by the hash of the text: each request of an agent has the texts of the one before"""
_MOST_DIGESTS = 100_000


def _normal_digest(text: str) -> str:
    key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if (normal := _digests.get(key)) is None:  # another thread may clear them
        normal = digest(normal_form(text))
        if len(_digests) >= _MOST_DIGESTS:
            _digests.clear()
        _digests[key] = normal
    return normal


def history(view: View, past: str = "", since: int = 0) -> str:
    """All messages and calls so far: two episodes are in one state while they agree in everything.

    ``past``: the key of the first ``since`` messages; then only what is new is looked at.
    """
    for message in _compared(view.messages[since:]):
        past = digest(past, message)
    return past


def observation(view: View) -> str:
    """The messages after the model's last turn."""
    return digest(_compared(view.new, view.last))


def call(view: View) -> str:
    """The model's last calls, or its text, with what came back; before its first turn :func:`observation`."""
    turn = view.last
    return observation(view) if turn is None else digest(*_compared([turn]), _compared(view.new, turn))


FUNCTIONS: Mapping[str, StateFunction] = {"history": history, "observation": observation, "call": call}


class StateKey(Protocol):
    """The key of the state before the turn that answers a request, which holds all messages of its conversation."""

    def __call__(self, request: Request, files: Mapping[str, str] | None = None) -> str | None: ...


def state_key(name: str) -> StateKey:
    """The function of ``turnkey.agent.state``.

    Args:
        name: one of ``FUNCTIONS``, or ``module:function`` of the user's own, which gets a :class:`View` and returns
            text, or None for a state that is like no other.

    Raises:
        ConfigError: there is no such name.
        ModuleImportError: the function cannot be imported.
    """
    if name not in FUNCTIONS and ":" not in name:
        raise ConfigError(
            f"{KEY}={name}: expected {', '.join(FUNCTIONS)} or module:function{did_you_mean(name, FUNCTIONS)}"
        )
    if name == "history":
        return History()
    function = FUNCTIONS[name] if name in FUNCTIONS else _checked(load_function(name, KEY, "view"), name)
    return lambda request, files=None: function(View(request.messages, files))


class History:
    """:func:`history` as a ``StateKey``. Of a request that repeats the one before, only what is new is looked at."""

    def __call__(self, request: Request, files: Mapping[str, str] | None = None) -> str:
        return history(View(request.messages))

    def after(self, past: str, before: Request, request: Request) -> str:
        """The key of ``request``, which goes on after ``before``, whose key is ``past``."""
        since = len(before.messages)
        if request.messages[:since] != before.messages:  # compares mostly identical objects
            return self(request)
        return history(View(request.messages), past, since)


def _checked(function: Callable[..., Any], name: str) -> StateFunction:
    def key(view: View) -> str | None:
        try:
            value = function(view)
        except Exception as error:  # of the user's function, which costs its episode
            raise EnvironmentFailure("state", f"{KEY}={name}: {type(error).__name__}: {str(error)[:300]}") from error
        if value is not None and not isinstance(value, str):
            raise EnvironmentFailure("state", f"{KEY}={name} must return text or None, got {type(value).__name__}")
        return value

    return key


def _compared(messages: Sequence[Message], last: Message | None = None) -> list[list[Any]]:
    """Messages as states compare them: without ids and reasoning; what the model did not write is in normal form.

    Of the result of a call the number of the call stands for its id. ``last``: the model's turn before the messages.
    """
    number: dict[str, int] = {}
    compared: list[list[Any]] = []
    for message in [*([] if last is None else [last]), *messages]:
        if message.calls:
            number = {call.id: n for n, call in enumerate(message.calls)}
        if message.role == "assistant":
            calls = [[call.name, json.dumps(plain(call.arguments), sort_keys=True)] for call in message.calls]
            compared.append([message.role, message.text.strip(), calls])
        else:
            place, text = number.get(message.call_id or ""), _normal_digest(message.text)
            compared.append([message.role, text, message.error, place, images_key(message.images)])
    return compared[last is not None :]
