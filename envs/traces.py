"""Episodes as data: playing an environment, whatever it does, and writing down what it answered."""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

Env = gymnasium.Env[str, str]
Tell = Callable[..., None]


@dataclass(frozen=True)
class View:
    """What the environment answered once; of ``info`` only what has the right type."""

    observation: str = ""
    state_key: str | int | None = None
    admissible: tuple[str, ...] | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    won: bool | None = None
    invalid: bool = False
    seconds: float = 0.0


def world(view: View) -> tuple[object, ...]:
    """All of an answer but the key and the time; NaN is equal to itself."""
    parts = (view.observation, view.admissible, repr(view.reward), view.terminated, view.truncated)
    return (*parts, view.won, view.invalid)


@dataclass
class Trace:
    """An episode: ``views[0]`` is the reset's, ``views[t + 1]`` the answer to ``actions[t]``."""

    seed: int
    kind: str
    """the actions' origin: admissible, text, oracle"""
    task: str = ""
    actions: list[str] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    """property and evidence"""

    @property
    def ended(self) -> bool:
        return bool(self.views) and (self.views[-1].terminated or self.views[-1].truncated)

    @property
    def broken(self) -> bool:
        """Did the environment raise, or answer what is no answer?"""
        return len(self.views) != len(self.actions) + 1


class Calls:
    """Calls into the environment: announced, timed, and watched for the global random generators."""

    def __init__(self, tell: Tell, watch: bool = True) -> None:
        self._tell, self._watch = tell, watch
        self.global_rng: dict[str, str] = {}

    def __call__(self, kind: str, what: str, call: Callable[[], Any]) -> tuple[Any, float]:
        self._tell("call", kind, what)
        before = _generators() if self._watch else {}
        started = time.perf_counter()
        answer = call()
        seconds = time.perf_counter() - started
        for name, state in (_generators() if self._watch else {}).items():
            if state != before[name]:
                self.global_rng.setdefault(name, what)
        return answer, seconds

    def reset(self, env: Env, trace: Trace) -> None:
        what = f"reset(seed={trace.seed})"
        answer = self._guarded(trace, "reset", what, lambda: env.reset(seed=trace.seed), 2)
        if answer is None:
            return
        (observation, info), seconds = answer
        task = info.get("task") if isinstance(info, Mapping) else None
        if task is not None and not isinstance(task, str):
            trace.faults.append(("info", f"{what}: task is {shown(task)}, not text"))
        trace.task = str(task or "")
        trace.views.append(View(**_observed(observation, info, what, trace.faults), seconds=seconds))

    def step(self, env: Env, trace: Trace, action: str) -> None:
        what = f"step({shorten(action)}) (seed {trace.seed}, step {len(trace.actions)})"
        trace.actions.append(action)
        answer = self._guarded(trace, "step", what, lambda: env.step(action), 5)
        if answer is None:
            return
        (observation, reward, terminated, truncated, info), seconds = answer
        number = _float(reward)
        if number is None:
            trace.faults.append(("reward", f"{what}: the reward is {shown(reward)}, not a number"))
            number = math.nan
        elif not math.isfinite(number):
            trace.faults.append(("reward", f"{what}: the reward is {number}"))
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                trace.faults.append(("flags", f"{what}: {name} is {shown(flag)}, not a bool"))
        trace.views.append(
            View(
                **_observed(observation, info, what, trace.faults),
                reward=number,
                terminated=bool(terminated),
                truncated=bool(truncated),
                seconds=seconds,
            )
        )

    def _guarded(
        self, trace: Trace, kind: str, what: str, call: Callable[[], Any], length: int
    ) -> tuple[Any, float] | None:
        where = "any_text" if trace.kind == "text" and kind == "step" else "runs"
        try:
            answer, seconds = self(kind, what, call)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit is an environment's fault like any other
            trace.faults.append((where, f"{what} raised {type(error).__name__}: {shorten(str(error), 200)}"))
            return None
        if not isinstance(answer, tuple) or len(answer) != length:
            trace.faults.append((where, f"{what} must return {length} values, not {shown(answer)}"))
            return None
        return answer, seconds


def _observed(observation: Any, info: Any, what: str, faults: list[tuple[str, str]]) -> dict[str, Any]:
    if not isinstance(observation, str):
        faults.append(("observation", f"{what}: the observation is {shown(observation)}, not text"))
    if not isinstance(info, Mapping):
        faults.append(("info", f"{what}: info is {shown(info)}, not a dict"))
        info = {}
    key = info.get("state_key")
    if key is not None and type(key) not in (int, str):
        faults.append(("state_key", f"{what}: state_key is {shown(key)}, not a str or an int"))
        key = None
    admissible, won, invalid = info.get("admissible"), info.get("won"), info.get("invalid")
    if admissible is not None and not (
        isinstance(admissible, list | tuple) and all(isinstance(action, str) for action in admissible)
    ):
        faults.append(("info", f"{what}: admissible is {shown(admissible)}, not a list of str"))
        admissible = None
    for name, value in (("won", won), ("invalid", invalid)):
        if value is not None and not isinstance(value, bool | np.bool_):
            faults.append(("info", f"{what}: {name} is {shown(value)}, not a bool"))
    return {
        "observation": observation if isinstance(observation, str) else repr(observation)[:1000],
        "state_key": key,
        "admissible": None if admissible is None else tuple(admissible),
        "won": None if won is None else bool(won),
        "invalid": bool(invalid),
    }


def _float(value: Any) -> float | None:
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None


def shown(value: Any) -> str:
    """Type and beginning of a value that should not be there."""
    return f"{type(value).__name__} {shorten(repr(value), 80)}"


def shorten(text: str, limit: int = 40) -> str:
    """The beginning of ``text`` as a literal, on one line."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}... ({len(text)} characters)"


def _generators() -> dict[str, Any]:
    return {"random": hash(random.getstate()), "numpy.random": pickle.dumps(np.random.get_state(legacy=False))}


Choose = Callable[[Trace], str | None]


def play(env: Env, seed: int, kind: str, choose: Choose, steps: int, calls: Calls) -> Trace:
    """One episode of at most ``steps`` steps, or until ``choose`` has nothing more to say."""
    trace = Trace(seed, kind)
    calls.reset(env, trace)
    while not trace.broken and not trace.ended and len(trace.actions) < steps:
        action = choose(trace)
        if action is None:
            break
        calls.step(env, trace, action)
    return trace


def replay(env: Env, trace: Trace, calls: Calls) -> Trace:
    """The actions of ``trace`` once more."""
    return play(env, trace.seed, trace.kind, said(trace.actions), len(trace.actions), calls)


def said(actions: Sequence[str]) -> Choose:
    """These actions in order."""
    return lambda trace: actions[len(trace.actions)] if len(trace.actions) < len(actions) else None


def drawn(rng: random.Random, vocabulary: Sequence[str]) -> Choose:
    """Admissible actions at random; without a list of them numbers, words that were shown, and ``vocabulary``."""

    def choose(trace: Trace) -> str | None:
        view = trace.views[-1]
        if view.admissible is not None:
            return rng.choice(view.admissible) if view.admissible else None
        numbers = [str(number) for number in range(21)]
        shown_words = (trace.task + " " + view.observation[:2000]).split()
        return rng.choice(rng.choice([pool for pool in (numbers, shown_words, vocabulary) if pool]))

    return choose
