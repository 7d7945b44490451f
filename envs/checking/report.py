"""``check`` plays an environment and reports which of the properties that training relies on it violates.

The environment's code runs in processes of its own, started as hosts start theirs: whatever it does, hang and crash
included, is a finding. Both ends of the pipe to such a process are here.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from verl_turnkey.envs import errors
from verl_turnkey.envs.catalog import ADAPTERS
from verl_turnkey.envs.checking.play import USER_ERRORS, Job, examine
from verl_turnkey.envs.checking.properties import PROPERTIES, UNREACHED, Finding, judge
from verl_turnkey.envs.checking.traces import Limits, Record, Trace, outcome, seconds
from verl_turnkey.envs.errors import EnvironmentKwargsError, MissingPackageError
from verl_turnkey.envs.hosting.processes import new_mark, start
from verl_turnkey.envs.process_tree import sweep
from verl_turnkey.envs.registry import spec_of

_GRACE_SECONDS = 3.0  # what a process may spend between two calls before it counts as lost
_OTHER_SECONDS = 600.0  # stages of many calls: gymnasium's checker, threads


def play_here(job: Job, record: Record) -> None:
    """Run ``job`` in this process, without protection from an environment that hangs or dies."""

    def tell(*message: Any) -> None:
        if message[0] == "set":
            setattr(record, *message[1:])

    with contextlib.redirect_stdout(io.StringIO()) as out:
        examine(job, tell, out.getvalue)


def play_apart(job: Job, record: Record, limits: Limits, hash_seed: int) -> list[tuple[str, str]]:
    """Run ``job`` in a new process, which fills ``record``. Returns the properties that it failed on, with evidence."""
    seconds_of = {"make": limits.reset, "reset": limits.reset, "step": limits.step, "close": limits.reset}
    ours, theirs = Pipe()
    mark = new_mark()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with theirs:
            process = start(
                __name__, mark, theirs.fileno(), (), out.fileno(), err.fileno(), PYTHONHASHSEED=str(hash_seed)
            )
        kind, what = "other", "starting"
        try:
            ours.send(job)
            stopped: list[tuple[str, str]] = []
            while True:
                allowed = seconds_of.get(kind, _OTHER_SECONDS)
                if not ours.poll(allowed + _GRACE_SECONDS):
                    key = "step" if kind == "step" else "reset"
                    advice = f"; raise turnkey.env.{key}_timeout if that is normal" if kind in seconds_of else ""
                    return [("deadline", f"{what} took longer than {allowed:g} s{advice}")]
                message = ours.recv()
                if message[0] == "call":
                    kind, what = message[1:]
                elif message[0] == "set":
                    setattr(record, *message[1:])
                elif message[0] == "elsewhere":
                    clone = Record()
                    faults = play_apart(replace(job, replays=message[1]), clone, limits, hash_seed)
                    stopped += [
                        ("clone", f"in another process: {evidence}") for _, evidence in (*faults, *clone.faults)
                    ]
                    ours.send(clone.first)
                elif message[0] == "refused":
                    raise getattr(errors, message[1])(message[2])
                elif message[0] == "bug":
                    raise RuntimeError(f"the check itself broke down, please report this:\n{message[1]}")
                else:
                    return stopped
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = process.reap()
            err.seek(0, io.SEEK_END)
            err.seek(max(0, err.tell() - 300))
            last = " ".join(err.read().decode(errors="replace").split())
            died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            return [("runs", f"the process died ({died}) in {what}" + (f"; its last words: {last}" if last else ""))]
        finally:
            ours.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.reap()
            sweep(mark)  # what the environment has started ends with it


def main(fd: int, _: Sequence[str]) -> None:
    """The new process: a job comes over the pipe ``fd``, messages go back."""
    os.set_inheritable(fd, False)
    pipe = Connection(fd)
    job = pipe.recv()

    def tell(*message: Any) -> None:
        pipe.send(message)

    def printed() -> str:
        sys.stdout.flush()
        return os.pread(1, 10_000, 0).decode(errors="replace")

    def other(traces: Sequence[Trace]) -> list[Trace]:
        tell("elsewhere", tuple(traces))
        return pipe.recv()

    try:
        examine(job, tell, printed, other)
    except USER_ERRORS as error:
        tell("refused", type(error).__name__, str(error))
    except Exception:
        tell("bug", traceback.format_exc())
    tell("done")
    os._exit(0)  # threads that an environment left behind must not keep it


@dataclass(frozen=True)
class Measures:
    """Measures besides the findings; nan where nothing was measured."""

    steps_per_second: float
    """of steps whose action was not invalid"""
    reset_ms: float
    """median"""
    reset_ms_max: float
    memory_mb: float
    """resident memory with one instance, with what the interpreter and the packages take"""
    memory_mb_further: float
    """what each further instance in the same process adds"""
    anchor_rate: float
    """share of the steps in a state, by state_key, that two or more rollouts of one seed were in; nan without keys"""
    anchor_rate_text: float
    """the same by observation: text and images"""


@dataclass(frozen=True)
class Report:
    """The outcome of a check."""

    env: Mapping[str, Any]
    """id, kwargs, package and version"""
    findings: tuple[Finding, ...]
    measures: Measures

    @property
    def failed(self) -> list[str]:
        """Names of the properties that the environment violates."""
        return [finding.property for finding in self.findings if finding.status == "fail"]

    @property
    def warned(self) -> list[str]:
        """Names of the properties that look violated, or whose violation only costs something."""
        return [finding.property for finding in self.findings if finding.status == "warn"]

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failed

    def __getitem__(self, property: str) -> Finding:
        return next(finding for finding in self.findings if finding.property == property)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what was not measured is None."""
        measures = {name: None if math.isnan(value) else value for name, value in asdict(self.measures).items()}
        findings = [asdict(finding) for finding in self.findings]
        return {"env": dict(self.env), "ok": self.ok, "failed": self.failed, "findings": findings, "measures": measures}

    def lines(self) -> list[str]:
        """The report as text: a line per property, then the measures."""
        wide = max(map(len, PROPERTIES))
        judged = [finding for finding in self.findings if finding.evidence != UNREACHED]
        arguments = f" {json.dumps(self.env['kwargs'])}" if self.env["kwargs"] else ""
        package = f" ({self.env['package']} {self.env['version']})" if self.env["version"] else ""
        lines = [f"{self.env['id']}{arguments}{package}"]
        lines += [f"{finding.status}  {finding.property:<{wide}}  {finding.evidence}" for finding in judged]
        if len(judged) < len(self.findings):
            lines.append(f"skip  {len(self.findings) - len(judged)} others: {UNREACHED}")
        else:
            m = self.measures
            lines += [
                ("" if math.isnan(m.steps_per_second) else f"{m.steps_per_second:,.0f} steps/s; ")
                + f"reset {m.reset_ms:.1f} ms, at most {m.reset_ms_max:.1f} ms; "
                f"memory {m.memory_mb:.0f} MB, {_number(m.memory_mb_further, '.1f')} MB per further instance",
                "shared-anchor rate "
                + ("" if math.isnan(m.anchor_rate) else f"{m.anchor_rate:.2f} by state_key, ")
                + f"{_number(m.anchor_rate_text, '.2f')} by observation",
            ]
        outcome = f"nothing fails, look at: {', '.join(self.warned)}" if self.warned else "all good"
        return [*lines, outcome if self.ok else f"fails: {', '.join(self.failed)}"]


