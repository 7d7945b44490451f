"""The results in the report of a run, their comparison with a repeated run, and the report as a page.

A report is plain data, which ``turnkey report`` writes as JSON. Its ``results`` count solved episodes by task, so that
a repeat can be compared task by task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_turnkey.plugins.view import stats
from verl_turnkey.plugins.view.join import flag
from verl_turnkey.plugins.view.report import Table, document, plain

if TYPE_CHECKING:
    import pandas as pd

    from verl_turnkey.plugins.view.join import Run

SCHEMA = 1
LAST_STEPS = 5
"""training steps whose mean is the final training success"""
VALIDATION, TRAINING = "validation success", "training success"
OF_ONE_RUN = (
    "the intervals are over tasks and samples of one training run; runs with other seeds differ more: turnkey compare"
)


def results(run: Run) -> list[dict[str, Any]]:
    """Success at the last validation and in the last training steps, with 95 % intervals, over finished episodes.

    Returns:
        ``what``, ``steps`` (first, last), ``value``, ``low``, ``high``, ``failed`` (episodes left out) and ``tasks``,
        id of a task -> solved, finished episodes.
    """
    episodes = run.episodes[run.whole & run.first_ways]
    validates = flag(episodes["validation"])
    measured = []
    for what, rows, number in ((VALIDATION, episodes[validates], 1), (TRAINING, episodes[~validates], LAST_STEPS)):
        steps = sorted(rows["global_step"].dropna().unique())[-number:]
        rows = rows[rows["global_step"].isin(steps)]
        ended = rows[rows["failed"].isna()]
        if len(ended):
            tasks = _by_task(ended)
            solved, finished = zip(*tasks.values(), strict=True)
            interval = stats.success(solved, finished)
            ends = [int(steps[0]), int(steps[-1])]
            measured.append(
                {"what": what, "steps": ends, **interval._asdict(), "failed": len(rows) - len(ended), "tasks": tasks}
            )
    return measured


def _by_task(episodes: pd.DataFrame) -> dict[str, tuple[int, int]]:
    names = episodes[["env", "kwargs", "seed", "task"]].astype(object)
    texts = names.where(names.notna(), None).to_numpy().tolist()
    ids = [hashlib.sha256(json.dumps(text, default=str).encode()).hexdigest()[:16] for text in texts]
    counts: dict[str, tuple[int, int]] = {}
    for task, solved in zip(ids, flag(episodes["success"]), strict=True):
        before = counts.get(task, (0, 0))
        counts[task] = (before[0] + int(solved), before[1] + 1)
    return counts


def held_against(original: Mapping[str, Any], repeat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each result of ``original``: the repeat's, the difference with a 95 % interval, and whether it contains 0.

    On the same tasks the difference is paired by task; otherwise the shares are independent.

    Raises:
        ValueError: the repeat lacks a result, or was validated on another panel.
    """
    panels = [report.get("panel") and report["panel"]["sha256"] for report in (original, repeat)]
    if panels[0] != panels[1]:
        raise ValueError(f"expected a repeat on the same panel, {panels[0]}, got {panels[1]}")
    others = {result["what"]: result for result in repeat["results"]}
    compared = []
    for result in original["results"]:
        if (other := others.get(result["what"])) is None:
            raise ValueError(f"the repeat has no {result['what']}: its trajectory log holds no such episodes")
        if other["steps"] != result["steps"]:
            raise ValueError(
                f"{result['what']}: the report is of steps {_steps(result)}, the repeat of {_steps(other)}; finish it"
            )
        same = result["tasks"].keys() == other["tasks"].keys()
        difference = (
            _paired(other["tasks"], result["tasks"]) if same else stats.difference(*map(_interval, (other, result)))
        )
        compared.append(
            {
                "what": result["what"],
                "report": result["value"],
                "repeat": other["value"],
                "difference": difference._asdict(),
                "paired": same,
                "within": difference.low <= 0 <= difference.high,
            }
        )
    return compared


def _paired(a: Mapping[str, Sequence[int]], b: Mapping[str, Sequence[int]]) -> stats.Interval:
    means = [[side[task][0] / side[task][1] for task in sorted(side)] for side in (a, b)]
    return stats.paired_difference(*means)


def _interval(result: Mapping[str, Any]) -> stats.Interval:
    return stats.Interval(result["value"], result["low"], result["high"])


# --- the page ---------------------------------------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> list[Table]:
    """The report as tables."""
    measured = [
        [
            result["what"],
            _steps(result),
            f"{result['value']:.3f}",
            f"{result['low']:.3f} to {result['high']:.3f}",
            str(len(result["tasks"])),
            str(sum(count for _, count in result["tasks"].values())),
            str(result["failed"]),
        ]
        for result in report["results"]
    ]
    head = ["success", "at steps", "share", "95 % interval", "tasks", "episodes", "failed, left out"]
    panel, code = report["panel"], report["code"]
    what = {
        "method": report["method"],
        "panel": f"{panel['name']} (sha256 {panel['sha256']})" if panel else "none",
        "commit of the working folder": f"{code['commit']}{', with changes' if code['changed'] else ''}",
        "modules": ", ".join(report["modules"]) or "none",
        "starts": str(report["starts"]),
        "hardware": ", ".join(f"{name} {_text(value)}" for name, value in report["hardware"].items()),
    }
    curves = [
        [name, *(f"{curve['value'][end]:.3f}" for end in (0, -1)), str(curve["step"][-1])]
        for name, curve in report["curves"].items()
    ]
    made = [
        Table("results", head, measured),
        Table("run", ["", ""], [[name, plain(text)] for name, text in what.items()]),
        Table("launch line", ["python -m verl.trainer.main_ppo"], [[plain(word)] for word in report["launch"]]),
        Table("versions", ["package", "version"], _pairs(report["versions"])),
        Table("seeds", ["key", "seed"], _pairs(report["seeds"])),
        Table("files at the start", ["file", "sha256"], _pairs(report["files"])),
        Table("curves", ["metric", "first", "last", "at step"], curves),
        Table("seconds per step, median", ["part", "seconds"], _pairs(report["seconds_per_step"])),
    ]
    if report["differences"]:
        rows = [[plain(key), *map(_text, values)] for key, values in report["differences"].items()]
        made.append(
            Table("resolved configuration, where it differs from verl's defaults", ["key", "run", "default"], rows)
        )
    made.append(Table("resolved configuration", ["key", "value"], _pairs(report["config"])))
    return [table for table in made if table.rows]


def page(report: Mapping[str, Any], figure: str) -> str:
    """One HTML file that loads nothing and runs nothing; ``figure``: the curve."""
    return document(f"Run {report['run']}", figure, tables(report), report["notes"])


def _pairs(values: Mapping[str, Any]) -> list[list[str]]:
    return [[plain(str(name)), _text(value)] for name, value in values.items()]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return plain(value if isinstance(value, str) else json.dumps(value, default=str))


def _steps(result: Mapping[str, Any]) -> str:
    first, last = result["steps"]
    return str(last) if first == last else f"{first} to {last}"
