"""The properties that ``turnkey env-check`` judges: one function each, from what was seen to a verdict."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from verl_turnkey.envs.checking import credit_properties as credit
from verl_turnkey.envs.checking.observations import Limits, Record, Status, Verdict, seconds
from verl_turnkey.envs.checking.play import THREADS
from verl_turnkey.envs.checking.traces import Trace, View, shorten, world

UNREACHED = "the check did not get that far"


@dataclass(frozen=True)
class Finding:
    """What is the case with one property. ``skip``: it does not apply, or could not be judged."""

    property: str
    status: Status
    evidence: str


# --- it can be played ------------------------------------------------------------------------------------------------


def makes(record: Record, limits: Limits) -> Verdict:
    """The environment can be made, several times in one process."""
    return "pass", f"made {len(record.first) + len(record.fresh)} instances"


def runs(record: Record, limits: Limits) -> Verdict:
    """``reset``, ``step`` and ``close`` do not raise, answer in gymnasium's form and leave the process alive."""
    traces = record.traces()
    return "pass", f"{len(traces)} episodes, {sum(len(trace.actions) for trace in traces)} steps"


def any_text(record: Record, limits: Limits) -> Verdict:
    """No text makes ``step`` raise: empty, control characters, 100 kB."""
    return "pass", f"{sum(len(trace.actions) for trace in record.texts)} odd texts"


def deadline(record: Record, limits: Limits) -> Verdict:
    """The slowest step stays below ``turnkey.env.step_timeout``, making and resetting below ``reset_timeout``."""
    resets, steps = seconds(record.traces())
    slowest = (
        ("reset", max(resets) + max(record.making), limits.reset),
        ("step", max(steps, default=0.0), limits.step),
    )
    evidence = ", ".join(f"slowest {kind} {found:.2g} s of {limit:g} s" for kind, found, limit in slowest)
    if any(found > limit for _, found, limit in slowest):
        return "fail", f"{evidence}: raise turnkey.env.reset_timeout or step_timeout, or make it faster"
    if any(found > limit / 2 for _, found, limit in slowest):
        return "warn", f"{evidence}: little room on a busy machine"
    return "pass", evidence


def gymnasium(record: Record, limits: Limits) -> Verdict:
    """gymnasium's own ``check_env`` passes."""
    assert record.gymnasium is not None
    found, spaces = record.gymnasium
    if found:
        return "fail", found
    if spaces:
        return "warn", f"only with the spaces verl_turnkey.envs.base.AnyText; with its own: {spaces}"
    return "pass", "check_env found nothing"


# --- what it answers -------------------------------------------------------------------------------------------------


def observation(record: Record, limits: Limits) -> Verdict:
    """Observations are text."""
    lengths = [len(view.observation) for view in record.views()]
    return "pass", f"{min(lengths)} to {max(lengths)} characters"


def info(record: Record, limits: Limits) -> Verdict:
    """``info`` is a dict; where they are there, ``admissible`` is a list of str, ``success`` a bool, ``task`` text."""
    view = record.first[0].views[-1]
    absent = [name for name in ("admissible", "success") if getattr(view, name) is None]
    absent += ["task"] * (not record.first[0].task)
    return "pass", f"without {', '.join(absent)}" if absent else "with admissible, success and task"


def flags(record: Record, limits: Limits) -> Verdict:
    """An episode ends terminated or truncated, never both."""
    ends: Counter[str] = Counter()
    for trace in record.traces():
        for t, view in enumerate(trace.views):
            if view.terminated and view.truncated:
                return "fail", f"seed {trace.seed}, step {t - 1}: terminated and truncated are both set"
        if trace.ended:
            ends["terminated" if trace.views[-1].terminated else "truncated"] += 1
    return "pass", ", ".join(f"{n} {kind}" for kind, n in sorted(ends.items())) or "no episode ended"


def after_end(record: Record, limits: Limits) -> Verdict:
    """A step after the end raises, so that a loop that misses the end is noticed."""
    if record.after_end is None:
        return "skip", "no episode ended; more --steps may help"
    if record.after_end:
        return "warn", f"a step after the end gave {record.after_end}; raise an exception instead"
    return "pass", "it raises"


# --- one seed, one start ---------------------------------------------------------------------------------------------


