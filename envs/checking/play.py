"""What ``turnkey env-check`` does with an environment: plays it in every way, and records what it observes.

This half runs with the environment, in a process of its own (``report``), and judges nothing (``properties`` do).
Whatever an environment does ends up as plain data in a ``Record``; only a hanging or dying process is the parent's to
notice.

Clones are made as hosts make them: a copy where the class offers one; else another instance, which is reset and plays
the same actions, in the process of the original where the class is thread-safe, and in its own where it is not.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env

from verl_turnkey.envs import errors
from verl_turnkey.envs.answers import short_repr
from verl_turnkey.envs.base import AnyText, copied, offers_copies
from verl_turnkey.envs.checking.traces import (
    Calls,
    Env,
    Probe,
    Tell,
    Trace,
    drawn,
    play,
    raised,
    replay,
    scripted,
    shorten,
)
from verl_turnkey.envs.registry import make
from verl_turnkey.envs.user_modules import import_modules


def tree_memory_mb() -> float:
    """Resident memory of this process and all its children in MB; nan where /proc is not there.

    What the children share (the code of a browser, say) counts once.
    """
    parents: dict[int, int] = {}
    pages: dict[int, tuple[int, int]] = {}
    try:
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it may have ended
                with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/statm") as statm:
                    parents[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
                    _, resident, shared, *_ = map(int, statm.read().split())
                pages[int(name)] = (resident, shared)
    except OSError:
        return math.nan
    tree, todo = [], [os.getpid()]
    while todo:
        tree.append(todo.pop())
        todo += [child for child, parent in parents.items() if parent == tree[-1]]
    children = [pages[process] for process in tree[1:] if process in pages]
    private = sum(resident - shared for resident, shared in children)
    common = max((shared for _, shared in children), default=0)
    return (pages.get(tree[0], (math.nan, 0))[0] + private + common) * os.sysconf("SC_PAGE_SIZE") / 2**20


# --- clones in the middle of an episode: does each continue independently from the same state? ------------------------

Elsewhere = Callable[[Sequence[Trace]], list[Trace]]
"""plays episodes once more in another process"""


def clones(
    make: Callable[[], Env], kind: type[Env], first: Sequence[Trace], calls: Calls, other: Elsewhere | None
) -> tuple[str, list[Trace]]:
    """How a host clones a ``kind``, and the episodes ``first`` on a clone made half-way and on its original, in turn.

    With replays, which take their time, it is the longest of them alone, and without another process none.
    """
    longest = max(first, key=lambda trace: len(trace.actions))
    if not (kind.metadata or {}).get("thread_safe", False):
        ends = elsewhere(make, longest, calls, other) if other else []
        return "a reset and a replay in another process", ends
    if offers_copies(kind):
        return "a copy", [end for trace in first for end in in_process(make, trace, calls, copies=True)]
    return "a reset and a replay", in_process(make, longest, calls, copies=False)


def in_process(make: Callable[[], Env], trace: Trace, calls: Calls, copies: bool) -> list[Trace]:
    """The episode ``trace`` on a clone of this process made half-way, then on the original.

    Before that, another clone repeats the first action over and over, which must affect neither of them. Without
    ``copies`` clones are instances that play the first half of the episode while the original waits.
    """
    original, half = _half(make, trace, calls)

    def cloned() -> tuple[Env, Trace]:
        if not copies:
            return _half(make, trace, calls)
        return calls("reset", f"a copy after step {len(half.actions)}", lambda: copied(original))[0], deepcopy(half)

    (astray, path), (clone, same) = cloned(), cloned()
    _go_on(astray, path, _astray(trace, half), calls)
    ends = [_go_on(clone, same, trace.actions, calls), _go_on(original, half, trace.actions, calls)]
    for env in (astray, clone, original):
        env.close()
    return ends


def elsewhere(make: Callable[[], Env], trace: Trace, calls: Calls, play: Elsewhere) -> list[Trace]:
    """The same with an instance of another process, which has gone astray in an episode before."""
    original, half = _half(make, trace, calls)
    clones = play([replace(trace, actions=_astray(trace, half)), trace])
    end = _go_on(original, half, trace.actions, calls)
    original.close()
    return [clones[-1], end] if clones else []


def _half(make: Callable[[], Env], trace: Trace, calls: Calls) -> tuple[Env, Trace]:
    env = make()
    return env, replay(env, replace(trace, actions=trace.actions[: len(trace.actions) // 2]), calls)


def _astray(trace: Trace, half: Trace) -> list[str]:
    return half.actions + trace.actions[:1] * (len(trace.actions) - len(half.actions))


def _go_on(env: Env, trace: Trace, actions: Sequence[str], calls: Calls) -> Trace:
    """Play the rest of ``actions``, of which ``trace`` has the first ones."""
    for action in actions[len(trace.actions) :]:
        if not (trace.broken or trace.ended):
            calls.step(env, trace, action)
    return trace


# --- the stages of a check --------------------------------------------------------------------------------------------

THREADS = 4
USER_ERRORS = (
    errors.UnknownEnvironmentError,
    errors.MissingPackageError,
    errors.EnvironmentKwargsError,
    errors.ModuleImportError,
)
LONG_SECONDS = 3.0
MOST_ROLLOUTS = 1000
"""per seed, however fast they are: all are kept in memory until they are judged"""
PROBE = "qzxv wplk"
"""a text that means nothing anywhere"""
TEXTS = (PROBE, "", "   ", "\x00\x1b[31m\u202e\u2603", "</action>{0}%s[]\\boxed{", "x" * 100_000)


@dataclass(frozen=True)
class Job:
    """What to play. ``replays``: only these, as another process does."""

    env_id: str
    kwargs: Mapping[str, Any]
    modules: Sequence[str]
    seeds: Sequence[int]
    rollouts: int
    steps: int
    replays: Sequence[Trace] = ()
    seconds: float | None = None
    """how long to play rollouts, instead of ``rollouts`` per seed"""
    actions: Sequence[str] = ()
    """valid actions to draw besides the oracle's, if the environment lists none"""

    def further_rollouts(self) -> Iterator[int]:
        """Numbers of the rollouts after the first of each seed, which was played before; at least one."""
        until = time.monotonic() + (self.seconds or 0.0)
        for rollout in range(1, self.rollouts if self.seconds is None else MOST_ROLLOUTS):
            yield rollout
            if self.seconds is not None and time.monotonic() >= until:
                return


