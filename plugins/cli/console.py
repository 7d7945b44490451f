"""The console of ``turnkey train`` and ``resume``: the header, the phases of the start, warnings, steps, the outcome.

All output of verl, Ray and vLLM goes to ``train.log`` in the run's folder. The run writes that file itself and does not
depend on this process, which only reads it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import typer

from verl_turnkey.plugins.cli.packages import turnkey
from verl_turnkey.plugins.view.runs import CONSOLE, VALIDATION, console_metrics

RAY = re.compile(r"^(?:\x1b\[\d+m)?\([\w.:]+ pid=\d+(?:, ip=[\w.:]+)?\)(?:\x1b\[0m)? ?")
"""Ray's prefix of a worker's lines"""
OURS = re.compile(r"(?:WARNING|ERROR):verl_turnkey\S*:(.*)")
HEADER = re.compile(r"verl-turnkey \S+: this run$")
STEPS = re.compile(r"  steps +(\d+)")
FAILURE_LINES = 40
LINE_EVERY = 60.0
"""seconds without output after which a non-terminal gets a progress line"""
COLUMNS = (
    ("success", "episode/success_rate", "{:.2f}"),
    ("env return", "episode/env_return/mean", "{:.2f}"),
    ("composed return", "episode/composed_return/mean", "{:.2f}"),
    ("turns", "episode/length/mean", "{:.1f}"),
    ("invalid", "episode/invalid_rate", "{:.0%}"),
    ("nonzero credit", "credit/advantage/share_nonzero", "{:.0%}"),
    ("failed", "episode/failed", "{:.0f}"),
    ("seconds", "timing_s/step", "{:.0f}"),
)
"""label, metric, format; ``failed`` is left out while it is 0"""


class Reader:
    """Filters the lines of a run's log for the console."""

    def __init__(self) -> None:
        self.steps = ""
        """ "/100" where the header says how many there are"""
        self.validated: dict[int, float] = {}
        self.greedy = ""
        """ " (greedy)" where the header says so of validation"""
        self.phases = Phases()
        self._in_header = False
        self._label = ""
        self._warned: set[str] = set()

    def lines(self, raw: Iterable[str]) -> Iterable[str]:
        for line in raw:
            text = RAY.sub("", line.rstrip("\n"))
            if HEADER.match(text):
                self._in_header = True
                yield text
            elif self._in_header and text.startswith("  "):
                self._label = text[2:15].strip() or self._label  # continuation lines have none
                if self._label == "validation":
                    self.greedy = " (greedy)" if "greedy" in text else self.greedy
                    self.phases.validates |= "before the first step" in text
                if steps := STEPS.match(text):
                    self.steps = f"/{steps[1]}"
                yield text
            else:
                self._in_header = False
                yield from self._other(text)

    def _other(self, text: str) -> Iterable[str]:
        if warning := OURS.search(text):
            if (message := warning[1].strip()) not in self._warned:
                self._warned.add(message)
                yield f"warning: {message}"
        elif step := CONSOLE.search(text):
            yield from self.step(int(step[1]), console_metrics(step[2]))
        elif phase := self.phases.enter(text):
            yield f"{phase} ..."

    def step(self, number: int, metrics: Mapping[str, float]) -> Iterable[str]:
        """The line of a step, and the line of its validation."""
        cells = []
        for label, name, form in COLUMNS:
            value = metrics.get(name)
            if value is not None and (label != "failed" or value):
                cells.append(f"{label} {form.format(value)}{_penalties_alone(label, metrics)}")
        if cells and "episode/length/mean" in metrics:
            yield f"step {number}{self.steps}  {'  '.join(cells)}"
        success = validation(metrics)
        if success is not None:
            self.validated[number] = success
            yield f"validation after step {number}: success {success:.3f}{self.greedy}"


def _penalties_alone(label: str, metrics: Mapping[str, float]) -> str:
    """What to say of nonzero credit that is the penalty in every turn: no reward differs."""
    credit, penalty = (
        [metrics.get(f"credit/{part}/{number}") for number in ("mean", "std", "share_nonzero")]
        for part in ("advantage", "penalty")
    )
    return " (penalties alone)" if label == "nonzero credit" and any(credit) and credit == penalty else ""


def validation(metrics: Mapping[str, float]) -> float | None:
    """The success rate of a validation in a step's metrics: the mean over data sources; None: no validation."""
    values = [value for name, value in metrics.items() if VALIDATION.fullmatch(name)]
    return sum(values) / len(values) if values else None


