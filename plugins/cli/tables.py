"""The tables of the documentation, from the code: ``turnkey tables`` writes them between the markers of the pages."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_turnkey.advantage import EstimatorSpec, ModifierSpec
from verl_turnkey.plugins.cli import recipes
from verl_turnkey.plugins.cli.recipes import attribute_docs, scalar, shipped, shipped_losses, shipped_modifiers
from verl_turnkey.plugins.config.schema import TurnkeyConfig

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec
    from verl_turnkey.plugins.config.presets import Preset


PARAMETERS = "parameters (default)"
WRITERS = {
    "rollout": "Written by the processes that play the episodes.",
    "trainer": "Written by the trainer.",
    "actor": "Written by the actor's processes.",
}


def methods() -> str:
    """Markdown: one row per estimator."""
    rows = [f"| switch | what it does | {PARAMETERS} | needs | source |", "|---|---|---|---|---|"]
    for name, spec in sorted(shipped().items()):
        needs = _needs(spec)
        switch = f"[`+turnkey={name}`](methods/{name}.md)"
        rows.append(f"| {switch} | {spec.summary} | {_parameters(spec)} | {needs} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def overview() -> str:
    """Markdown: one short row per estimator."""
    rows = ["| switch | what it does | needs | source |", "|---|---|---|---|"]
    for name, spec in sorted(shipped().items()):
        needs = _needs(spec)
        rows.append(f"| [`+turnkey={name}`](docs/methods/{name}.md) | {spec.summary} | {needs} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def modifiers() -> str:
    """Markdown: one row per modifier."""
    rows = [f"| modifier | what it does | {PARAMETERS} | needs | source |", "|---|---|---|---|---|"]
    for name, spec in shipped_modifiers().items():
        needs = _needs(spec)
        rows.append(f"| [`{name}`](#{name}) | {spec.summary} | {_parameters(spec)} | {needs} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def strategies() -> str:
    """Markdown: one row per strategy of rollouts."""
    from verl_turnkey.plugins.rollout.strategies import strategies as registered

    rows = [f"| strategy | what it does | {PARAMETERS} | gives | source |", "|---|---|---|---|---|"]
    for name, spec in registered().items():
        if spec.cls.__module__.startswith("verl_turnkey."):
            default = spec.cls()
            params = ", ".join(f"`{entry.name}={scalar(getattr(default, entry.name))}`" for entry in fields(default))
            gives = ", ".join(f"`extra.{column}`" for column in spec.gives) or "-"
            rows.append(f"| [`{name}`](#{name}) | {spec.summary} | {params} | {gives} | {spec.source} |")
    return "\n".join(rows) + "\n"


def losses() -> str:
    """Markdown: one row per policy loss."""
    rows = [f"| switch | what it does | {PARAMETERS} | source |", "|---|---|---|---|"]
    for name, spec in shipped_losses().items():
        rows.append(f"| `+turnkey/loss={name}` | {spec.summary} | {_parameters(spec)} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def environments() -> str:
    """Markdown: one row per environment."""
    from verl_turnkey.envs.catalog import ADAPTERS

    rows = ["| environment | what it is | switch | package | needs |", "|---|---|---|---|---|"]
    for adapter in ADAPTERS:
        package = f"`verl-turnkey[{adapter.extra}]`" if adapter.extra else "-"
        needs = "; ".join(need.what for need in adapter.needs) or "-"
        name, switch = f"[{adapter.name}]({adapter.page})", f"`{adapter.switch}`"
        rows.append(f"| {name} | {adapter.summary} | {switch} | {package} | {needs} |")
    return "\n".join(rows) + "\n"


def first_runs() -> str:
    """Markdown: the command that trains on each environment."""
    from verl_turnkey.envs.catalog import ADAPTERS

    rows = ["| environment | command | beside the package |", "|---|---|---|"]
    for adapter in ADAPTERS:
        needs = "; ".join(need.what for need in adapter.needs) or "-"
        command = f"turnkey train {adapter.recipe or adapter.id} --model MODEL"
        rows.append(f"| [{adapter.name}]({adapter.page}) | `{command}` | {needs} |")
    return "\n".join(rows) + "\n"


def environment_pages() -> str:
    """Markdown: the environments by name, each a link to its page."""
    from verl_turnkey.envs.catalog import ADAPTERS

    links = ", ".join(f"[{adapter.name}](docs/{adapter.page})" for adapter in ADAPTERS)
    return textwrap.fill(links, 120, break_on_hyphens=False) + "\n"


def _needs(spec: EstimatorSpec | ModifierSpec) -> str:
    """The columns that it cannot do without under its default parameters."""
    return ", ".join((*spec.needs, *getattr(spec.params(), "also_needs", ()))) or "-"


def _parameters(spec: EstimatorSpec | ModifierSpec | LossSpec) -> str:
    default = spec.params()
    return ", ".join(f"`{entry.name}={scalar(getattr(default, entry.name))}`" for entry in fields(default))


def keys() -> str:
    """Markdown: one row per key of the ``turnkey`` node, with its default."""
    rows = [f"| `{key}` | `{scalar(default)}` | {doc} |" for key, default, doc in _rows("turnkey", TurnkeyConfig())]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def log() -> str:
    """Markdown: the tables of the trajectory log, each with a row per column."""
    from verl_turnkey.plugins.log.schema import TABLES

    parts = []
    for name, table in TABLES.items():
        said = [re.sub(r"<\w+>(_<\w+>)*", r"`\g<0>`", column.meaning) for column in table.columns]
        rows = [f"| `{c.name}` | {c.type} | {meaning} |" for c, meaning in zip(table.columns, said, strict=True)]
        key = ", ".join(f"`{column}`" for column in table.key)
        head = [f"### {name}", "", f"Key: {key}. {WRITERS[table.writer]}", "", "| column | type | meaning |"]
        parts.append("\n".join([*head, "|---|---|---|", *rows]))
    return "\n" + "\n\n".join(parts) + "\n\n"


def _rows(where: str, node: Any) -> Iterator[tuple[str, Any, str]]:
    docs = attribute_docs(type(node))
    for entry in fields(node):
        key, value = f"{where}.{entry.name}", getattr(node, entry.name)
        if is_dataclass(value):
            yield from _rows(key, value)
        else:
            yield key, value, docs[entry.name]


def presets() -> str:
    """Markdown: a section per preset, with every value and where it is from."""
    from verl_turnkey.plugins.config import presets

    return "\n".join(
        _preset(preset, presets.read(preset.base) if preset.base else None) for preset in presets.shipped()
    )


def _preset(preset: Preset, base: Preset | None) -> str:
    known, notes = (base.settings, base.sources) if base else ((), {})
    lines = [f"### {preset.name}", "", f"{preset.title}.", "", "```bash", " ".join(preset.switches), "```", ""]
    lines += [f"As [{base.name}]({_anchor(base)})."] if base else []
    rows = [f"| `{one.key}` | `{scalar(one.value)}` | {one.source} |" for one in preset.settings if one not in known]
    rows += [] if base else [f"| `{key}` | not found | |" for key in preset.not_found]
    if rows:
        lines += [*([""] if base else []), "| key | value | source |", "|---|---|---|", *rows]
    if own := [f"- {word}: {text}" for word, text in preset.sources.items() if notes.get(word) != text]:
        lines += ["", *own]
    return "\n".join(lines) + "\n"


def _anchor(preset: Preset) -> str:
    return f"#{preset.name.replace('.', '')}"


def preset_names() -> str:
    """Markdown: the presets by method."""
    from verl_turnkey.plugins.config import presets

    by_method: dict[str, list[str]] = {}
    for preset in presets.shipped():
        by_method.setdefault(str(preset.method), []).append(f"[{preset.name}]({_anchor(preset)})")
    rows = [f"| [`{name}`](methods/{name}.md) | {', '.join(links)} |" for name, links in sorted(by_method.items())]
    return "\n".join(["| method | presets |", "|---|---|", *rows]) + "\n"


def show(table: str, markdown: bool) -> None:
    """Print a table, for a terminal of any width or as the markdown it is."""
    print(table if markdown else on_terminal(table, None if sys.stdout.isatty() else 190), end="")


def on_terminal(markdown: str, width: int | None = None) -> str:
    """A markdown table as lines for a terminal of ``width`` columns (default: the one at hand), without its marks.

    Parameters stand below what they belong to: a column of their own would leave the others a word per line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    head, _, *rows = [[plain(cell) for cell in line.strip("|").split(" | ")] for line in markdown.splitlines()]
    below = head.index(PARAMETERS) if PARAMETERS in head else None
    names = [name for i, name in enumerate(head) if i != below]
    shares = [None, 3, 1, 1] if len(names) > 3 else [None, 3, 2] if below else [None, 1, 2]
    columns = (Column(name, no_wrap=not i, overflow="fold", ratio=shares[i]) for i, name in enumerate(names))
    table = Table(*columns, box=SIMPLE_HEAD, expand=True, highlight=False, padding=(0, 1, 1 if below else 0, 0))
    for row in rows:
        if below is not None:
            given = row.pop(below)
            row[below - 1] += f"\n{given}"
        table.add_row(*row)
    console = Console(width=width, markup=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def plain(cell: str) -> str:
    """The text of a markdown cell, without links and code marks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").strip()


#: Page, marker, and what stands between ``<!-- marker: ... -->`` and ``<!-- /marker -->``.
PLACES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("README.md", "methods", overview),
    ("README.md", "envs", environment_pages),
    ("docs/methods.md", "methods", methods),
    ("docs/modifiers.md", "modifiers", modifiers),
    ("docs/losses.md", "losses", losses),
    ("docs/branching.md", "strategies", strategies),
    ("docs/environments.md", "envs", environments),
    ("docs/first-run.md", "envs", first_runs),
    ("docs/configuration.md", "keys", keys),
    ("docs/presets.md", "names", preset_names),
    ("docs/presets.md", "presets", presets),
    ("docs/trajectory_log.md", "log", log),
)


def between(text: str, marker: str) -> tuple[int, int]:
    """Where the table of ``marker`` begins and ends in a page.

    Raises:
        ValueError: the page has no such markers.
    """
    found = re.search(rf"<!-- {marker}: .*? -->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
    if not found:
        raise ValueError(f"expected the markers <!-- {marker}: ... --> and <!-- /{marker} --> in the page")
    return found.span(1)


def write(root: Path) -> list[Path]:
    """Write every table into its page under ``root``, and the parameters into the recipes; returns changed files."""
    changed = dict.fromkeys(recipes.write(root))
    for name, marker, table in PLACES:
        page = root / name
        text = page.read_text(encoding="utf-8")
        start, end = between(text, marker)
        if text[start:end] != table():
            page.write_text(text[:start] + table() + text[end:], encoding="utf-8")
            changed[page] = None
    return list(changed)
