"""What an episode of a foreign agent is run with (``AgentHandle``) and what comes back (``AgentResult``).

The agent talks to the gateway of its episode over HTTP, as it would to any model server. What else it reports, a reward
or the key of its state, goes the same way, so that this works from another process and from inside a sandbox.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.answers import finite_reward, plain_values, short_repr
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.http import post_json

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

REASON_CHARS = 300
"""longest reason of a failure: an agent's exception may hold the whole prompt"""

PLAYED: ContextVar[str | None] = ContextVar("PLAYED", default=None)
"""in a process that plays several episodes at once: the key of the one that the code here plays; None: unknown"""
STRAYS: set[str] = set()
"""keys of episodes that called through a client of another one"""

_REPORT_SECONDS = 30.0


class AgentFailure(EnvironmentFailure):
    """The agent could not be run, or its result could not be read; it costs its own episode.

    ``reason`` is cut to 300 characters.
    """

    def __init__(self, reason: str) -> None:
        self.reason = cut(reason)
        super().__init__("agent", self.reason)
        self.args = (self.reason,)  # unpickling calls the class with these

    def __str__(self) -> str:
        return f"agent failure: {self.reason}"


def without_secret(text: str, secret: str) -> str:
    """``text`` with ``***`` for an episode's secret, its key and part of its URL, also where the text cuts it."""
    if len(secret) < 16:
        return text
    head, tail = re.escape(secret[:8]), re.escape(secret[-8:])
    return re.sub(rf"{head}[\w-]*|[\w-]{{0,{len(secret) - 9}}}{tail}", "***", text)


def cut(reason: str) -> str:
    """``reason`` without white space around it, at most ``REASON_CHARS`` long."""
    reason = reason.strip()
    return reason if len(reason) <= REASON_CHARS else f"{reason[: REASON_CHARS - 3]}..."


@dataclass(frozen=True)
class AgentResult:
    """How an episode ended, as far as the runner knows."""

    reward: float | None = None
    """of the whole episode; None: the runner has none, and the agent's reports count"""
    success: bool | None = None
    """None: unknown"""
    turn_rewards: Mapping[int | str, float] = field(default_factory=dict)
    """turn -> reward, besides ``reward``; a turn is its number, counted from 0, or the id of its reply"""
    outcome: Mapping[str, float] = field(default_factory=dict)
    """role -> its reward at the end, in addition to ``reward``, which every role gets"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """further plain values by name, for reward components and estimators"""
    truncated: bool = False
    """the agent was stopped before it ended by itself"""
    verified: bool = False
    """the reward is from tests that the agent cannot reach: rewards that the agent reported do not count"""
    reason: str = ""
    """what went wrong with the agent, at most 300 characters; an episode without any reward fails with it"""


@dataclass(frozen=True)
class _Handle:
    """What both handles share; the calls of ``AgentHandle`` are awaited, those of ``SyncAgentHandle`` block."""

    base_url: str
    """``http://127.0.0.1:PORT/SECRET/v1``"""
    key: str
    """the API key to send"""
    model: str
    """the name of the policy; calls of other models are answered, not trained"""
    workspace: Path | None = None
    """folder of this episode that the agent works in, seen from outside of a sandbox; None: the runner makes one"""
    socket: str | None = None
    """path of the gateway's unix socket, the only way out of a sandbox"""

    def check_played(self) -> None:
        """Raise RuntimeError if code of another episode calls through this one's client."""
        if (key := PLAYED.get()) not in (None, self.key):
            STRAYS.add(key)
            raise RuntimeError("the client of another episode")

    def report(self, what: str, body: Mapping[str, Any], turn: int | str | None = None) -> None:
        """Post ``body``, about ``turn`` or none, to ``/SECRET/what`` of the gateway; blocks.

        Raises:
            ServerError: the gateway refused it, or is not there.
        """
        url = f"{self.base_url.rstrip('/').removesuffix('/v1')}/{what}"
        about = {} if turn is None else {"turn": turn if isinstance(turn, str) else int(turn)}
        post_json(url, {**body, **about}, timeout=_REPORT_SECONDS, key="the address of the gateway")