class _Enough(Exception):
    """The environment cannot be played any further; the record says why."""


def examine(job: Job, tell: Tell, printed: Callable[[], str], other: Elsewhere | None = None) -> None:
    """Do the job. ``tell("set", name, value)`` fills the record, ``tell("call", kind, what)`` announces a call.

    ``other``: plays episodes once more in another process; None: there is this one alone.

    Raises the errors of ``make`` that are the user's, not the environment's: unknown id, package, arguments.
    """
    import_modules(job.modules, "--module", ("envs",))
    examination = _Examination(job, tell, other)
    with contextlib.suppress(_Enough):
        if job.replays:
            examination.repeat()
        else:
            examination.run(printed)


class _Examination:
    """All stages, in the order that tells most: the first episodes are played by instances that nothing has used."""

    def __init__(self, job: Job, tell: Tell, other: Elsewhere | None) -> None:
        self.job, self.tell, self.other = job, tell, other
        self.calls = Calls(tell)
        self.faults: list[tuple[str, str]] = []
        self.making: list[float] = []

    def note(self, name: str, value: Any) -> Any:
        self.tell("set", name, value)
        return value

    @contextlib.contextmanager
    def guarded(self, property: str, what: str) -> Iterator[None]:
        try:
            yield
        except USER_ERRORS:
            raise
        except (Exception, SystemExit) as error:
            self.faults.append((property, raised(what, error)))
            self.note("faults", self.faults)
            raise _Enough from None

    def make(self) -> Env:
        with self.guarded("makes", "making the environment"):
            env, seconds = self.calls("make", "make", lambda: make(self.job.env_id, self.job.kwargs))
        self.making.append(seconds)
        self.note("making", self.making)
        return env

    def close(self, env: Env) -> None:
        with self.guarded("runs", "close()"):
            self.calls("close", "close()", env.close)

    def run(self, printed: Callable[[], str]) -> None:
        job, calls, note = self.job, self.calls, self.note
        envs = [self.make()]
        calls.global_rng.clear()  # the effects of importing a package are not judged
        before = len(printed())
        metadata = envs[0].unwrapped.metadata or {}
        thread_safe = note("thread_safe", bool(metadata.get("thread_safe", False)))
        note("declared_memory_mb", metadata.get("memory_mb"))
        note("named_actions", job.actions)

        first, memory = [], []
        for number, seed in enumerate(job.seeds):
            if number:
                envs.append(self.make())
            first.append(play(envs[-1], seed, "admissible", drawn(_rng(seed, 0), job.actions), job.steps, calls))
            note("first", first)
            memory.append(tree_memory_mb())
        note("memory_mb", memory)
        if any(not trace.answers for trace in first):
            return  # not even a reset: nothing more to learn
        for env in envs[1:]:
            self.close(env)
        env = envs[0]
        oracle = note("oracle", self.oracle(env))
        vocabulary = sorted({*job.actions, *(action for trace in oracle for action in trace.actions)})
        group = [
            play(env, seed, "admissible", drawn(_rng(seed, rollout), vocabulary), job.steps, calls)
            for rollout in job.further_rollouts()
            for seed in job.seeds
        ]
        pristine = first
        first, group = self.most_telling(pristine, oracle, group)
        note("group", group)
        note("first", first)
        note("fresh", [self.again(trace) for trace in first])
        displaced = [trace for trace, best in zip(pristine, first, strict=True) if best is not trace]
        note("displaced", [(trace, self.again(trace)) for trace in displaced])
        with self.guarded("clone", "a clone made half-way"):
            note("clones", clones(self.make, type(env.unwrapped), first, calls, self.other))

        texts = note("texts", [trace for seed in job.seeds for trace in _texts(env, seed, calls)])
        note("reused", [replay(env, trace, calls) for trace in reversed(first)][::-1])
        sensible = [*oracle, *first, *group]
        note("probes", _probes(env, sensible, calls))
        ended = next((trace for trace in (*sensible, *texts) if trace.ended), None)
        if ended is None:
            ended = _long(env, job.seeds[0], vocabulary, calls)
            note("long", [ended])
        note("after_end", _after_end(env, ended, calls))
        note("global_rng", dict(calls.global_rng))
        note("printed", printed()[before:])
        self.close(env)
        if thread_safe:
            self.tell("call", "other", f"{THREADS} threads")
            with self.guarded("threads", f"one of {THREADS} threads"):
                note("threads", _threads(job, first))
        self.tell("call", "other", "gymnasium's checker")
        with self.guarded("gymnasium", "making the environment once more"):
            note("gymnasium", _gymnasium(job))
        note("complete", True)

    def most_telling(
        self, first: Sequence[Trace], oracle: Sequence[Trace], group: Sequence[Trace]
    ) -> tuple[list[Trace], list[Trace]]:
        """Move each seed's episode with the most distinct valid actions to ``first``. Returns ``first`` and ``group``.

        Replays compare only what valid actions show. It is replayed on a new instance, and each drawn episode stays in
        one of the two lists, once.
        """
        best, others = [], list(group)
        for trace in first:
            candidates = [trace, *(t for t in (*oracle, *group) if t.seed == trace.seed and not t.broken)]
            choice = max(candidates, key=lambda candidate: len(candidate.valid_actions()))
            replayed = trace if choice is trace else self.again(choice)
            if not replayed.answers:  # the server may be out of sessions: keep the original episode
                self.faults += replayed.faults
                self.note("faults", self.faults)
                replayed = trace
            best.append(replayed)
            if replayed is not trace:
                others = [other for other in others if other is not choice] + [trace]
        return best, others

    def again(self, trace: Trace) -> Trace:
        """Replay the actions of ``trace`` on a new instance."""
        env = self.make()
        replayed = replay(env, trace, self.calls)
        self.close(env)
        return replayed

    def repeat(self) -> None:
        """What another process does: the same episodes, on an instance of its own."""
        env = self.make()
        self.note("first", [replay(env, trace, self.calls) for trace in self.job.replays])
        self.close(env)
        self.note("complete", True)

    def oracle(self, env: Env) -> list[Trace]:
        find = getattr(env.unwrapped, "oracle", None)
        traces: list[Trace] = []
        if not callable(find):
            return traces
        for seed in self.job.seeds:
            with self.guarded("oracle", f"oracle() after reset(seed={seed})"):
                self.calls("reset", f"reset(seed={seed})", lambda seed=seed: env.reset(seed=seed))
                actions, _ = self.calls("reset", f"oracle() (seed {seed})", find)
            if actions is None:
                continue
            listed = [*actions] if isinstance(actions, Iterable) and not isinstance(actions, str) else [actions]
            if isinstance(actions, str) or not all(isinstance(action, str) for action in listed):
                wrong = f"oracle() (seed {seed}) must return a list of str, or None, not {short_repr(actions)}"
                self.faults.append(("oracle", wrong))
                self.note("faults", self.faults)
                continue
            traces.append(play(env, seed, "oracle", scripted(listed), len(listed), self.calls))
        return traces


