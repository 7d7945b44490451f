"""``turnkey compare``: runs compared by a metric, as a dict for JSON, as tables and as a picture.

Names in it are not trusted: control characters are replaced.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.plugins.log.schema import current_metric
from verl_turnkey.plugins.view import stats
from verl_turnkey.plugins.view.collapse import UPDATE, Curve, Kind, change_rows, changes, fall
from verl_turnkey.plugins.view.runs import FILE, VALIDATION, Group, RunMetrics, group_runs, nearest, seed_of

SCALES = {
    "step": "training steps",
    "interactions": "environment interactions",
    "tokens": "generated tokens",
    "seconds": "seconds of training",
}
TRAINING = "episode/success_rate"
GROUP_SIZE = "actor_rollout_ref.rollout.n"
METRICS = {"val success": VALIDATION, "success": re.compile(re.escape(TRAINING))}
"""short names for ``--metric``"""
FEWEST = 3
"""fewest seeds of a group with an interval"""
TIMING = "timing_s/"
TELLING: dict[str, tuple[str, Kind]] = {
    "turns per episode": ("episode/length/mean", "size"),
    "turns without a valid action": ("episode/invalid_rate", "share"),
    "nonzero credit": ("credit/advantage/share_nonzero", "share"),
    "tokens per response": ("response_length/mean", "size"),
    "entropy": ("actor/entropy", "size"),
}
"""metrics that may explain a fall of success, besides those of an update"""
NEEDED = {
    "interactions": "episode/count, episode/failed and episode/length/mean (records or a method of this package)",
    "tokens": "rows/trained_tokens (records or a method of this package)",
    "seconds": "timing_s/step",
}


def compare(
    runs: Sequence[RunMetrics],
    *,
    metric: str | None = None,
    level: float | None = None,
    by: Sequence[str] = (),
    x: str = "step",
    baseline: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare ``runs`` by a metric; more is better.

    Args:
        metric: name of a metric, ``val success`` or ``success``; default: the first of these two that all runs have.
        level: value of the metric to be reached and held at the next evaluation.
        by: the only configuration keys that distinguish groups.
        x: a key of :data:`SCALES`: x axis of the curves, and unit of the common budget.
        baseline: name of the group that all others are compared with; None: all pairs of groups.
        seed: of the bootstraps.

    Raises:
        ValueError: a run twice, no common budget, or ``x`` not logged.
        LookupError: no such metric, key or group.
    """
    if not runs:
        raise ValueError("expected at least one run")
    twice = [str(a.folder) for a, b in combinations(runs, 2) if a.folder.resolve() == b.folder.resolve()]
    if twice:
        raise ValueError(f"{twice[0]} is given twice")
    if x not in SCALES:
        raise ValueError(f"expected x to be one of {', '.join(SCALES)}, got {x!r}")
    name = choose(runs, metric)
    groups = group_runs(runs, by)
    if baseline is not None and baseline not in (names := [group.name for group in groups]):
        raise LookupError(f"there is no group {baseline!r} to be the baseline; the groups are {', '.join(names)}")
    curves = {id(run): _curve(run, name, x) for run in runs}
    start, end = max(c[0][0] for c in curves.values()), min(c[0][-1] for c in curves.values())
    if start > end:
        late = max(runs, key=lambda run: curves[id(run)][0][0])
        raise ValueError(
            f"no common budget: {late.folder} was first evaluated at {x} {start:g}, another run last at {end:g}"
        )
    summaries = [_summary(group, name, curves, (start, end), level, seed) for group in groups]
    notes = [
        f"{group.name}: {number} seed{'s' * (number > 1)}; an interval needs {FEWEST}"
        for group in groups
        if (number := len(group.runs)) < FEWEST
    ]
    notes += [f"the runs of {group.name} differ in {', '.join(group.mixed)}" for group in groups if group.mixed]
    if any(run.files for run in runs):
        without = [str(run.folder) for run in runs if run.files is None]
        notes += [f"files are not compared: {folder} has no record of those that it read" for folder in without]
    return {
        "metric": name,
        "x": x,
        "range": [_number(start), _number(end)],
        "level": level,
        "groups": summaries,
        "baseline": baseline,
        "pairs": [_pair(a, b, seed) for a, b in _pairs(summaries, baseline)],
        "files": _differing_files(groups),
        "notes": notes,
    }


