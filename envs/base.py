"""The base of the adapters: the bookkeeping that every text environment needs.

An adapter answers a reset (``begin``) and an action (``act``) with a ``StepResult``. The base adds step limits, the two
flags of an episode's end, the error for a step after it and the keys of ``info``. It also has what adapters share:
argument checks, state keys and a search for oracles. Your own environment may build on it, but need not.
"""

from __future__ import annotations

import copy
import hashlib
import string
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.errors import EnvironmentKwargsError, EpisodeOverError


class AnyText(spaces.Text):
    """gymnasium's text space without an alphabet: any string is in it, samples are printable ASCII."""

    def __init__(self, max_length: int = 200) -> None:
        super().__init__(max_length, charset=string.ascii_letters + string.digits + string.punctuation + " ")

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


@dataclass(frozen=True)
class StepResult:
    """What an adapter answers to a reset or a step."""

    observation: str
    state_key: str | int | None = None
    """key of the full state and of what the agent has learned, if the state does not show it: equal keys promise equal
    prospects, whatever the step number and the wording; None: what the agent sees, the text and the images' pixels"""
    admissible: Sequence[str] | None = None
    """the actions that count as valid now; None: any text may be one"""
    reward: float = 0.0
    """of this step alone, never a running sum"""
    terminated: bool = False
    """the environment ended the episode"""
    truncated: bool = False
    """a limit of the engine's own ended it"""
    success: bool = False
    """the task is solved"""
    invalid: bool = False
    """the action was not understood or could not be applied"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """further plain values by name, for reward components and estimators (``tool_calls``, ``potential``, ...)"""
    outcome: Mapping[str, float] = field(default_factory=dict)
    """role -> what the end of the episode pays it"""
    task: str = ""
    """what the role that moves now for the first time is to do, if it differs from what ``begin`` said"""
    images: Sequence[Any] = ()
    """what it shows: uint8 arrays (height, width, 3), PIL images, or bytes or paths of PNG and JPEG files"""


class TextEnv(gymnasium.Env[str, str]):
    """Base class: an adapter implements ``begin`` and ``act``, and ``oracle`` if it has one.

    ``metadata["thread_safe"]``: whether several instances may run in threads of one process (else each gets a process
    of its own). ``metadata["memory_mb"]``: what one instance adds to a process (thread-safe), or its whole process
    takes (not thread-safe).

    Args:
        max_steps: steps after which an episode is truncated; None: never.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": False, "memory_mb": 200}

    def __init__(self, max_steps: int | None = None) -> None:
        check(max_steps is None or is_count(max_steps), "max_steps", "a positive integer or null", max_steps)
        self.observation_space = AnyText(10_000)
        self.action_space = AnyText(100)
        self.max_steps = max_steps
        self._steps = 0
        self._running = False
        self._last_result: StepResult

    @property
    def turn_limit(self) -> int | None:
        """Steps after which the episode is truncated, known after a reset at the latest; None: never, or not known."""
        return self.max_steps

    def begin(self, seed: int) -> tuple[StepResult, str]:
        """Start the episode of ``seed``: the first result, and the task in words."""
        raise NotImplementedError(f"{type(self).__name__} must have a method begin(self, seed)")

    def act(self, action: str) -> StepResult:
        """What ``action`` leads to."""
        raise NotImplementedError(f"{type(self).__name__} must have a method act(self, action)")

    def refused(self) -> StepResult:
        """The result for an action that was not understood: the state is unchanged."""
        return replace(self._last_result, reward=0.0, invalid=True)

    def oracle(self) -> list[str] | None:
        """Actions that solve this episode's task from its start; None if unknown. Called right after a reset."""
        return None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The first observation, and ``info`` with the task. Equal seeds give equal starts; None draws a seed."""
        super().reset(seed=seed)
        if not hasattr(self, "max_steps"):
            raise TypeError(f"{type(self).__name__}.__init__ must call super().__init__(max_steps)")
        if seed is None:
            seed = int(self.np_random.integers(2**31 - 1))
        self._running = False
        start: Any = self.begin(seed)
        if not (isinstance(start, tuple) and len(start) == 2 and isinstance(start[0], StepResult)):
            raise TypeError(f"begin must return (StepResult, task), not {_form(start)}")
        self._last_result, task = start
        self._steps, self._running = 0, True
        return self._last_result.observation, {**_info(self._last_result), "task": task}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Raises ``EpisodeOverError`` after the episode's end, and before its beginning."""
        if not self._running:
            raise EpisodeOverError("step was called on an episode that has ended or never began: call reset first")
        result: Any = self.act(action)
        if not isinstance(result, StepResult):
            advice = "return self.refused() if the text is not a command"
            raise TypeError(f"act must return a StepResult, not {_form(result)}; {advice}")
        self._last_result = result
        self._steps += 1
        limit = self.max_steps is not None and self._steps >= self.max_steps
        # An episode that is solved on its last allowed step is terminated: only one of the two flags is set.
        truncated = not result.terminated and (result.truncated or limit)
        self._running = not (result.terminated or truncated)
        return result.observation, float(result.reward), result.terminated, truncated, _info(result)