def _rng(*parts: Any) -> random.Random:
    return random.Random("/".join(map(str, parts)))  # from text: the same in every process


def _texts(env: Env, seed: int, calls: Calls) -> list[Trace]:
    """Texts that are not actions; each new episode goes on where the last one was ended by one."""
    left = [*TEXTS, "".join(_rng(seed, "text").choices("bcdfghjklmnpqrstvwxz ", k=30))]
    traces: list[Trace] = []
    while left:
        trace = play(env, seed, "text", scripted(left), len(left), calls)
        traces.append(trace)
        if not trace.actions:
            break
        left = left[len(trace.actions) :]
    return traces


def _probes(env: Env, traces: Sequence[Trace], calls: Calls) -> list[Probe]:
    """What does a meaningless action earn at the start, and what right after a reward?"""

    def levels(trace: Trace) -> int:
        return len({answer.reward for answer in trace.answers[:-1] if answer.reward})

    trace = max(traces, key=levels)
    if not levels(trace):
        return []
    probes: list[Probe] = []
    again = Trace(trace.seed, "text")
    calls.reset(env, again)
    for action in [None, *trace.actions[:-1]]:
        if action is not None:
            calls.step(env, again, action)
        if again.broken or again.ended or len(probes) == 5:
            break
        here = again.answers[-1]
        if action is None or here.reward:
            calls.step(env, again, PROBE)
            if again.broken:
                break
            there = again.answers[-1]
            still = there.state_key == here.state_key if here.state_key is not None else there.invalid
            probes.append(Probe(here.reward, there.reward, still and not again.ended))
    return probes