def follow(command: Sequence[str], folder: Path, *, verbose: bool, cwd: Path | None = None) -> int:
    """Run ``command`` with its output in ``<folder>/train.log``, show the relevant lines, and return its exit code.

    SIGTERM is forwarded; the terminal itself sends SIGINT to both processes. The run decides how to stop.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.log"
    with path.open("ab") as log:
        began = log.tell()
        encoded = {**os.environ, "PYTHONIOENCODING": "utf-8:backslashreplace"}  # as the log is read, on any terminal
        process = subprocess.Popen(command, cwd=cwd, env=encoded, stdout=log, stderr=subprocess.STDOUT)
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    reader = Reader()
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            log.seek(began)
            _show(process, log, reader, verbose)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if process.returncode:
        _failure(path, began, process.returncode, folder)
    else:
        _end(reader, path, folder)
    return process.returncode


def _show(process: subprocess.Popen[bytes], log: TextIO, reader: Reader, verbose: bool) -> None:
    started = printed = time.monotonic()
    terminal, unfinished = sys.stdout.isatty(), ""
    while True:
        running = process.poll() is None
        raw = (unfinished + log.read()).splitlines(keepends=True)
        unfinished = raw.pop() if raw and running and not raw[-1].endswith("\n") else ""
        for line in (text.rstrip("\n") for text in raw) if verbose else reader.lines(raw):
            typer.echo(line)
            printed = time.monotonic()
        if verbose:
            for _ in reader.lines(raw):  # for the last line
                pass
        if not running:
            return
        if not terminal and time.monotonic() - printed > LINE_EVERY:
            printed = time.monotonic()
            phase = f": {reader.phases.current}" if reader.phases.current else ""
            typer.echo(f"running for {(printed - started) / 60:.0f} min{phase}")
        time.sleep(0.5)


def _end(reader: Reader, path: Path, folder: Path) -> None:
    if len(reader.validated) > 1:
        first, last = min(reader.validated), max(reader.validated)
        before, after = reader.validated[first], reader.validated[last]
        typer.echo(f"validation{reader.greedy}: success {before:.3f} after step {first}, {after:.3f} after step {last}")
    run = os.path.relpath(folder)
    typer.echo(f"log: {os.path.relpath(path)}; each turn: {turnkey()} view {run}; evaluate: {turnkey()} eval {run}")


def _failure(path: Path, began: int, code: int, folder: Path) -> None:
    with path.open(encoding="utf-8", errors="replace") as log:
        log.seek(began)
        lines = log.readlines()[-FAILURE_LINES:]
    ends = [place for place, line in enumerate(lines) if line.startswith("verl-turnkey: ") and "To resume:" in line]
    lines = lines[ends[-1] :] if ends else lines  # Ray's own report on the killed processes is a page long
    if ends and any(folder.rglob(".hydra/hydra.yaml")):  # verl's command would show all of its output
        mode = [word for word in lines[1].split()[-1:] if word == "trainer.resume_mode=auto"]
        lines[1] = " ".join([turnkey(), "resume", shlex.quote(os.path.relpath(folder)), *mode]) + "\n"
    typer.echo("".join(lines), err=True, nl=False)
    typer.echo(f"the run ended with exit code {code}; full output: {os.path.relpath(path)}", err=True)


PHASES = (
    ("starting Ray", "ray init kwargs: "),
    ("starting verl's trainer", "Started a local Ray instance."),
    ("starting verl's trainer", "Connected to Ray cluster."),
    ("reading the tasks", "Using dataset class: "),
    ("loading the model", "colocated worker base class "),
    ("starting vLLM", "['serve',"),
    ("starting the agent loops", "LLMServerManager: ["),
    ("loading the checkpoint", "Found checkpoint: "),
    ("validating before training", "Creating file logger at "),
)
"""phase, text of the line that begins it; in the order of a start"""
PROGRESS = re.compile(r"Training Progress: .*\| (\d+)/(\d+) \[")
"""verl's bar: the steps that are done, and how many there are"""


class Phases:
    """Follows a start: a line that belongs to an earlier phase changes nothing, since other workers print it later."""

    def __init__(self) -> None:
        self.current = ""
        """empty: unknown"""
        self.validates = False
        """whether the run validates before the first step"""
        self._passed = 0

    def enter(self, text: str) -> str:
        """The phase of a start that the line ``text`` begins, or its first step; empty: the phase is as before.

        Later steps change :attr:`current` alone: they have lines of their own.
        """
        if progress := PROGRESS.search(text):
            started, self._passed = self._passed > len(PHASES), len(PHASES) + 1
            done, steps = map(int, progress.groups())
            self.current = f"step {done + 1}/{steps}" if done < steps else ""
            return "" if started else self.current
        for place, (phase, line) in enumerate(PHASES[self._passed :], self._passed + 1):
            if line in text and (self.validates or not phase.startswith("validating")):
                self._passed, before, self.current = place, self.current, phase
                return "" if phase == before else phase
        return ""