def _form(value: Any) -> str:
    """The type of ``value``; for a tuple, of its parts."""
    parts = ", ".join(type(part).__name__ for part in value) if isinstance(value, tuple) else ""
    return f"({parts})" if parts else type(value).__name__


def _info(result: StepResult) -> dict[str, Any]:
    return {
        "state_key": result.state_key,
        "admissible": None if result.admissible is None else list(result.admissible),
        "success": result.success,
        "won": result.success,  # verl-agent's name for it: what reads its environments reads ours
        "invalid": result.invalid,
        **({"extra": dict(result.extra)} if result.extra else {}),
        **({"outcome": dict(result.outcome)} if result.outcome else {}),
        **({"task": result.task} if result.task else {}),
        **({"images": list(result.images)} if len(result.images) else {}),
    }


def turn_limit(env: gymnasium.Env[Any, Any]) -> int | None:
    """Steps after which ``env`` truncates an episode: gymnasium's ``max_episode_steps``, or a ``TextEnv``'s own limit.

    None: neither is known. Other limits show only in what the environment itself says.
    """
    limits = [getattr(env.spec, "max_episode_steps", None)]
    if isinstance(env.unwrapped, TextEnv):
        limits.append(env.unwrapped.turn_limit)
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)  # -1: gymnasium's for none


def declared_roles(env: gymnasium.Env[Any, Any]) -> tuple[str, ...]:
    """``metadata["roles"]`` of ``env``: who takes turns in its episodes; empty: one player, whom it need not name.

    Raises:
        EnvironmentKwargsError: it has another form than a list of different texts.
    """
    roles = (getattr(env.unwrapped, "metadata", None) or {}).get("roles") or ()
    texts = isinstance(roles, list | tuple) and all(isinstance(role, str) and role for role in roles)
    check(texts and len({*roles}) == len(roles), "metadata['roles']", "a list of different texts", roles)
    return tuple(roles)


def digest(*parts: Any) -> str:
    """A short key of a state given by ``parts``, the same in every process: their ``repr`` must not hold addresses."""
    return hashlib.sha1(repr(parts).encode()).hexdigest()[:16]


def words(action: str) -> str:
    """An action as adapters compare it: lower case, single spaces."""
    return " ".join(action.lower().split())


def check(ok: bool, name: str, expected: str, value: Any) -> None:
    """Raise ``EnvironmentKwargsError`` unless ``ok``: "``name`` must be ``expected``, not ``value``"."""
    if not ok:
        raise EnvironmentKwargsError(f"{name} must be {expected}, not {value!r}")


def check_name(
    name: Any, names: Collection[str], problem: str, listing: str, error: type[Exception] = EnvironmentKwargsError
) -> None:
    """Raise ``error`` unless ``name`` is one of ``names``, which the message lists after ``listing``, if given."""
    if name not in names:
        listed = f" {listing} {', '.join(names)}" if listing else ""
        raise error(f"{problem} {name!r}{did_you_mean(name, names) or '.'}{listed}")


def is_number(value: Any) -> bool:
    """An integer or a float; ``True`` is not one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """A positive integer; ``True`` is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def shortest_plan(
    start: Hashable, moves: Callable[[Any], Iterable[tuple[str, Hashable, bool]]], max_states: int = 100_000
) -> list[str] | None:
    """The fewest actions from ``start`` to success, breadth-first; None if there are none, or the search found none.

    ``moves(state)`` gives action, next state, and whether that state is a success. ``max_states`` bounds the search.
    """
    came_from: dict[Any, tuple[Any, str] | None] = {start: None}
    todo = deque([start])
    while todo and len(came_from) < max_states:
        state = todo.popleft()
        for action, after, success in moves(state):
            if success:
                plan = [action]
                while (step := came_from[state]) is not None:
                    state, action = step
                    plan.append(action)
                return plan[::-1]
            if after not in came_from:
                came_from[after] = (state, action)
                todo.append(after)
    return None


def offers_copies(kind: Any) -> bool:
    """Whether a class has a method ``clone()``, or ``metadata["deepcopy"] = True``.

    Hosts copy thread-safe environments only; every other one is cloned by a reset and a replay.
    """
    metadata = getattr(kind, "metadata", None) or {}  # a function instead of a class has none
    return callable(getattr(kind, "clone", None)) or metadata.get("deepcopy") is True


def copied(env: gymnasium.Env[str, str]) -> gymnasium.Env[str, str] | None:
    """An independent copy in the same state, wrappers included; None when the class offers none."""
    core = env.unwrapped
    if not offers_copies(type(core)):
        return None
    make_clone = getattr(core, "clone", None)
    return copy.deepcopy(env, {id(core): make_clone()} if make_clone is not None else None)