def check_installed(on_start: Callable[[str], None] = lambda _: None, **budget: Any) -> tuple[list[Report], list[str]]:
    """Check each of our environments that is installed. Returns the reports, and a line per environment left out.

    ``on_start`` is called with id and kwargs before each check; ``budget``: keyword arguments of :func:`check`.
    """
    todo, left_out = samples()
    reports = []
    for env_id, kwargs in todo:
        on_start(f"{env_id} {json.dumps(kwargs)}")
        try:
            reports.append(check(env_id, kwargs, **budget))
        except MissingPackageError as error:  # its own package is there, one of those that it needs is not
            left_out.append(str(error))
    return reports, left_out


def samples() -> tuple[list[tuple[str, Mapping[str, Any]]], list[str]]:
    """Our environments that can be checked here, with the kwargs to play, and why the others cannot."""
    todo: list[tuple[str, Mapping[str, Any]]] = []
    left_out = []
    for adapter in ADAPTERS:
        missing = adapter.missing() or ([] if adapter.samples else [need.what for need in adapter.needs])
        if missing:
            left_out.append(f"{adapter.id} needs {'; '.join(missing)}")
        else:
            todo += [(adapter.id, kwargs) for kwargs in adapter.samples]
    return todo, left_out


_COLUMNS = (
    "environment",
    "kwargs",
    "package",
    "steps/s",
    "reset ms",
    "MB",
    "MB more",
    "anchors",
    "by text",
    "findings",
)