def _differing_files(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The user's files whose content differs between runs, each as compared with the first run that read it."""
    keys = dict.fromkeys(key for group in groups for key in (*group.config, *group.mixed) if key.startswith(FILE))
    rows, runs = [], [run for group in groups for run in group.runs]
    for name in (key.removeprefix(FILE) for key in keys):
        first, *others = [run for run in runs if name in (run.files or {})]
        seen = {(first.files or {})[name]}
        for run in others:
            if (digest := (run.files or {})[name]) not in seen:
                seen.add(digest)
                folders = {"a": str(first.folder), "b": str(run.folder)}
                rows.append({"file": name, **folders, "diff": _diff(name, first, run)})
    return rows


def _diff(name: str, a: RunMetrics, b: RunMetrics) -> list[str] | None:
    """The lines of a unified diff of two copies; None: one of the runs has no copy."""
    if name not in a.copies or name not in b.copies:
        return None
    before, after = (run.copies[name].read_text(encoding="utf-8", errors="replace").splitlines() for run in (a, b))
    return [*unified_diff(before, after, f"{a.folder}: {name}", f"{b.folder}: {name}", lineterm="", n=2)]


def choose(runs: Sequence[RunMetrics], requested: str | None) -> str:
    """The full name of a metric; a former name stands for the current one.

    Raises:
        LookupError: a run lacks the metric, or a short name matches several.
    """
    for short in [current_metric(requested)] if requested else METRICS:
        if short not in METRICS:
            for run in runs:
                run.curve(short)
            return short
        matching = sorted({name for run in runs for name in run.metrics if METRICS[short].fullmatch(name)})
        if len(matching) > 1:
            raise LookupError(
                f"{short!r} matches several metrics: choose one with --metric {', --metric '.join(matching)}"
            )
        lacking = [run for run in runs if not matching or matching[0] not in run.metrics]
        if not lacking:
            return matching[0]
    names = repr(requested) if requested else " or ".join(map(repr, METRICS))
    near = nearest("success", lacking[0].metrics)
    raise LookupError(f"{lacking[0].folder} has no metric for {names}: choose one with --metric{near}")


def _curve(run: RunMetrics, name: str, x: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x and values of the evaluations; the last of several at the same x counts."""
    steps, values = run.curve(name)
    if not len(steps):
        raise LookupError(f"{run.folder}: {name} has no finite value")
    costs = _costs(run, x)
    if costs is None:
        raise ValueError(f"--x {x} needs the metrics {NEEDED[x]}, which {run.folder} lacks")
    at = costs[np.searchsorted(run.step, steps)]
    last = np.append(np.diff(at) > 0, True)
    return at[last], values[last]


def _costs(run: RunMetrics, x: str) -> NDArray[np.float64] | None:
    if x == "step":
        return run.step.astype(np.float64)
    return {"interactions": run.interactions, "tokens": run.tokens, "seconds": run.seconds}[x]()


def _summary(
    group: Group, name: str, curves: dict[int, Any], budget: tuple[float, float], level: float | None, seed: int
) -> dict[str, Any]:
    of_runs = [curves[id(run)] for run in group.runs]
    grid = np.unique(np.concatenate([x for x, _ in of_runs]))
    grid = grid[(grid >= max(x[0] for x, _ in of_runs)) & (grid <= min(x[-1] for x, _ in of_runs))]
    heights = np.array([np.interp(grid, x, y) for x, y in of_runs])
    return {
        "name": group.name,
        "config": group.config,
        "mixed": group.mixed,
        "runs": [
            {
                "folder": str(run.folder),
                "seed": seed_of(run),
                "source": run.source,
                "x": x.tolist(),
                "value": y.tolist(),
                "collapse": _collapse(run),
            }
            for run, (x, y) in zip(group.runs, of_runs, strict=True)
        ],
        "curve": {
            "x": grid.tolist(),
            "mean": heights.mean(axis=0).tolist(),
            "low": heights.min(axis=0).tolist(),
            "high": heights.max(axis=0).tolist(),
        },
        "final": _spread([float(np.interp(budget[1], x, y)) for x, y in of_runs], seed),
        "area": _spread([stats.area(x, y, *budget) for x, y in of_runs], seed),
        "to_level": {} if level is None else _to_level(group.runs, name, level),
        "seconds_per_step": _timings(group.runs),
    }


def _spread(values: list[float], seed: int) -> dict[str, Any]:
    interval = stats.bootstrap(values, stats.interquartile_mean, seed=seed) if len(values) >= FEWEST else None
    return {
        "of_runs": values,
        "mean": float(np.mean(values)),
        "lowest": min(values),
        "highest": max(values),
        "interquartile_mean": float(stats.interquartile_mean(values)),
        "interval": list(interval[1:]) if interval else None,
    }


def _collapse(run: RunMetrics) -> dict[str, Any] | None:
    """Where success in training was lost, and what changed around that step; None if it was not lost.

    Only the number of groups is known, so each group counts as a single independent episode.
    """
    metrics = run.metrics
    if TRAINING not in metrics:
        return None
    size = run.config.get(GROUP_SIZE)
    groups = np.nanmean(metrics.get("episode/count", np.inf)) / (size if isinstance(size, int) else 1)
    validation = [Curve(*run.curve(name)) for name in metrics if VALIDATION.fullmatch(name)]
    success = Curve(*run.curve(TRAINING), "share", episodes=float(groups))
    drop = fall(success, validation[0] if len(validation) == 1 else None)
    if drop is None:
        return None
    curves = {what: Curve(*run.curve(name), kind) for what, (name, kind) in TELLING.items() if name in metrics}
    peaks = {what: update for what, update in UPDATE.items() if update[0] in metrics}
    curves |= {what: Curve(*run.curve(name), "peak", least) for what, (name, least) in peaks.items()}
    return {
        "best": drop.best,
        "best_at": drop.best_at,
        "last": drop.last,
        "step": drop.turn,
        "back": drop.back,
        "changes": change_rows(drop, changes(curves, drop)),
    }


def _to_level(runs: Sequence[RunMetrics], name: str, level: float) -> dict[str, Any]:
    """Unit -> cost of each run (None: level not reached), and the summary in words."""
    costs_by_scale: dict[str, Any] = {}
    for x in SCALES:
        if all(_costs(run, x) is not None for run in runs):
            costs = [stats.steps_to(*_curve(run, name, x), level) for run in runs]
            costs_by_scale[x] = {"of_runs": [_number(cost) for cost in costs], "said": stats.reached(costs)}
    return costs_by_scale


def _timings(runs: Sequence[RunMetrics]) -> dict[str, float]:
    """Seconds of each part of a step, longest first: median over steps, for the first warms up, and mean over runs."""
    timings = {}
    for part in sorted({name for run in runs for name in run.metrics if name.startswith(TIMING)}):
        medians = [float(np.nanmedian(run.metrics[part])) for run in runs if part in run.metrics]
        timings[part.removeprefix(TIMING)] = float(np.mean(medians))
    return dict(sorted(timings.items(), key=lambda entry: -entry[1]))


def _pairs(groups: Sequence[dict[str, Any]], baseline: str | None) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    if baseline is None:
        return list(combinations(groups, 2))
    base = next(group for group in groups if group["name"] == baseline)
    return [(group, base) for group in groups if group is not base]


def _pair(a: dict[str, Any], b: dict[str, Any], seed: int) -> dict[str, Any]:
    enough = min(len(a["runs"]), len(b["runs"])) >= FEWEST
    pair: dict[str, Any] = {"a": a["name"], "b": b["name"]}
    for what in ("final", "area"):
        improvement = stats.improvement(a[what]["of_runs"], b[what]["of_runs"], seed=seed)
        pair[what] = {"improvement": improvement.value, "interval": list(improvement[1:]) if enough else None}
    return pair


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


RESULT = "result.json"
"""file of an evaluation"""


def ratings(folders: Sequence[Path], seed: int = 0) -> dict[str, Any]:
    """Rate the players of evaluations against an opponent, each by its name there.

    Raises:
        ConfigError: an evaluation has no opponent or another environment, its players or two models share a name, or
            no game has an outcome.
        ValueError: some players are not connected by games.
    """
    ends: Counter[tuple[str, str, str, int]] = Counter()
    environments, models, notes = dict[str, Path](), dict[tuple[str, bool], tuple[Any, Path]](), list[str]()
    for folder in folders:
        pair = json.loads((folder / RESULT).read_text(encoding="utf-8")).get("players")
        if pair is None:
            raise ConfigError(
                f"{folder} has no games against an opponent: play some with turnkey eval ... "
                "turnkey.val_opponent='{url: http://host:8000/v1, model: NAME}'"
            )
        policy, opponent = pair["policy"], pair["opponent"]
        if policy == opponent:
            raise ConfigError(f"{folder}: both players are called {policy!r}: name the evaluated one with --tag")
        identity = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
        environments.setdefault(json.dumps(identity.get("environment"), sort_keys=True), folder)
        # A server does not identify its weights: there a tag stands for them.
        weights = (model := identity["model"]).get("sha256") or model.get("tag") or model.get("name")
        first, of_first = models.setdefault((policy, "sha256" in model), (weights, folder))
        if first != weights:
            raise ConfigError(
                f"{of_first} and {folder} evaluate different models called {policy!r}: name them with --tag"
            )
        samples = map(json.loads, (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines())
        if not (finished := [sample for sample in samples if sample.get("outcomes")]):
            notes.append(f"{folder} is left out: none of its games has an outcome, as when all are truncated")
        for sample in finished:
            for outcome in sample["outcomes"].values():
                ends[policy, opponent, sample["task"], int(np.sign(outcome))] += 1
    if len(environments) > 1:
        first, second = list(environments.values())[:2]
        raise ConfigError(f"{first} and {second} were played in different environments: compare games in one")
    if not ends:
        raise ConfigError(f"no game in {folders[0]} has an outcome: if all are truncated, allow more turns or tokens")
    names = list(dict.fromkeys(name for key in ends for name in key[:2]))
    tasks = {task: n for n, task in enumerate(dict.fromkeys(task for _, _, task, _ in ends))}
    table = np.zeros((len(names), len(names), len(tasks), 3), np.int64)
    for (a, b, task, end), number in ends.items():
        table[names.index(a), names.index(b), tasks[task], 1 - end] = number
    by_player = table.sum(axis=(1, 2)) + table.sum(axis=(0, 2))[:, ::-1]
    lines = [
        {"player": name, "rating": rating.value, "interval": [rating.low, rating.high], "ends": numbers.tolist()}
        for name, rating, numbers in zip(names, stats.ratings(table, seed=seed), by_player, strict=True)
    ]
    return {"ratings": sorted(lines, key=lambda line: -line["rating"]), "files": [], "notes": notes}


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""distinct for colour-blind readers, too (Okabe and Ito)"""
KEYS = 20
"""most differing keys in a table"""
BAR = r"\|"
DIFF_LINES = 40
"""most lines of a file's differences on the terminal"""
PARTS = 6
"""most parts of a training step in a table"""


@dataclass(frozen=True)
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]


def tables(comparison: dict[str, Any]) -> list[Table]:
    """The tables of a comparison, or of ratings, as texts."""
    if "ratings" in comparison:
        rated = []
        for line in comparison["ratings"]:
            numbers = map(str, (sum(line["ends"]), *line["ends"]))
            rated.append([plain(line["player"]), f"{line['rating']:.0f}", _interval(line["interval"], 0), *numbers])
        head = ["player", "rating", "95% interval", "games", "won", "drawn", "lost"]
        return [Table("ratings", head, rated)]
    groups, at = comparison["groups"], f"at {comparison['x'].removesuffix('s')} {comparison['range'][1]:g}"
    names = [plain(group["name"]) for group in groups]
    rows = [
        [
            name,
            str(len(group["runs"])),
            f"{group['final']['mean']:.3f}",
            f"{group['final']['lowest']:.3f} to {group['final']['highest']:.3f}",
            _interval(group["final"]["interval"]),
            f"{group['area']['mean']:.3f}",
        ]
        for name, group in zip(names, groups, strict=True)
    ]
    head = ["group", "seeds", at, "lowest to highest", "95% interval", "area"]
    made = [Table(plain(comparison["metric"]), head, rows)]
    to_level = [group["to_level"] for group in groups]
    if units := [x for x in SCALES if any(x in costs for costs in to_level)]:
        of_groups = zip(names, to_level, strict=True)
        reached = [[name, *(costs.get(x, {}).get("said", "-") for x in units)] for name, costs in of_groups]
        made.append(Table(f"to reach {comparison['level']:g}", ["group", *(SCALES[x] for x in units)], reached))
    if keys := list(groups[0]["config"]):
        values = [[plain(key), *(plain(group["config"][key]) for group in groups)] for key in keys[:KEYS]]
        if len(keys) > KEYS:
            values.append([f"{len(keys) - KEYS} more, in comparison.json", *("" for _ in groups)])
        made.append(Table("what differs", ["key", *names], values))
    if comparison["pairs"]:
        pairs = [
            [plain(pair["a"]), plain(pair["b"]), *(_chance(pair[part]) for part in ("final", "area"))]
            for pair in comparison["pairs"]
        ]
        head = ["a run of", "is better than one of", at, "by area"]
        made.append(Table("probability of improvement", head, pairs))
    fallen = [
        [
            plain(f"{group['name']} {run['seed']}"),
            f"{drop['best']:.3f} (step {drop['best_at']})",
            f"{drop['last']:.3f}",
            str(drop["step"]) if drop["back"] is None else f"{drop['step']}, back at {drop['back']}",
            "; ".join(
                f"{row['what']} {row['before']} to {row['after']} (step {row['step']})"
                for row in drop["changes"]
                if not row["fall"]
            )
            or "-",
        ]
        for group in groups
        for run in group["runs"]
        if (drop := run["collapse"])
    ]
    if fallen:
        head = ["run", "best", "down to", "lost at", "what changed then"]
        made.append(Table("success that was lost in training", head, fallen))
    parts = list(dict.fromkeys(part for group in groups for part in list(group["seconds_per_step"])[:PARTS]))
    if parts:
        per_step = zip(names, (group["seconds_per_step"] for group in groups), strict=True)
        seconds = [[name, *(f"{of[part]:.3g}" if part in of else "-" for part in parts)] for name, of in per_step]
        made.append(Table("seconds per step, median", ["group", *map(plain, parts)], seconds))
    return made


def _interval(ends: Sequence[float] | None, digits: int = 3) -> str:
    return f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}" if ends else "-"


