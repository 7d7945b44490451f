"""Episodes as data: playing an environment, whatever it does, and what was observed; nothing is judged here."""

from __future__ import annotations

import math
import pickle
import random
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np

from verl_turnkey.envs.answers import KEYS, Answer, Fault, first_difference, read_reset, read_step
from verl_turnkey.envs.base import declared_roles

Env = gymnasium.Env[str, str]
Tell = Callable[..., None]
HERE = Path(__file__).parent
NO_RAISE = "correct step(), or, if this text is not a valid action, return with info['invalid']=True instead"


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
    roles: tuple[str, ...] = ()
    """those that the environment declares"""
    actions: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """that each answer took"""
    faults: list[tuple[str, str]] = field(default_factory=list)
    """property and evidence"""
    keys: set[str] = field(default_factory=set)
    """of ``info``, read or not, with a value"""

    @property
    def ended(self) -> bool:
        return bool(self.answers) and (self.answers[-1].terminated or self.answers[-1].truncated)

    @property
    def broken(self) -> bool:
        """Did the environment raise, or return what is not an answer?"""
        return len(self.answers) != len(self.actions) + 1

    def valid_actions(self) -> set[str]:
        """The distinct actions that were not invalid."""
        return {action for action, there in zip(self.actions, self.answers[1:], strict=False) if not there.invalid}


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
        trace.roles = declared_roles(env)
        answer = self._answered(trace, "reset", what, lambda: env.reset(seed=trace.seed), read_reset)
        if answer is not None:
            trace.task = answer.info["task"]

    def step(self, env: Env, trace: Trace, action: str) -> None:
        what = f"step({shorten(action)}) (seed {trace.seed}, step {len(trace.actions)})"
        trace.actions.append(action)
        self._answered(trace, "step", what, lambda: env.step(action), read_step)

    def _answered(
        self, trace: Trace, kind: str, what: str, call: Callable[[], Any], read: Callable[..., Answer | Fault]
    ) -> Answer | None:
        """What ``call`` gave; None when it raised, or gave no answer. The trace keeps answer, seconds and faults."""
        where = "any_text" if trace.kind == "text" and kind == "step" else "runs"
        try:
            returned, seconds = self(kind, what, call)
            answer = read(returned, trace.roles)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit is an environment's fault like any other
            advice = f"; {NO_RAISE}" if kind == "step" else ""
            trace.faults.append((where, raised(what, error) + advice))
            return None
        if isinstance(answer, Fault):
            trace.faults.append((where, f"{what}: {answer.message}"))
            return None
        if isinstance(info := returned[-1], Mapping):
            trace.keys |= {key for key, value in info.items() if isinstance(key, str) and value is not None}
        trace.faults += [(fault.property, f"{what}: {fault.message}") for fault in answer.faults]
        # Nothing judges pixels, or values of ``extra`` but the role: they need not be sent to the parent.
        shapes = [f"{image.shape[1]} x {image.shape[0]}" for image in answer.info.get("images", ())]
        kept = answer.info | {"images": shapes, "extra": {"role": answer.role}}
        trace.answers.append(replace(answer, info=kept, faults=[]))
        trace.seconds.append(seconds)
        return answer