def table(reports: Sequence[Report]) -> str:
    """Reports as a markdown table."""
    rows = [list(_COLUMNS), ["---"] * len(_COLUMNS)]
    for report in reports:
        m, findings = report.measures, [f"fail: {name}" for name in report.failed]
        findings += [f"warn: {name}" for name in report.warned]
        rows.append(
            [
                report.env["id"],
                f"`{json.dumps(report.env['kwargs'])}`" if report.env["kwargs"] else "",
                f"{report.env['package'] or ''} {report.env['version'] or ''}".strip(),
                _number(m.steps_per_second, ",.0f"),
                f"{_number(m.reset_ms, '.1f')} (max {_number(m.reset_ms_max, '.1f')})",
                _number(m.memory_mb, ".0f"),
                _number(m.memory_mb_further, ".1f"),
                _number(m.anchor_rate, ".2f"),
                _number(m.anchor_rate_text, ".2f"),
                ", ".join(findings) or "none",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def check(
    env_id: str,
    kwargs: Mapping[str, Any] | None = None,
    *,
    modules: Sequence[str] = (),
    seeds: int = 3,
    rollouts: int = 8,
    seconds: float | None = None,
    steps: int = 20,
    processes: int = 3,
    step_timeout: float = 30.0,
    reset_timeout: float = 120.0,
    actions: Sequence[str] = (),
) -> Report:
    """Play the environment ``env_id`` and judge every property.

    Args:
        env_id: gymnasium id.
        kwargs: arguments of the environment, plain JSON values.
        modules: modules or ``.py`` files that register it.
        seeds: number of seeds; the seeds are 0, 1, 2, ...
        rollouts: episodes per seed, from which the shared-anchor rate is computed.
        seconds: play rollouts for this long instead, at least two per seed.
        steps: steps per rollout at most.
        processes: further processes that replay the first episodes. 0: everything runs in this very process, fast but
            without protection from an environment that hangs or dies.
        step_timeout, reset_timeout: seconds; making the environment counts as part of a reset.
        actions: valid actions to draw from, where the environment lists none.

    Raises:
        UnknownEnvironmentError, MissingPackageError, EnvironmentKwargsError, ModuleImportError: there is nothing to
            check; everything that the environment itself does wrong is a finding.
    """
    counts = {"seeds": (seeds, 1), "rollouts": (rollouts, 2), "steps": (steps, 1), "processes": (processes, 0)}
    for name, (value, least) in counts.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    for name, value in {"seconds": seconds, "step_timeout": step_timeout, "reset_timeout": reset_timeout}.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, not {value:g}")
    try:
        plain_kwargs = json.loads(json.dumps(dict(kwargs or {})))
    except (TypeError, ValueError) as error:
        raise EnvironmentKwargsError(f"the kwargs of {env_id!r} must be plain JSON values: {error}") from None
    limits = Limits(step_timeout, reset_timeout)
    job = Job(
        env_id,
        plain_kwargs,
        tuple(modules),
        tuple(range(seeds)),
        rollouts,
        steps,
        seconds=seconds,
        actions=tuple(actions),
    )
    record = Record()
    if processes:
        stopped = play_apart(job, record, limits, 0)
        if record.complete:
            stopped += _elsewhere(job, record, limits, processes)
    else:
        stopped = []
        play_here(job, record)
    return Report(spec_of(env_id, plain_kwargs), judge(record, limits, stopped), _measures(record))


def _elsewhere(job: Job, record: Record, limits: Limits, processes: int) -> list[tuple[str, str]]:
    """The first episodes once more, in all other processes at the same time."""
    replays = replace(job, replays=tuple(record.first))

    def play_in_process(hash_seed: int) -> tuple[Record, list[tuple[str, str]]]:
        replayed = Record()
        return replayed, play_apart(replays, replayed, limits, hash_seed)

    stopped: list[tuple[str, str]] = []
    with ThreadPoolExecutor(processes) as pool:
        for hash_seed, (replayed, faults) in enumerate(pool.map(play_in_process, range(1, processes + 1)), start=1):
            place = f"a process with PYTHONHASHSEED={hash_seed}"
            stopped += [("processes", f"{place}: {evidence}") for _, evidence in (*faults, *replayed.faults)]
            if replayed.complete:
                record.elsewhere[place] = replayed.first
    outcomes = [outcome(traces) for traces in record.elsewhere.values()]
    if outcomes and outcome(record.first) != outcomes[0] and all(other == outcomes[0] for other in outcomes):
        replayed, _ = play_in_process(0)  # with our own hash seed only the episodes played here before can differ
        if outcome(replayed.first) == outcomes[0]:
            record.in_new_process = replayed.first
    return stopped


def _measures(record: Record) -> Measures:
    resets, _ = seconds(record.traces())
    steps = [
        took
        for trace in record.traces()
        for answer, took in zip(trace.answers[1:], trace.seconds[1:], strict=True)
        if not answer.invalid
    ]
    memory, keys = record.memory_mb, any(answer.state_key is not None for answer in record.answers())
    return Measures(
        steps_per_second=len(steps) / sum(steps) if steps else math.nan,
        reset_ms=1000 * statistics.median(resets) if resets else math.nan,
        reset_ms_max=1000 * max(resets, default=math.nan),
        memory_mb=memory[0] if memory else math.nan,
        memory_mb_further=(memory[-1] - memory[0]) / (len(memory) - 1) if len(memory) > 1 else math.nan,
        anchor_rate=record.anchor_rate(lambda answer: answer.anchor) if keys else math.nan,
        anchor_rate_text=record.anchor_rate(lambda answer: answer.observation_key),
    )