def _chance(part: dict[str, Any]) -> str:
    text = f"{part['improvement']:.2f}"
    return f"{text} ({_interval(part['interval'], 2)})" if part["interval"] else text


def plain(text: str) -> str:
    """An untrusted text on one line, without control characters and marks of direction."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_tables(comparison: dict[str, Any]) -> None:
    """Print for the terminal; 120 columns wide if stdout is not one."""
    import sys

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)
    for table in tables(comparison):
        grid = Grid(box=SIMPLE_HEAD, title=Text(table.title), title_justify="left")
        for name in table.head:
            grid.add_column(Text(name), overflow="fold")
        for row in table.rows:
            grid.add_row(*map(Text, row))
        console.print(grid)
    for file in comparison["files"]:
        lines = file["diff"]
        if lines is None:
            lines = [f"{file['file']} differs between {file['a']} and {file['b']}, of which one has no copy of it"]
        elif not lines:
            lines = [f"{file['file']} differs between {file['a']} and {file['b']} only in what is masked"]
        more = [f"{len(lines) - DIFF_LINES} more lines, in comparison.json"] if len(lines) > DIFF_LINES else []
        console.print("\n".join(map(plain, [*lines[:DIFF_LINES], *more])))
    for note in comparison["notes"]:
        console.print(plain(note))


def markdown(table: Table) -> str:
    """A table in Markdown."""
    rows = [f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |" for row in (table.head, *table.rows)]
    return "\n".join([rows[0], "|---" * len(table.head) + "|", *rows[1:]]) + "\n"


def draw(panels: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per comparison, side by side.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ImportError('a picture needs matplotlib: pip install "verl-turnkey[viz]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (max(7, 4 * len(panels)), 4)
    figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axes, comparison in zip(row[0], panels, strict=True):
        for number, group in enumerate(comparison["groups"]):
            color, style = COLORS[number % len(COLORS)], ("-", "--", ":")[number // len(COLORS) % 3]
            for run in group["runs"]:
                axes.plot(run["x"], run["value"], color=color, linewidth=0.7, alpha=0.4)
            curve = group["curve"]
            axes.fill_between(curve["x"], curve["low"], curve["high"], color=color, alpha=0.1, linewidth=0)
            axes.plot(curve["x"], curve["mean"], style, color=color, linewidth=2, label=f" {group['name']}")
        axes.set_xlabel(SCALES[comparison["x"]])
        axes.set_title(plain(comparison["metric"]), parse_math=False)
        if comparison["metric"] == TRAINING or VALIDATION.fullmatch(comparison["metric"]):
            axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
    legend = row[0][0].legend(frameon=False)
    for text in legend.get_texts():
        text.set(parse_math=False, text=plain(text.get_text()))
    figure.savefig(path, dpi=150)
    plt.close(figure)