@dataclass(frozen=True)
class AgentHandle(_Handle):
    """The gateway of one episode, as an agent sees it."""

    def client(self, **kwargs: Any) -> AsyncOpenAI:
        """An asynchronous client of ``openai`` for this episode. ``kwargs``: further arguments of the client."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        async def check(_: Any) -> None:
            self.check_played()

        if "http_client" not in kwargs:  # a proxy cannot reach this machine
            kwargs["http_client"] = DefaultAsyncHttpxClient(trust_env=False, event_hooks={"request": [check]})
        return AsyncOpenAI(base_url=self.base_url, api_key=self.key, **kwargs)

    async def state(self, key: str, turn: int | str | None = None) -> None:
        """Set the key of the state before the agent's next turn, or before ``turn``; equal states have equal keys.

        An agent whose calls run at the same time gives the id of the turn's reply.
        """
        await asyncio.to_thread(self.report, "state", {"key": str(key)}, turn)

    async def reward(self, value: float, turn: int | str | None = None, role: str | None = None) -> None:
        """Report the reward of the episode, of one turn, or of a role at the end. The last report counts.

        ``turn``: the id of its reply (``reply.id`` in the clients of all APIs), or its number, counted from 0, which is
        refused once calls of the episode ran at the same time.
        """
        await asyncio.to_thread(self.report, "reward", _reward(value, role), turn)


@dataclass(frozen=True)
class SyncAgentHandle(_Handle):
    """What a function that is not ``async`` gets instead of an ``AgentHandle``: the same names, as plain calls."""

    def client(self, **kwargs: Any) -> OpenAI:
        """A client of ``openai`` for this episode. ``kwargs``: further arguments of the client."""
        from openai import DefaultHttpxClient, OpenAI

        if "http_client" not in kwargs:
            hooks = {"request": [lambda _: self.check_played()]}
            kwargs["http_client"] = DefaultHttpxClient(trust_env=False, event_hooks=hooks)
        return OpenAI(base_url=self.base_url, api_key=self.key, **kwargs)

    def state(self, key: str, turn: int | str | None = None) -> None:
        """As ``AgentHandle.state``."""
        self.report("state", {"key": str(key)}, turn)

    def reward(self, value: float, turn: int | str | None = None, role: str | None = None) -> None:
        """As ``AgentHandle.reward``."""
        self.report("reward", _reward(value, role), turn)


def _reward(value: float, role: str | None) -> dict[str, Any]:
    return {"reward": float(value), **({} if role is None else {"role": role})}


class Runner(Protocol):
    """A way to run an agent. One runner serves all episodes of a process, several at once."""

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> AgentResult:
        """Run one episode to its end, and leave no process behind; cancelled, it kills what it started.

        ``task``: the value of the row's column ``turnkey_task``. An agent that breaks down, or that runs out of time,
        gives an ``AgentResult`` with a ``reason``: it may have reported its reward before.

        Raises:
            AgentFailure: the agent could not be started, or its verifier gave no reward.
        """
        ...

    async def close(self) -> None:
        """End what waits for further episodes; by default there is nothing to end."""


def ran_too_long(timeout: float) -> str:
    """The reason of an episode that was stopped."""
    return f"the agent ran longer than turnkey.agent.timeout={timeout:g}"


_FIELDS = ("reward", "success", "turns", "outcome", "extra")


def read_result(value: Any, who: str) -> AgentResult:
    """A returned value as an outcome; None: the agent reports its reward itself. ``who`` is named in errors.

    Raises:
        AgentFailure: it is neither a finite number, nor a mapping of the fields with values of their types, nor None.
    """
    if value is None:
        return AgentResult()
    try:
        return _outcome(value) if isinstance(value, Mapping) else AgentResult(finite_reward(value, "the result"))
    except (TypeError, ValueError) as error:
        raise AgentFailure(f"{who} must return a finite number or a dict {{{', '.join(_FIELDS)}}}: {error}") from None


def _outcome(fields: Mapping[str, Any]) -> AgentResult:
    for name in fields:
        if name not in _FIELDS:
            raise TypeError(f"there is no field {name!r}{did_you_mean(str(name), _FIELDS) or '.'}")
    reward, success, turns = fields.get("reward"), fields.get("success"), fields.get("turns") or {}
    if success is not None and not isinstance(success, bool | np.bool_):
        raise TypeError(f"success must be a bool, not {short_repr(success)}")
    if not isinstance(turns, Mapping):
        raise TypeError(f"turns must be a dict of turn: reward, not {short_repr(turns)}")
    outcome = fields.get("outcome") or {}
    if not isinstance(outcome, Mapping):
        raise TypeError(f"outcome must be a dict of role: number, not {short_repr(outcome)}")
    return AgentResult(
        reward=None if reward is None else finite_reward(reward, "reward"),
        success=None if success is None else bool(success),
        turn_rewards={
            turn_name(turn): finite_reward(value, f"the reward of turn {turn}") for turn, value in turns.items()
        },
        outcome={str(role): finite_reward(value, f"the outcome of {role!r}") for role, value in outcome.items()},
        extra=plain_values(fields.get("extra") or {}, "extra"),
    )


def turn_name(turn: Any) -> int | str:
    """A turn by its number, as text in a JSON object, or by the id of its reply. Raises TypeError."""
    if isinstance(turn, str) and turn and not turn.removeprefix("-").isdecimal():
        return turn
    try:
        number = int(turn)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or isinstance(turn, bool | float):
        raise TypeError(f"the keys of turns must be 0, 1, 2, ..., not {short_repr(turn)}, or reply ids")
    return number
