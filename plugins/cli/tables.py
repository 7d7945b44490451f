"""The tables of the documentation, from the code: ``turnkey tables`` writes them between the markers of the pages."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from verl_turnkey.advantage import EstimatorSpec, ModifierSpec
from verl_turnkey.advantage.not_here import ABSENT
from verl_turnkey.advantage.paper_names import PAPER_NAMES
from verl_turnkey.advantage.registry import TIERS
from verl_turnkey.plugins.cli import recipes
from verl_turnkey.plugins.cli.recipes import attribute_docs, scalar, shipped, shipped_losses, shipped_modifiers
from verl_turnkey.plugins.config.schema import TurnkeyConfig

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec
    from verl_turnkey.plugins.config.presets import Preset


NONE: Mapping[str, Any] = MappingProxyType({})
PARAMETERS = "parameters (default)"
WRITERS = {
    "rollout": "Written by the processes that play the episodes.",
    "trainer": "Written by the trainer.",
    "actor": "Written by the actor's processes.",
}


def methods(own: Mapping[str, EstimatorSpec] = NONE) -> str:
    """Markdown: one row per estimator, the core ones first; last those that modules of the user registered."""
    rows = [f"| switch | tier | what it does | {PARAMETERS} | needs | source |", "|---|---|---|---|---|---|"]
    for switch, tier, spec in _switches(own):
        rows.append(f"| {switch} | {tier} | {spec.summary} | {_parameters(spec)} | {_needs(spec)} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def overview(own: Mapping[str, EstimatorSpec] = NONE) -> str:
    """Markdown: one short row per estimator."""
    return _without(PARAMETERS, methods(own))


def core_methods() -> str:
    """Markdown: one short row per core estimator, and how many others there are."""
    rows = ["| switch | what it does | needs | source |", "|---|---|---|---|"]
    core = [(name, spec) for name, spec in _by_tier() if spec.tier == "core"]
    for name, spec in core:
        rows.append(f"| [`+turnkey={name}`](docs/methods/{name}.md) | {spec.summary} | {_needs(spec)} | {spec.paper} |")
    return "\n".join([*rows, "", f"and [{len(shipped()) - len(core)} more](docs/methods.md)."]) + "\n"


def tiers() -> str:
    """Markdown: what each tier of methods means, and how many are in it."""
    rows = [
        f"| {tier} | {sum(spec.tier == tier for spec in shipped().values())} | {meaning} |"
        for tier, meaning in TIERS.items()
    ]
    return "\n".join(["| tier | methods | meaning |", "|---|---|---|", *rows]) + "\n"


def _switches(own: Mapping[str, EstimatorSpec]) -> Iterator[tuple[str, str, EstimatorSpec]]:
    """Switch, tier and spec of each estimator."""
    yield from ((f"[`+turnkey={name}`](methods/{name}.md)", spec.tier, spec) for name, spec in _by_tier())
    yield from ((f"`adv_estimator={name}`", "own", spec) for name, spec in own.items())


def _by_tier() -> list[tuple[str, EstimatorSpec]]:
    order = list(TIERS)
    return sorted(shipped().items(), key=lambda item: (order.index(item[1].tier), item[0]))


def literature() -> str:
    """Markdown: the names of papers and frameworks, each with our equivalent and how it differs."""
    rows = ["| name | here as | what differs, or what it needs |", "|---|---|---|"]
    for entry in sorted(PAPER_NAMES, key=lambda entry: entry.names.lower()):
        name, _, others = entry.names.partition(" / ")
        names = f"**{name}**" + (f" ({others.replace(' / ', ', ')})" if others else "")
        rows.append(f"| {names} | {'' if entry.exact else 'closest: '}[{entry.ours}]({entry.page}) | {entry.note} |")
    return "\n".join(rows) + "\n"


def absent() -> str:
    """Markdown: the methods that are not here, and why."""
    rows = [f"| {entry.names.replace(' / ', ', ')} | {entry.why} |" for entry in ABSENT]
    return "\n".join(["| method | why |", "|---|---|", *rows]) + "\n"


def modifiers(own: Mapping[str, ModifierSpec] = NONE) -> str:
    """Markdown: one row per modifier; last those that modules of the user registered."""
    rows = [f"| modifier | what it does | {PARAMETERS} | needs | source |", "|---|---|---|---|---|"]
    links = {f"[`{name}`](#{name})": spec for name, spec in shipped_modifiers().items()}
    for name, spec in (links | {f"`{name}`": spec for name, spec in own.items()}).items():
        rows.append(f"| {name} | {spec.summary} | {_parameters(spec)} | {_needs(spec)} | {spec.paper} |")
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


def losses(own: Mapping[str, LossSpec] = NONE) -> str:
    """Markdown: one row per policy loss; last those that modules of the user registered."""
    rows = [f"| switch | what it does | {PARAMETERS} | source |", "|---|---|---|---|"]
    switches = {f"+turnkey/loss={name}": spec for name, spec in shipped_losses().items()}
    for switch, spec in (switches | {f"loss_mode={name}": spec for name, spec in own.items()}).items():
        rows.append(f"| `{switch}` | {spec.summary} | {_parameters(spec)} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def _without(head: str, table: str) -> str:
    """A table without a column, which its page has elsewhere."""
    column = table.split("|").index(f" {head} ")
    rows = [line.split("|") for line in table.splitlines()]
    return "".join("|".join(row[:column] + row[column + 1 :]) + "\n" for row in rows)


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
    """Markdown: one row per key of the ``turnkey`` node that users set, with its default."""
    rows = []
    for key, default, doc in _rows("turnkey", TurnkeyConfig()):
        if not (key.startswith("turnkey.preset.") or doc.startswith("set by the driver")):
            rows.append(f"| `{key}={scalar(default)}` | {re.sub(r'; (null|0): (none|never|no [a-z]+)$', '', doc)} |")
    return "\n".join(["| key | meaning |", "|---|---|", *rows]) + "\n"


def rules() -> str:
    """Markdown: one row per rule of the checks."""
    from verl_turnkey.plugins.checks.rule_table import markdown

    return markdown()


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
    """Markdown: one row per preset."""
    from verl_turnkey.plugins.config import presets

    rows = ["| preset | method | settings of | environment | loss |", "|---|---|---|---|---|"]
    for preset in presets.shipped():
        rows.append(
            f"| {preset.name} | {preset.method} | {preset.title} | {preset.env or 'any'} | {preset.loss or 'any'} |"
        )
    return "\n".join(rows) + "\n"


def settings(preset: Preset) -> str:
    """Markdown: every value of a preset and its source."""
    rows = [f"| `{setting.key}` | `{scalar(setting.value)}` | {setting.source} |" for setting in preset.settings]
    rows += [f"| `{key}` | not found | |" for key in preset.not_found]
    return "\n".join(["| key | value | source |", "|---|---|---|", *rows]) + "\n"


def show(table: str, markdown: bool, as_json: bool = False) -> None:
    """Print a table: for a terminal of any width, as the markdown it is, or its rows as JSON."""
    if as_json:
        head, *rows = cells(table)
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows], indent=2))
        return
    print(table if markdown else on_terminal(table, None if sys.stdout.isatty() else 190), end="")


def cells(markdown: str) -> list[list[str]]:
    """The plain cells of a markdown table, head first."""
    head, _, *rows = [[plain(cell) for cell in line.strip("|").split(" | ")] for line in markdown.splitlines()]
    return [head, *rows]


def on_terminal(markdown: str, width: int | None = None) -> str:
    """A markdown table as lines for a terminal of ``width`` columns (default: the one at hand), without its marks.

    Parameters stand below what they belong to: a column of their own would leave the others a word per line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    head, *rows = cells(markdown)
    below = head.index(PARAMETERS) if PARAMETERS in head else None
    names = [name for i, name in enumerate(head) if i != below]
    shares = [*[None] * (len(names) - 3), 3, 1, 1] if len(names) > 3 else [None, 3, 2] if below else [None, 1, 2]
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
    ("README.md", "methods", core_methods),
    ("README.md", "envs", environment_pages),
    ("docs/methods.md", "tiers", tiers),
    ("docs/methods.md", "methods", overview),
    ("docs/modifiers.md", "modifiers", lambda: _without(PARAMETERS, modifiers())),
    ("docs/losses.md", "losses", lambda: _without(PARAMETERS, losses())),
    ("docs/branching.md", "strategies", lambda: _without("gives", strategies())),
    ("docs/environments.md", "envs", environments),
    ("docs/coverage.md", "here", literature),
    ("docs/coverage.md", "absent", absent),
    ("docs/configuration.md", "keys", keys),
    ("docs/rules.md", "rules", rules),
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


def write_between(page: Path, marker: str, table: str) -> bool:
    """Put ``table`` between the markers of ``page``; returns whether it was another one before."""
    text = page.read_text(encoding="utf-8")
    start, end = between(text, marker)
    changed = text[start:end] != table
    if changed:
        page.write_text(text[:start] + table + text[end:], encoding="utf-8")
    return changed


def write(root: Path) -> list[Path]:
    """Write every table into its page under ``root``, and the parameters into the recipes; returns changed files."""
    changed = dict.fromkeys(recipes.write(root))
    for name, marker, table in PLACES:
        if write_between(root / name, marker, table()):
            changed[root / name] = None
    return list(changed)
