"""Properties of ``turnkey env-check`` about repetition: one seed and the same actions give one episode, anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.checking.observations import Limits, Record, Verdict
from verl_turnkey.envs.checking.play import THREADS
from verl_turnkey.envs.checking.traces import Trace, shorten, world


def group(record: Record, limits: Limits) -> Verdict:
    """Instances that are reset with one seed show one task and one first observation."""
    for first, other in zip(record.first, record.fresh, strict=True):
        if difference := _start(first, other):
            return "fail", f"two new instances, {difference}; draw from self.np_random only"
    return "pass", f"{len(record.first)} seeds"


def seed(record: Record, limits: Limits) -> Verdict:
    """The same seed and actions give the same episode on another new instance."""
    return _same(record.first, record.fresh, "two new instances", "draw from self.np_random only")


def reuse(record: Record, limits: Limits) -> Verdict:
    """The same on an instance that has played other seeds before: ``reset`` leaves nothing behind."""
    first = {trace.seed: trace for trace in record.first}
    for trace in (*record.group, *record.oracle, *record.texts):
        if difference := _start(first[trace.seed], trace):
            return "fail", f"an instance that had played before, {difference}; reset must restore everything"
    return _same(record.first, record.reused, "an instance that had played before", "reset must restore everything")


def processes(record: Record, limits: Limits) -> Verdict:
    """The same in other processes, whose ``PYTHONHASHSEED`` differs."""
    for place, traces in record.elsewhere.items():
        verdict = _same(record.first, traces, place, "something depends on hash() or on the order of a set")
        if verdict[0] != "pass":
            return verdict
    return ("pass", f"{len(record.elsewhere)} processes") if record.elsewhere else ("skip", "one process only")


def seeds_differ(record: Record, limits: Limits) -> Verdict:
    """Different seeds give different starts."""
    if len(record.first) < 2:
        return "skip", "one seed only"
    starts = {(trace.task, trace.answers[0].observation_key, trace.answers[0].state_key) for trace in record.first}
    if len(starts) == 1:
        return "warn", f"{len(record.first)} seeds, one start: right for a single fixed task, else the seed is not used"
    return "pass", f"{len(starts)} starts of {len(record.first)} seeds"


def clone(record: Record, limits: Limits) -> Verdict:
    """A clone made in the middle goes on as the original does, and neither disturbs the other."""
    how, clones = record.clones
    if not clones:
        return "skip", "one process only"
    first = {trace.seed: trace for trace in record.first}
    advice = f"it was made by {how}, which must take everything along and share nothing"
    for number, who in enumerate(("a clone made half-way", "what was cloned half-way")):
        verdict = _same([first[trace.seed] for trace in clones[number::2]], clones[number::2], who, advice)
        if verdict[0] != "pass":
            return verdict
    return "pass", f"by {how}: {len(clones) // 2} made, {verdict[1]}"


def threads(record: Record, limits: Limits) -> Verdict:
    """With ``metadata["thread_safe"]``: several instances in threads of one process play as they do one by one."""
    if record.threads is None:
        return "skip", "metadata['thread_safe'] is not True: every instance gets a process of its own"
    first = {trace.seed: trace for trace in record.first}
    verdict = _same([first[trace.seed] for trace in record.threads], record.threads, f"{THREADS} threads", "")
    if verdict[0] == "fail":
        return "fail", verdict[1] + "metadata['thread_safe'] must be False"
    return "pass", f"{THREADS} threads, {len(record.threads)} episodes"


# --- what they share -------------------------------------------------------------------------------------------


def _start(first: Trace, other: Trace) -> str:
    if first.task != other.task:
        return f"seed {first.seed}: task {shorten(first.task)}, then {shorten(other.task)}"
    return _difference(first.answers[:1], other.answers[:1], first)


def _difference(first: Sequence[Answer], other: Sequence[Answer], trace: Trace) -> str:
    for t, (a, b) in enumerate(zip(first, other, strict=False)):
        if world(a) == world(b):
            continue
        names = ("observation", "admissible", "reward", "terminated", "truncated", "success", "invalid")
        name = next(name for name in names if repr(getattr(a, name)) != repr(getattr(b, name)))
        after = f"after action {t} {shorten(trace.actions[t - 1])}" if t else "at the start"
        left, right = _apart(getattr(a, name), getattr(b, name))
        return f"seed {trace.seed}: {name} {after} {left}, then {right}"
    return ""


def _apart(first: object, other: object) -> tuple[str, str]:
    """Both as short text, from where they differ."""
    left, right = (value if isinstance(value, str) else repr(value) for value in (first, other))
    same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    begin = max(0, same - 10)
    dots = "..." if begin else ""
    return dots + shorten(left[begin:]), dots + shorten(right[begin:])


def _same(originals: Iterable[Trace], others: Iterable[Trace], where: str, advice: str) -> Verdict:
    steps = 0
    for first, other in zip(originals, others, strict=True):
        steps += len(first.actions)
        if difference := _start(first, other) or _difference(first.answers, other.answers, first):
            return "fail", f"{where}, {difference}; {advice}"
        if len(first.answers) != len(other.answers):
            lengths = f"{len(first.answers) - 1} steps, then {len(other.answers) - 1}"
            return "fail", f"{where}, seed {first.seed}: {lengths}; {advice}"
    return "pass", f"{steps} steps alike"