def group(record: Record, limits: Limits) -> Verdict:
    """Instances that are reset with one seed show one task and one first observation."""
    for one, other in zip(record.first, record.fresh, strict=True):
        if difference := _start(one, other):
            return "fail", f"two new instances, {difference}; draw from self.np_random only"
    return "pass", f"{len(record.first)} seeds"


def seed(record: Record, limits: Limits) -> Verdict:
    """The same seed and actions give the same episode on another new instance."""
    return _same(record.first, record.fresh, "two new instances", "draw from self.np_random only")


def reuse(record: Record, limits: Limits) -> Verdict:
    """They also do on an instance that has played other seeds before: ``reset`` leaves nothing behind."""
    first = {trace.seed: trace for trace in record.first}
    for trace in (*record.group, *record.oracle, *record.texts):
        if difference := _start(first[trace.seed], trace):
            return "fail", f"an instance that had played before, {difference}; reset must restore everything"
    return _same(record.first, record.reused, "an instance that had played before", "reset must restore everything")


def processes(record: Record, limits: Limits) -> Verdict:
    """They also do in other processes, whose ``PYTHONHASHSEED`` differs."""
    for place, traces in record.elsewhere.items():
        found = _same(record.first, traces, place, "something depends on hash() or on the order of a set")
        if found[0] != "pass":
            return found
    return ("pass", f"{len(record.elsewhere)} processes") if record.elsewhere else ("skip", "one process only")


def seeds_differ(record: Record, limits: Limits) -> Verdict:
    """Different seeds give different starts."""
    if len(record.first) < 2:
        return "skip", "one seed only"
    starts = {(trace.task, trace.views[0].observation, trace.views[0].state_key) for trace in record.first}
    if len(starts) == 1:
        return "warn", f"{len(record.first)} seeds, one start: right for a single fixed task, else the seed is not used"
    return "pass", f"{len(starts)} starts of {len(record.first)} seeds"


# --- neighbours ------------------------------------------------------------------------------------------------------


def global_rng(record: Record, limits: Limits) -> Verdict:
    """The process-wide generators of ``random`` and ``numpy`` are neither seeded nor used."""
    if not record.global_rng:
        return "pass", "left alone"
    where = ", ".join(f"{name} in {what}" for name, what in record.global_rng.items())
    if record.thread_safe:
        return "fail", f"{where}: episodes in one process disturb each other, thread_safe must be False"
    return "warn", f"{where}: it needs a process of its own, keep metadata['thread_safe'] False"


def stdout(record: Record, limits: Limits) -> Verdict:
    """Nothing is printed."""
    if record.printed:
        return "warn", f"prints {shorten(record.printed, 60)}: it drowns the training log"
    return "pass", "prints nothing"


def threads(record: Record, limits: Limits) -> Verdict:
    """With ``metadata["thread_safe"]``: several instances in threads of one process play as they do one by one."""
    if record.threads is None:
        return "skip", "metadata['thread_safe'] is not True: every instance gets a process of its own"
    first = {trace.seed: trace for trace in record.first}
    found = _same([first[trace.seed] for trace in record.threads], record.threads, f"{THREADS} threads", "")
    if found[0] == "fail":
        return "fail", found[1] + "metadata['thread_safe'] must be False"
    return "pass", f"{THREADS} threads, {len(record.threads)} episodes"


def memory(record: Record, limits: Limits) -> Verdict:
    """``metadata["memory_mb"]`` is what an instance takes: added to a process, or as a process when not thread-safe."""
    declared = record.declared_memory_mb
    found = record.memory_of_one()
    if declared is None or math.isnan(found) or not record.elsewhere:
        return "skip", "not declared, or not measured in a process of its own"
    evidence = f"{found:.1f} MB of {declared:g} MB declared"
    return ("warn", f"{evidence}: raise metadata['memory_mb']") if found > declared else ("pass", evidence)


# --- what the judges share -------------------------------------------------------------------------------------------


def _start(one: Trace, other: Trace) -> str:
    if one.task != other.task:
        return f"seed {one.seed}: task {shorten(one.task)}, then {shorten(other.task)}"
    return _difference(one.views[:1], other.views[:1], one)