def _long(env: Env, seed: int, vocabulary: Sequence[str], calls: Calls) -> Trace:
    """An episode until its end, or for a few seconds."""
    choose, until = drawn(_rng(seed, "long"), vocabulary), time.monotonic() + LONG_SECONDS
    return play(env, seed, "admissible", lambda trace: choose(trace) if time.monotonic() < until else None, 1000, calls)


def _after_end(env: Env, trace: Trace, calls: Calls) -> str | None:
    again = replay(env, trace, calls)
    if not again.ended:
        return None
    try:
        answer, _ = calls("step", "step after the end", lambda: env.step(again.actions[-1]))
    except (Exception, SystemExit):
        return ""
    return short_repr(answer)


def _threads(job: Job, first: Sequence[Trace]) -> list[Trace]:
    """Several instances at once; every thread plays every seed's episode, each in another order."""
    barrier, interval = threading.Barrier(THREADS), sys.getswitchinterval()
    calls = Calls(lambda *_: None, watch=False)

    def play_all(number: int) -> list[Trace]:
        try:
            env = make(job.env_id, job.kwargs)
        except BaseException:
            barrier.abort()  # the others need not wait for this one
            raise
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait()
        order, until = [*first[number % len(first) :], *first[: number % len(first)]], time.monotonic() + LONG_SECONDS
        traces = [replay(env, trace, calls) for trace in order]
        for trace in order * 9:
            if time.monotonic() < until:
                traces.append(replay(env, trace, calls))
        env.close()
        return traces

    sys.setswitchinterval(1e-5)  # as many thread switches as possible
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return [trace for traces in pool.map(play_all, range(THREADS)) for trace in traces]
    finally:
        sys.setswitchinterval(interval)


def _gymnasium(job: Job) -> tuple[str, str]:
    """What gymnasium's checker finds, and what it finds in the declared spaces only: nothing here reads them."""
    own_spaces: set[str] = set()

    def complaint(any_text: bool) -> str:
        env = make(job.env_id, job.kwargs).unwrapped
        for name in ("observation_space", "action_space"):
            if getattr(env, name, None) is not None:
                own_spaces.add(name)
            if any_text or name not in own_spaces:
                setattr(env, name, AnyText())
        step = env.step

        def with_bools(action: str) -> Any:
            return tuple(part.item() if isinstance(part, np.bool_) else part for part in step(action))

        env.step = with_bools  # the checker mistakes numpy's False for an episode's end
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check_env(env, skip_render_check=True)
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {shorten(str(error), 300)}"
        finally:
            with contextlib.suppress(Exception):  # close() is judged elsewhere
                env.close()
        return ""

    declared = complaint(any_text=False)
    if not (declared and own_spaces):
        return declared, ""
    rest = complaint(any_text=True)
    return rest, "" if rest else declared
