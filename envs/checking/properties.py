"""The properties that ``turnkey env-check`` judges: one function each, from what was seen to a verdict."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_turnkey.envs.checking import credit_properties as credit
from verl_turnkey.envs.checking import seed_properties as seeds
from verl_turnkey.envs.checking.observations import Limits, Record, Status, Verdict, seconds
from verl_turnkey.envs.checking.play import THREADS
from verl_turnkey.envs.checking.traces import shorten

UNREACHED = "the check did not get that far"


@dataclass(frozen=True)
class Finding:
    """The verdict on one property. ``skip``: it does not apply, or could not be judged."""

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
    evidence = ", ".join(f"slowest {kind} {duration:.2g} s of {limit:g} s" for kind, duration, limit in slowest)
    if any(duration > limit for _, duration, limit in slowest):
        return "fail", f"{evidence}: raise turnkey.env.reset_timeout or step_timeout, or make it faster"
    if any(duration > limit / 2 for _, duration, limit in slowest):
        return "warn", f"{evidence}: little room on a busy machine"
    return "pass", evidence


def gymnasium(record: Record, limits: Limits) -> Verdict:
    """gymnasium's own ``check_env`` passes."""
    assert record.gymnasium is not None
    fault, spaces = record.gymnasium
    if fault:
        return "fail", fault
    if spaces:
        return "warn", f"only with the spaces verl_turnkey.envs.base.AnyText; with its own: {spaces}"
    return "pass", "check_env found nothing"


# --- what it answers -------------------------------------------------------------------------------------------------


def observation(record: Record, limits: Limits) -> Verdict:
    """Observations are text."""
    lengths = [len(answer.observation) for answer in record.answers()]
    return "pass", f"{min(lengths)} to {max(lengths)} characters"


def info(record: Record, limits: Limits) -> Verdict:
    """``info`` is a dict; where they are there, ``admissible`` is a list of str, ``success`` a bool, ``task`` text."""
    answer = record.first[0].answers[-1]
    absent = [name for name in ("admissible", "success") if getattr(answer, name) is None]
    absent += ["task"] * (not record.first[0].task)
    return "pass", f"without {', '.join(absent)}" if absent else "with admissible, success and task"


def flags(record: Record, limits: Limits) -> Verdict:
    """An episode ends terminated or truncated, never both."""
    ends: Counter[str] = Counter()
    for trace in record.traces():
        for t, answer in enumerate(trace.answers):
            if answer.terminated and answer.truncated:
                return "fail", f"seed {trace.seed}, step {t - 1}: terminated and truncated are both set"
        if trace.ended:
            ends["terminated" if trace.answers[-1].terminated else "truncated"] += 1
    return "pass", ", ".join(f"{n} {kind}" for kind, n in sorted(ends.items())) or "no episode ended"


def after_end(record: Record, limits: Limits) -> Verdict:
    """A step after the end raises, so that a loop that misses the end is noticed."""
    if record.after_end is None:
        return "skip", "no episode ended; more --steps may help"
    if record.after_end:
        return "warn", f"a step after the end gave {record.after_end}; raise an exception instead"
    return "pass", "it raises"


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


def memory(record: Record, limits: Limits) -> Verdict:
    """``metadata["memory_mb"]`` is what an instance takes: added to a process, or as a process when not thread-safe."""
    declared = record.declared_memory_mb
    measured = record.memory_of_one()
    if declared is None or math.isnan(measured) or not record.elsewhere:
        return "skip", "not declared, or not measured in a process of its own"
    evidence = f"{measured:.1f} MB of {declared:g} MB declared"
    return ("warn", f"{evidence}: raise metadata['memory_mb']") if measured > declared else ("pass", evidence)


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
        seeds.group,
        seeds.seed,
        seeds.reuse,
        seeds.processes,
        seeds.seeds_differ,
        credit.state_key,
        credit.key_stable,
        credit.key_coarse,
        credit.key_repeats,
        credit.roles,
        credit.reward,
        credit.reward_per_step,
        credit.admissible,
        credit.invalid_text,
        credit.oracle,
        global_rng,
        stdout,
        seeds.threads,
        seeds.clone,
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
    "clone": ("runs", "group", "seed", "threads"),
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
        findings[name] = Finding(name, status, evidence)
    return tuple(findings.values())