def _difference(one: Sequence[View], other: Sequence[View], trace: Trace) -> str:
    for t, (a, b) in enumerate(zip(one, other, strict=False)):
        if world(a) == world(b):
            continue
        names = ("observation", "admissible", "reward", "terminated", "truncated", "success", "invalid")
        name = next(name for name in names if repr(getattr(a, name)) != repr(getattr(b, name)))
        after = f"after action {t} {shorten(trace.actions[t - 1])}" if t else "at the start"
        left, right = _apart(getattr(a, name), getattr(b, name))
        return f"seed {trace.seed}: {name} {after} {left}, then {right}"
    return ""


def _apart(one: object, other: object) -> tuple[str, str]:
    """Both as short text, from where they differ."""
    left, right = (value if isinstance(value, str) else repr(value) for value in (one, other))
    same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    begin = max(0, same - 10)
    return tuple(("..." if begin else "") + shorten(text[begin:]) for text in (left, right))  # type: ignore[return-value]


def _same(ones: Iterable[Trace], others: Iterable[Trace], where: str, advice: str) -> Verdict:
    steps = 0
    for one, other in zip(ones, others, strict=True):
        steps += len(one.actions)
        if difference := _start(one, other) or _difference(one.views, other.views, one):
            return "fail", f"{where}, {difference}; {advice}"
        if len(one.views) != len(other.views):
            found = f"{len(one.views) - 1} steps, then {len(other.views) - 1}"
            return "fail", f"{where}, seed {one.seed}: {found}; {advice}"
    return "pass", f"{steps} steps alike"


# --- all of them -----------------------------------------------------------------------------------------------------

PROPERTIES: dict[str, Callable[[Record, Limits], Verdict]] = {
    judge.__name__: judge
    for judge in (
        makes,
        runs,
        any_text,
        deadline,
        gymnasium,
        observation,
        info,
        flags,
        after_end,
        group,
        seed,
        reuse,
        processes,
        seeds_differ,
        credit.state_key,
        credit.key_stable,
        credit.key_coarse,
        credit.key_repeats,
        credit.reward,
        credit.reward_per_step,
        credit.admissible,
        credit.invalid_text,
        credit.oracle,
        global_rng,
        stdout,
        threads,
        memory,
    )
}
# A violation of the first makes judging the second pointless.
_AFTER = {
    "any_text": ("runs",),
    "gymnasium": ("runs",),
    "oracle": ("runs",),
    "group": ("runs",),
    "seed": ("runs", "group"),
    "reuse": ("runs", "group", "seed"),
    "processes": ("runs", "group", "seed"),
    "threads": ("runs", "group", "seed"),
    "key_stable": ("state_key", "group", "seed"),
    "key_coarse": ("state_key", "key_stable", "group", "seed"),
    "key_repeats": ("state_key", "key_stable"),
}


def judge(record: Record, limits: Limits, stopped: Sequence[tuple[str, str]] = ()) -> tuple[Finding, ...]:
    """All properties in order. ``stopped``: properties that the parent process found violated, with evidence."""
    faults: dict[str, list[str]] = defaultdict(list)
    for name, evidence in (*stopped, *record.faults, *(fault for trace in record.traces() for fault in trace.faults)):
        faults[name].append(evidence)
    # Whatever happens only in other places is a fault of being there.
    faults["threads"] += [f"{THREADS} threads: {evidence}" for t in record.threads or () for _, evidence in t.faults]
    for place, traces in record.elsewhere.items():
        faults["processes"] += [f"{place}: {evidence}" for trace in traces for _, evidence in trace.faults]
    findings: dict[str, Finding] = {}
    for name, ask in PROPERTIES.items():
        if blocking := next((other for other in _AFTER.get(name, ()) if findings[other].status == "fail"), None):
            status, evidence = "skip", f"not judged while `{blocking}` fails"
        elif faults[name]:
            more = len(set(faults[name])) - 1
            status, evidence = "fail", faults[name][0] + (f" (and {more} more)" if more else "")
        elif not record.complete and name != "makes":
            status, evidence = "skip", UNREACHED
        else:
            status, evidence = ask(record, limits)
        findings[name] = Finding(name, status, evidence)  # type: ignore[arg-type]
    return tuple(findings.values())