def raised(what: str, error: BaseException) -> str:
    """``what`` raised which error, and in which line of the environment's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != HERE]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{what} raised {type(error).__name__}: {shorten(str(error), 300)}{place}"


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


def outcome(traces: Iterable[Trace]) -> list[tuple[str, list[tuple[object, ...]]]]:
    """The task and the answers of each episode, without keys and times, to compare runs of the same actions."""
    return [(trace.task, [world(answer) for answer in trace.answers]) for trace in traces]


def start(first: Trace, other: Trace) -> str:
    """How the starts of two episodes differ; empty: they do not."""
    if first.task != other.task:
        return f"seed {first.seed}: task {shorten(first.task)}, then {shorten(other.task)}"
    return difference(first.answers[:1], other.answers[:1], first)


def difference(first: Sequence[Answer], other: Sequence[Answer], trace: Trace) -> str:
    """The first difference between two runs of ``trace``; empty: there is none."""
    for t, (a, b) in enumerate(zip(first, other, strict=False)):
        if world(a) == world(b):
            continue
        names = ("observation", "admissible", "reward", "terminated", "truncated", "success", "invalid")
        name = next(name for name in names if repr(getattr(a, name)) != repr(getattr(b, name)))
        after = f"after action {t} {shorten(trace.actions[t - 1])}" if t else "at the start"
        left, right = apart(getattr(a, name), getattr(b, name))
        return f"seed {trace.seed}: {name} {after} {left}, then {right}"
    return ""


def apart(first: object, other: object) -> tuple[str, str]:
    """Both as short text, from where they differ."""
    left, right = (value if isinstance(value, str) else repr(value) for value in (first, other))
    begin = max(0, first_difference(left, right) - 10)
    dots = "..." if begin else ""
    return dots + shorten(left[begin:]), dots + shorten(right[begin:])


Status = Literal["pass", "warn", "fail", "skip"]
Verdict = tuple[Status, str]
"""a status and the evidence"""


@dataclass(frozen=True)
class Limits:
    """Seconds that a call may take, as in ``turnkey.env.step_timeout`` and ``turnkey.env.reset_timeout``."""

    step: float = 30.0
    reset: float = 120.0


@dataclass(frozen=True)
class Probe:
    """A meaningless action right after a step that earned ``last`` (0 at the start)."""

    last: float
    reward: float
    usable: bool
    """it changed nothing and the episode went on"""


class Step(NamedTuple):
    """A step of a seed's episodes; ``number`` counts from 1."""

    seed: int
    number: int


