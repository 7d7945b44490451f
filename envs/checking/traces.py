"""Episodes as data: playing an environment, whatever it does, and writing down what it answered."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np

from verl_turnkey.envs.answers import Answer, Fault, read_reset, read_step

Env = gymnasium.Env[str, str]
Tell = Callable[..., None]


def world(answer: Answer) -> tuple[object, ...]:
    """All of an answer but the key and the time; NaN is equal to itself."""
    parts = (answer.observation_key, answer.admissible, repr(answer.reward), answer.terminated, answer.truncated)
    return (*parts, answer.success, answer.invalid)


@dataclass
class Trace:
    """An episode: ``answers[0]`` is the reset's, ``answers[t + 1]`` the answer to ``actions[t]``."""

    seed: int
    kind: str
    """the actions' origin: admissible, text, oracle"""
    task: str = ""
    actions: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """that each answer took"""
    faults: list[tuple[str, str]] = field(default_factory=list)
    """property and evidence"""

    @property
    def ended(self) -> bool:
        return bool(self.answers) and (self.answers[-1].terminated or self.answers[-1].truncated)

    @property
    def broken(self) -> bool:
        """Did the environment raise, or return what is not an answer?"""
        return len(self.answers) != len(self.actions) + 1


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
        answer = self._answered(trace, "reset", what, lambda: read_reset(env.reset(seed=trace.seed)))
        if answer is not None:
            trace.task = answer.info["task"]

    def step(self, env: Env, trace: Trace, action: str) -> None:
        what = f"step({shorten(action)}) (seed {trace.seed}, step {len(trace.actions)})"
        trace.actions.append(action)
        self._answered(trace, "step", what, lambda: read_step(env.step(action)))

    def _answered(self, trace: Trace, kind: str, what: str, call: Callable[[], Answer | Fault]) -> Answer | None:
        """What ``call`` gave; None when it raised, or gave no answer. The trace keeps answer, seconds and faults."""
        where = "any_text" if trace.kind == "text" and kind == "step" else "runs"
        try:
            answer, seconds = self(kind, what, call)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit is an environment's fault like any other
            trace.faults.append((where, f"{what} raised {type(error).__name__}: {shorten(str(error), 200)}"))
            return None
        if isinstance(answer, Fault):
            trace.faults.append((where, f"{what}: {answer.message}"))
            return None
        trace.faults += [(fault.property, f"{what}: {fault.message}") for fault in answer.faults]
        # Nobody judges pictures and further values but the role: they need not travel to the parent.
        kept = {name: value for name, value in answer.info.items() if name != "images"} | {
            "extra": {"role": answer.role}
        }
        trace.answers.append(replace(answer, info=kept, faults=[]))
        trace.seconds.append(seconds)
        return answer


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
    return play(env, trace.seed, trace.kind, scripted(trace.actions), len(trace.actions), calls)


def scripted(actions: Sequence[str]) -> Choose:
    """These actions in order."""
    return lambda trace: actions[len(trace.actions)] if len(trace.actions) < len(actions) else None


def drawn(rng: random.Random, vocabulary: Sequence[str]) -> Choose:
    """Admissible actions at random; without a list of them numbers, words that were shown, and ``vocabulary``."""

    def choose(trace: Trace) -> str | None:
        answer = trace.answers[-1]
        if answer.admissible is not None:
            return rng.choice(answer.admissible) if answer.admissible else None
        numbers = [str(number) for number in range(21)]
        shown_words = (trace.task + " " + answer.observation[:2000]).split()
        return rng.choice(rng.choice([pool for pool in (numbers, shown_words, vocabulary) if pool]))

    return choose
