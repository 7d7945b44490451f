"""A comparison (``compare.py``) as tables for a terminal or a page, and as a picture.

Names in it are not trusted: control characters are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_turnkey.plugins.view.compare import SCALES, TRAINING
from verl_turnkey.plugins.view.runs import VALIDATION

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""distinct for colour-blind readers, too (Okabe and Ito)"""
KEYS = 20
"""most differing keys in a table"""
BAR = r"\|"
PARTS = 6
"""most parts of a training step in a table"""


@dataclass(frozen=True)
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]


def tables(comparison: dict[str, Any]) -> list[Table]:
    """The tables of a comparison, as texts."""
    groups, at = comparison["groups"], f"at {comparison['x'].removesuffix('s')} {comparison['range'][1]:g}"
    rows = [
        [
            plain(group["name"]),
            str(len(group["runs"])),
            f"{group['final']['mean']:.3f}",
            f"{group['final']['lowest']:.3f} to {group['final']['highest']:.3f}",
            _interval(group["final"]["interval"]),
            f"{group['area']['mean']:.3f}",
        ]
        for group in groups
    ]
    made = [
        Table(plain(comparison["metric"]), ["group", "seeds", at, "lowest to highest", "95 % interval", "area"], rows)
    ]
    units = [x for x in SCALES if any(x in group["to_level"] for group in groups)]
    if units:
        costs = [
            [plain(group["name"]), *(group["to_level"].get(x, {}).get("said", "-") for x in units)] for group in groups
        ]
        made.append(Table(f"to reach {comparison['level']:g}", ["group", *(SCALES[x] for x in units)], costs))
    keys = list(groups[0]["config"])
    if keys:
        values = [[plain(key), *(plain(group["config"][key]) for group in groups)] for key in keys[:KEYS]]
        if len(keys) > KEYS:
            values.append([f"{len(keys) - KEYS} more, in comparison.json", *("" for _ in groups)])
        made.append(Table("what differs", ["key", *(plain(group["name"]) for group in groups)], values))
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
            "; ".join(_changed(row) for row in drop["changes"] if not row["fall"]) or "-",
        ]
        for group in groups
        for run in group["runs"]
        if (drop := run["collapse"])
    ]
    if fallen:
        made.append(
            Table(
                "success that was lost in training", ["run", "best", "down to", "lost at", "what changed then"], fallen
            )
        )
    parts = list(dict.fromkeys(part for group in groups for part in list(group["seconds_per_step"])[:PARTS]))
    if parts:
        seconds = [
            [plain(group["name"]), *(_seconds(group["seconds_per_step"].get(part)) for part in parts)]
            for group in groups
        ]
        made.append(Table("seconds per step, median", ["group", *map(plain, parts)], seconds))
    return made


def _changed(row: dict[str, Any]) -> str:
    return f"{row['what']} {row['before']} to {row['after']} (step {row['step']})"


def _interval(ends: Sequence[float] | None, digits: int = 3) -> str:
    return f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}" if ends else "-"


def _chance(part: dict[str, Any]) -> str:
    text = f"{part['improvement']:.2f}"
    return f"{text} ({_interval(part['interval'], 2)})" if part["interval"] else text


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


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
        if _is_share(comparison):
            axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
    legend = row[0][0].legend(frameon=False)
    for text in legend.get_texts():
        text.set(parse_math=False, text=plain(text.get_text()))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _is_share(comparison: dict[str, Any]) -> bool:
    return comparison["metric"] == TRAINING or bool(VALIDATION.fullmatch(comparison["metric"]))