@dataclass
class Record:
    """Everything observed; filled field by field, so that a process that dies leaves what it had recorded."""

    thread_safe: bool = False
    declared_memory_mb: float | None = None
    first: list[Trace] = field(default_factory=list)
    """one episode per seed, each the first of a new instance: of those played, the one whose replay shows most"""
    fresh: list[Trace] = field(default_factory=list)
    """the same actions on further new instances"""
    displaced: list[tuple[Trace, Trace]] = field(default_factory=list)
    """episodes that others replaced in ``first``, and their actions on further new instances: unlike ``first``, they
    began before the rollouts, which may have changed what all instances of a process share"""
    group: list[Trace] = field(default_factory=list)
    """further rollouts of the same seeds"""
    texts: list[Trace] = field(default_factory=list)
    oracle: list[Trace] = field(default_factory=list)
    long: list[Trace] = field(default_factory=list)
    """an episode played to its end, if no other reached its end"""
    reused: list[Trace] = field(default_factory=list)
    """the actions of ``first`` once more, on the instance that played everything else"""
    elsewhere: dict[str, list[Trace]] = field(default_factory=dict)
    """the actions of ``first`` in other processes"""
    in_new_process: list[Trace] = field(default_factory=list)
    """the same in a new process with this one's hash seed, set if it agrees with all others but not with ``first``"""
    clones: tuple[str, list[Trace]] = ("", [])
    """how they were made; the actions of ``first`` on a clone made half-way and on what it was made from, in turn"""
    threads: list[Trace] | None = None
    probes: list[Probe] = field(default_factory=list)
    after_end: str | None = None
    """the result of a step after the end; empty: an exception, as it should be"""
    global_rng: dict[str, str] = field(default_factory=dict)
    """generator: the call that changed its state"""
    printed: str = ""
    gymnasium: tuple[str, str] | None = None
    """what gymnasium's checker said, and what it said because of the declared spaces alone; empty: nothing"""
    memory_mb: list[float] = field(default_factory=list)
    """resident, of the process and its children with one, two, ... instances"""
    faults: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = False
    making: list[float] = field(default_factory=list)
    """seconds of making each instance"""
    named_actions: Sequence[str] = ()
    """those of ``--action``"""

    def traces(self) -> list[Trace]:
        """All episodes that were played in one process, but for the threads'."""
        again = [again for _, again in self.displaced]
        return [*self.first, *self.fresh, *again, *self.group, *self.texts, *self.oracle, *self.long, *self.reused]

    def new_instances(self) -> tuple[list[Trace], list[Trace]]:
        """The first episodes of new instances, the oldest first, and the same actions on further ones."""
        pairs = [*self.displaced, *zip(self.first, self.fresh, strict=True)]
        return [first for first, _ in pairs], [other for _, other in pairs]

    def answers(self) -> list[Answer]:
        """All answers in ``traces``."""
        return [answer for trace in self.traces() for answer in trace.answers]

    def misspelt(self) -> str:
        """An unknown key of ``info`` that is almost a known one that never occurs, in a sentence; else empty."""
        keys = {key for trace in self.traces() for key in trace.keys}
        never = [key for key in KEYS if key not in keys]
        for key in sorted(keys.difference(KEYS)):
            if close := get_close_matches(key, never, n=1, cutoff=0.85):
                return f"nothing reads info[{key!r}]; did you mean info[{close[0]!r}]?"
        return ""

    def played(self) -> list[Trace]:
        """Episodes of sensible actions, each once."""
        return [trace for trace in (*self.rollouts(), *self.oracle) if trace.answers]

    def steps(self) -> Iterator[tuple[Step, Answer, str, Answer]]:
        """The steps of all episodes in ``played``: which, the state before, the action, the answer."""
        for trace in self.played():
            for t, action in enumerate(trace.actions[: len(trace.answers) - 1]):
                yield Step(trace.seed, t + 1), trace.answers[t], action, trace.answers[t + 1]

    def rollouts(self) -> list[Trace]:
        """Episodes of drawn actions."""
        return [trace for trace in (*self.first, *self.group) if trace.kind != "oracle"]

    def groups(self) -> list[list[Trace]]:
        """The rollouts of each seed."""
        by_seed: dict[int, list[Trace]] = defaultdict(list)
        for trace in self.rollouts():
            by_seed[trace.seed].append(trace)
        return list(by_seed.values())

    def anchor_rate(self, key: Callable[[Answer], object], start: bool = True) -> float:
        """Share of the steps taken in a state that two or more rollouts of the group were in; nan without rollouts."""
        shared = total = 0
        for rollouts in self.groups():
            # No action is taken after the last answer.
            seen = [[key(answer) for answer in trace.answers[0 if start else 1 : -1]] for trace in rollouts]
            rollouts_with = Counter(state for states in seen for state in set(states))
            total += sum(map(len, seen))
            shared += sum(rollouts_with[state] > 1 for states in seen for state in states)
        return shared / total if total else math.nan

    def apart_under_one_key(self) -> tuple[Step, str, str] | None:
        """Where two episodes of a seed differ at one step although no key ever changes."""
        if any(len({answer.state_key for answer in trace.answers}) > 1 for trace in self.played()):
            return None
        observations: dict[Step, str] = {}
        for step, _, _, there in self.steps():
            if not (there.invalid or there.terminated or there.truncated):
                before = observations.setdefault(step, there.observation_key)
                if before != there.observation_key:
                    return step, *apart(before, there.observation_key)
        return None

    def comes_back(self, key: Callable[[Answer], object]) -> bool:
        """Does anything occur at two different steps of a group?"""
        for rollouts in self.groups():
            steps: dict[object, int] = {}
            for trace in rollouts:
                if any(steps.setdefault(key(answer), t) != t for t, answer in enumerate(trace.answers)):
                    return True
        return False

    def memory_of_one(self) -> float:
        """What one instance takes: added to the process when thread-safe, else the whole process; nan: not measured."""
        if not self.memory_mb:
            return math.nan
        if not self.thread_safe:
            return self.memory_mb[0]
        further = len(self.memory_mb) - 1
        return (self.memory_mb[-1] - self.memory_mb[0]) / further if further else math.nan


def seconds(traces: Iterable[Trace]) -> tuple[list[float], list[float]]:
    """Seconds of every reset and of every step."""
    traces = list(traces)
    resets = [trace.seconds[0] for trace in traces if trace.seconds]
    return resets, [took for trace in traces for took in trace.seconds[1:]]
