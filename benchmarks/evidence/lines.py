"""One line per finished run: what tables need of it, kept in the repository, unlike the run's folder.

A file of ``benchmarks/results`` is a list of JSON, one run a line, so that a further run is one further line.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_turnkey.plugins.view.runs import VALIDATION, RunMetrics, Steps, read

RESULTS = Path(__file__).parents[1] / "results"
KEPT = (
    "episode/success_rate",
    "episode/count",
    "episode/failed",
    "episode/length/mean",
    "episode/invalid_rate",
    "branching/trained_steps",
    "branching/measured_steps",
    "branching/measured_tokens",
    "rows/trained_tokens",
    "credit/share_steps_in_anchor_groups",
    "credit/advantage/share_nonzero",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "timing_s/step",
)
"""metrics of a line, besides validation success"""
DIGITS = 5
"""significant digits of a number"""
Line = dict[str, Any]
Key = tuple[str, str, float, float, int]
"""task, variant, learning rates of policy and critic (0: there is none), seed"""


def load(study: str) -> list[Line]:
    """The lines of a study; none where there is no file."""
    path = RESULTS / f"{study}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def add(study: str, line: Line) -> None:
    """Insert a line in sorted order, in place of one of the same run."""
    lines = sorted([*(other for other in load(study) if key(other) != key(line)), line], key=key)
    text = ",\n".join(json.dumps(entry) for entry in lines)
    path = RESULTS / f"{study}.json"
    new = path.with_suffix(".new")
    new.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    new.replace(path)  # atomically


def logged(folder: Path) -> Steps:
    """The metrics of the run in ``folder``."""
    run = read(folder)
    return {
        step: {name: float(values[row]) for name, values in run.metrics.items() if math.isfinite(values[row])}
        for row, step in enumerate(run.step.tolist())
    }


def line(about: Mapping[str, Any], steps: Steps) -> Line:
    """The line of a finished run; ``about`` identifies it.

    Raises:
        LookupError: it was not validated.
    """
    metrics = sorted({name for data in steps.values() for name in data})
    validation = next((name for name in metrics if VALIDATION.fullmatch(name)), None)
    if validation is None:
        raise LookupError(f"no validation among {', '.join(metrics)}")
    names = [validation, *(name for name in KEPT if name in metrics)]
    return {
        **about,
        "steps": list(steps),
        "metrics": {name: [_short(data.get(name, math.nan)) for data in steps.values()] for name in names},
    }


def as_run(line: Line, config: Mapping[str, Any]) -> RunMetrics:
    """A line as a run for the comparison of runs, with the configuration ``config``."""
    metrics = {
        name: np.array([math.nan if value is None else value for value in values])
        for name, values in line["metrics"].items()
    }
    return RunMetrics(Path(_name(line)), "a kept line", np.array(line["steps"]), metrics, config)


def validations(line: Line) -> tuple[list[int], list[float]]:
    """Steps and success of the validations."""
    name = next(name for name in line["metrics"] if VALIDATION.fullmatch(name))
    pairs = zip(line["steps"], line["metrics"][name], strict=True)
    points = [(step, value) for step, value in pairs if value is not None]
    return [step for step, _ in points], [value for _, value in points]


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _name(line: Line) -> str:
    return f"{line['task']}/{line['variant']}-{line['lr']:g}-{line['seed']}"


def kept(study: str, which: Key) -> Line | None:
    """The line of a run, if there is one."""
    return next((line for line in load(study) if key(line) == which), None)


def command(study: str, which: Key) -> str:
    """The command that repeats a run."""
    task, variant, lr, critic_lr, seed = which
    rates = ["--lr", f"{lr:g}", *(["--critic-lr", f"{critic_lr:g}"] if critic_lr else [])]
    words = ["python", "benchmarks/evidence/run.py", "one", study, task, variant, *rates, "--seed", str(seed)]
    return shlex.join(words)


def key(line: Line) -> Key:
    """The key of a line's run."""
    return line["task"], line["variant"], line["lr"], line.get("critic_lr") or 0.0, line["seed"]
