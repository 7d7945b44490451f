"""A training run on disk: its scalar metrics by step, and its configuration.

Files are recognised by content, in any subfolder: verl's metrics file (``trainer.logger=[file]``), else event files of
tensorboard, else a console log. Names and values are not trusted: callers escape them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.plugins.log.former_names import current_metric
from verl_turnkey.plugins.view.starts import configuration

Steps = dict[int, dict[str, float]]
"""step -> metric -> value"""

VALIDATION = re.compile(r"val-core/.+/acc/mean@\d+")
"""verl's mean success of a data source; beside it stand the best of several samples, and deviations"""
CONSOLE = re.compile(r"(?:^|\s)step:(\d+) - (\S.*)")
NUMBER = re.compile(r"(?:np|numpy)\.\w+\((.*)\)")
ENDINGS = (".log", ".txt", ".out")
LARGEST_LOG = 1 << 30
"""bytes of a text file that may be a console log"""


@dataclass(frozen=True)
class Run:
    """A run of which N steps were logged."""

    folder: Path
    source: str
    """where the metrics come from"""
    step: NDArray[np.int64]
    """(N,) increasing"""
    metrics: Mapping[str, NDArray[np.float64]]
    """current name -> (N,), NaN at steps without a value"""
    config: Mapping[str, Any]
    """dotted key -> value, as composed by Hydra; empty if the folder has no configuration"""

    def curve(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of a metric at the steps where it is finite.

        Raises:
            LookupError: the run has no such metric; the message has the closest names.
        """
        if name not in self.metrics:
            raise LookupError(f"{self.folder} has no metric {name!r}{nearest(name, self.metrics)}")
        values = self.metrics[name]
        there = np.isfinite(values)
        return self.step[there], values[there]

    def interactions(self) -> NDArray[np.float64] | None:
        """(N,) turns played in training up to each step, including branches; None if episodes were not counted."""
        played, length = self._played(), "episode/length/mean"
        if played is None or length not in self.metrics:
            return None
        parts = (length, "branching/trained_steps", "branching/measured_steps")
        return np.cumsum(played * sum(map(self._logged, parts)))

    def tokens(self) -> NDArray[np.float64] | None:
        """(N,) tokens that the model wrote in training up to each step; None if they were not counted.

        Trained tokens, and tokens of branches that are only measured; failed episodes are not counted.
        """
        if "rows/trained_tokens" not in self.metrics:
            return None
        trained, played = self._logged("rows/trained_tokens"), self._played()
        return np.cumsum(trained + (0.0 if played is None else played * self._logged("branching/measured_tokens")))

    def _played(self) -> NDArray[np.float64] | None:
        if not all(name in self.metrics for name in ("episode/count", "episode/failed")):
            return None
        return self._logged("episode/count") - self._logged("episode/failed")

    def _logged(self, name: str) -> NDArray[np.float64]:
        """(N,) a metric, 0 at steps without a value."""
        return np.nan_to_num(self.metrics.get(name, np.zeros(len(self.step))))

    def seconds(self) -> NDArray[np.float64] | None:
        """(N,) seconds of training up to each step (``timing_s/step``); None if they were not logged."""
        return np.cumsum(np.nan_to_num(self.metrics["timing_s/step"])) if "timing_s/step" in self.metrics else None


def read(folder: Path) -> Run:
    """Read the folder of a run.

    Raises:
        FileNotFoundError: there is no such folder, or no metrics below it.
        ValueError: a file of metrics has another format.
        ImportError: the folder has event files only, and tensorboard is not installed.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the folder of a run, found {'a file' if folder.exists() else 'no'} {folder}")
    readers: tuple[Callable[[Path], tuple[Steps, str]], ...] = (_metrics_files, _events, _console)
    for reader in readers:
        steps, source = reader(folder)
        if steps:
            return Run(folder, source, *_table(steps), config=configuration(folder))
    raise FileNotFoundError(
        f"{folder} holds no metrics: expected a .jsonl file of trainer.logger=[file], event files of tensorboard, or "
        f"the console output of verl in a file that ends in {', '.join(ENDINGS)}"
    )


def nearest(name: str, names: Mapping[str, Any]) -> str:
    """The end of an error message: the names that resemble ``name``, or contain a word of it."""
    from difflib import get_close_matches

    words = [word for word in re.split(r"\W+", name.lower()) if word]
    close = [*get_close_matches(name, names, 3, 0.7), *(n for n in names if any(word in n.lower() for word in words))]
    return f"; did you mean {', '.join(dict.fromkeys(close[:5]))}" if close else f"; it has {len(names)} others"


def _table(steps: Steps) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    order = sorted(steps)
    current = [{current_metric(name): value for name, value in steps[step].items()} for step in order]
    names = sorted({name for data in current for name in data})
    return np.array(order), {name: np.array([data.get(name, math.nan) for data in current]) for name in names}


def _go_on(steps: Steps, start: Steps) -> None:
    """Add a later start of the same run: its steps replace those that an earlier start had from there on."""
    if start:
        first = min(start)
        for step in [step for step in steps if step > first]:
            del steps[step]
        for step, data in start.items():
            steps.setdefault(step, {}).update(data)


# --- verl's metrics file ----------------------------------------------------------------------------------------------


def _metrics_files(folder: Path) -> tuple[Steps, str]:
    steps: Steps = {}
    paths = [path for path in sorted(folder.rglob("*.jsonl")) if _is_metrics(path)]
    for path in paths:  # one per start, named by number or time
        _go_on(steps, _of_lines(path))
    return steps, ", ".join(str(path.relative_to(folder)) for path in paths)


def _is_metrics(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.readline(1 << 20)
    return head.startswith(b'{"step":') and b'"data":' in head


def _of_lines(path: Path) -> Steps:
    steps: Steps = {}
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            step, data = entry["step"], entry["data"]
            numbers = {name: float(value) for name, value in data.items() if isinstance(value, int | float)}
            steps.setdefault(int(step), {}).update(numbers)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            if number == len(lines):  # the run is writing this line, or died in the middle of it
                break
            start = line[:60].decode(errors="replace")
            raise ValueError(f'{path}:{number}: expected {{"step": ..., "data": {{...}}}}, got {start}') from None
    return steps


# --- tensorboard ------------------------------------------------------------------------------------------------------


def _events(folder: Path) -> tuple[Steps, str]:
    folders = sorted({path.parent for path in folder.rglob("events.out.tfevents.*")})
    steps: Steps = {}
    if not folders:
        return steps, ""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError:
        raise ImportError(f"{folder} holds event files only: pip install tensorboard") from None
    for subfolder in folders:
        events = EventAccumulator(str(subfolder), size_guidance={"scalars": 0})
        events.Reload()
        start: Steps = {}
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                start.setdefault(event.step, {})[name] = event.value
        _go_on(steps, start)
    return steps, "event files of tensorboard"


# --- console ----------------------------------------------------------------------------------------------------------


def _console(folder: Path) -> tuple[Steps, str]:
    steps: Steps = {}
    used = []
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in ENDINGS and path.is_file())
    for path in paths:
        if path.stat().st_size <= LARGEST_LOG and (start := _of_console(path)):
            _go_on(steps, start)
            used.append(str(path.relative_to(folder)))
    return steps, ", ".join(used)


def _of_console(path: Path) -> Steps:
    """Lines ``step:1 - a:0.1 - b:2``, with any prefix of Ray's; also numpy's numbers: ``a:np.float64(0.1)``."""
    steps: Steps = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := CONSOLE.search(line):
                step = int(match[1])
                if steps and step < max(steps):  # another start of the run in the same log
                    later: Steps = {step: {}}
                    _go_on(steps, later)
                steps.setdefault(step, {}).update(console_metrics(match[2]))
    return {step: data for step, data in steps.items() if data}


def console_metrics(text: str) -> dict[str, float]:
    """The numbers in ``a:0.1 - b:2``, the part of verl's line after ``step:1 - ``."""
    metrics = {}
    for part in text.split(" - "):
        name, _, value = part.rpartition(":")
        wrapped = NUMBER.fullmatch(value.strip())
        try:
            metrics[name] = float(wrapped[1] if wrapped else value)
        except ValueError:
            continue
    return metrics
