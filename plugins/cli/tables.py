"""The tables of the documentation, from the code: ``turnkey tables`` writes them between the markers of the pages."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def methods(own: Mapping[str, EstimatorSpec] = NONE) -> str:
    """One row per estimator, the core ones first; last those that modules of the user registered."""
    head = ("switch", "tier", "what it does", PARAMETERS, "needs", "source")
    return table(head, ((*row, spec.summary, _defaults(spec.params()), *_needs(spec)) for row, spec in _switches(own)))


def overview(own: Mapping[str, EstimatorSpec] = NONE) -> str:
    """One short row per estimator."""
    return excerpt(methods(own), ("switch", "tier", "what it does", "needs"))


def core_methods() -> str:
    """One short row per core estimator, and how many others there are."""
    core = {name: spec for name, spec in _by_tier() if spec.tier == "core"}
    rows = [
        (f"[`+turnkey={name}`](docs/methods/{name}.md)", spec.summary, *_needs(spec)) for name, spec in core.items()
    ]
    others = f"and [{len(shipped()) - len(core)} more](docs/methods.md)."
    return f"{table(('switch', 'what it does', 'needs', 'source'), rows)}\n{others}\n"


def tiers() -> str:
    """What each tier of methods means, and how many are in it."""
    numbers = Counter(spec.tier for spec in shipped().values())
    return table(("tier", "methods", "meaning"), ((tier, numbers[tier], meaning) for tier, meaning in TIERS.items()))


def _switches(own: Mapping[str, EstimatorSpec]) -> Iterator[tuple[tuple[str, str], EstimatorSpec]]:
    """Switch and tier of each estimator, and its spec."""
    yield from (((f"[`+turnkey={name}`](methods/{name}.md)", spec.tier), spec) for name, spec in _by_tier())
    yield from (((f"`adv_estimator={name}`", "own"), spec) for name, spec in own.items())


def _by_tier() -> list[tuple[str, EstimatorSpec]]:
    order = list(TIERS)
    return sorted(shipped().items(), key=lambda item: (order.index(item[1].tier), item[0]))


def literature() -> str:
    """The names of papers and frameworks, each with our equivalent and how it differs."""
    rows = []
    for entry in sorted(PAPER_NAMES, key=lambda entry: entry.names.lower()):
        name, _, others = entry.names.partition(" / ")
        names = name + (f" ({others.replace(' / ', ', ')})" if others else "")
        rows.append((names, f"{'' if entry.exact else 'closest: '}[{entry.ours}]({entry.page})", entry.note))
    return table(("name", "here as", "what differs, or what it needs"), rows)


def absent() -> str:
    """The methods that are not here, and why."""
    return table(("method", "why"), ((entry.names.replace(" / ", ", "), entry.why) for entry in ABSENT))


def modifiers(own: Mapping[str, ModifierSpec] = NONE) -> str:
    """One row per modifier; last those that modules of the user registered."""
    specs = {f"[`{name}`](#{name})": spec for name, spec in shipped_modifiers().items()}
    specs |= {f"`{name}`": spec for name, spec in own.items()}
    rows = ((name, spec.summary, _defaults(spec.params()), *_needs(spec)) for name, spec in specs.items())
    return table(("modifier", "what it does", PARAMETERS, "needs", "source"), rows)


def strategies() -> str:
    """One row per strategy of rollouts."""
    from verl_turnkey.plugins.rollout.strategies import strategies as registered

    rows = []
    for name, spec in registered().items():
        if spec.cls.__module__.startswith("verl_turnkey."):
            gives = ", ".join(f"`extra.{column}`" for column in spec.gives) or "-"
            rows.append((f"[`{name}`](#{name})", spec.summary, _defaults(spec.cls()), gives, spec.source))
    return table(("strategy", "what it does", PARAMETERS, "gives", "source"), rows)


def losses(own: Mapping[str, LossSpec] = NONE) -> str:
    """One row per policy loss; last those that modules of the user registered."""
    specs = {f"+turnkey/loss={name}": spec for name, spec in shipped_losses().items()}
    specs |= {f"loss_mode={name}": spec for name, spec in own.items()}
    rows = ((f"`{switch}`", spec.summary, _defaults(spec.params()), spec.paper) for switch, spec in specs.items())
    return table(("switch", "what it does", PARAMETERS, "source"), rows)


def excerpt(markdown: str, columns: Sequence[str], keep: Callable[[list[str]], bool] = lambda row: True) -> str:
    """``columns`` of a markdown table, of the rows that ``keep`` is true of."""
    head, *rows = _rows_of(markdown)
    places = [head.index(column) for column in columns]
    return table(columns, ([row[place] for place in places] for row in rows if keep(row)))


def environments() -> str:
    """One row per environment."""
    from verl_turnkey.envs.catalog import ADAPTERS

    rows = []
    for adapter in ADAPTERS:
        package = f"`verl-turnkey[{adapter.extra}]`" if adapter.extra else "-"
        needs = "; ".join(need.what for need in adapter.needs) or "-"
        name, switch = f"[{adapter.name}]({adapter.page})", f"`{adapter.switch}`"
        rows.append((name, adapter.summary, switch, package, needs))
    return table(("environment", "what it is", "switch", "package", "needs"), rows)


def environment_pages() -> str:
    """The environments by name, each a link to its page."""
    from verl_turnkey.envs.catalog import ADAPTERS

    links = ", ".join(f"[{adapter.name}](docs/{adapter.page})" for adapter in ADAPTERS)
    return textwrap.fill(links, 120, break_on_hyphens=False) + "\n"


def _needs(spec: EstimatorSpec | ModifierSpec) -> tuple[str, str]:
    """The columns that it cannot do without under its default parameters, and its source."""
    return ", ".join((*spec.needs, *getattr(spec.params(), "also_needs", ()))) or "-", spec.paper


def _defaults(params: Any) -> str:
    return ", ".join(f"`{entry.name}={scalar(getattr(params, entry.name))}`" for entry in fields(params))


def keys() -> str:
    """One row per key of the ``turnkey`` node that users set, with its default."""
    rows = []
    for key, default, doc in _rows("turnkey", TurnkeyConfig()):
        if not (key.startswith("turnkey.preset.") or doc.startswith("set by the driver")):
            rows.append((f"`{key}={scalar(default)}`", re.sub(r"; (null|0): (none|never|no [a-z]+)$", "", doc)))
    return table(("key", "meaning"), rows)


def rules() -> str:
    """The rules of the checks, a table per level."""
    from verl_turnkey.plugins.checks.rule_table import markdown

    return markdown()


def log() -> str:
    """The tables of the trajectory log: a row per column, for keys in the first table that has them."""
    from verl_turnkey.plugins.log.schema import TABLES

    parts, before, keys = [], set(), {name for columns_of in TABLES.values() for name in columns_of.key}
    for name, columns_of in TABLES.items():
        key = ", ".join(f"`{column}`" for column in columns_of.key)
        rows = [
            (f"`{column.name}`", column.type, re.sub(r"<\w+>(_<\w+>)*", r"`\g<0>`", column.meaning))
            for column in columns_of.columns
            if column not in before or column.name not in keys
        ]
        before.update(columns_of.columns)
        head = f"### {name}\n\nKey: {key}. {WRITERS[columns_of.writer]}\n\n"
        parts.append(head + table(("column", "type", "meaning"), rows))
    return "\n" + "\n".join(parts) + "\n"


def _rows(where: str, node: Any) -> Iterator[tuple[str, Any, str]]:
    docs = attribute_docs(type(node))
    for entry in fields(node):
        key, value = f"{where}.{entry.name}", getattr(node, entry.name)
        if is_dataclass(value):
            yield from _rows(key, value)
        else:
            yield key, value, docs[entry.name]


def presets() -> str:
    """One row per preset."""
    from verl_turnkey.plugins.config.presets import shipped as all_presets

    rows = (
        (preset.name, preset.method, preset.title, preset.env or "any", preset.loss or "any")
        for preset in all_presets()
    )
    return table(("preset", "method", "settings of", "environment", "loss"), rows)


def settings(preset: Preset) -> str:
    """Every value of a preset and its source."""
    rows = [(f"`{setting.key}`", f"`{scalar(setting.value)}`", setting.source) for setting in preset.settings]
    return table(("key", "value", "source"), [*rows, *((f"`{key}`", "not found", "") for key in preset.not_found)])


def show(text: str, markdown: bool, as_json: bool = False) -> None:
    """Print a markdown table: for a terminal of any width, as it is, or its rows as JSON."""
    if as_json:
        head, *rows = cells(text)
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows], indent=2))
        return
    print(text if markdown else on_terminal(text, None if sys.stdout.isatty() else 190), end="")


def _rows_of(markdown: str) -> list[list[str]]:
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown.splitlines()]
    return [head, *rows]


def cells(markdown: str) -> list[list[str]]:
    """The plain cells of a markdown table, head first."""
    return [[plain(cell) for cell in row] for row in _rows_of(markdown)]


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
    grid = Table(*columns, box=SIMPLE_HEAD, expand=True, highlight=False, padding=(0, 1, 1 if below else 0, 0))
    for row in rows:
        if below is not None:
            parameters = row.pop(below)
            row[below - 1] += f"\n{parameters}"
        grid.add_row(*row)
    console = Console(width=width, markup=False)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def plain(cell: str) -> str:
    """The text of a markdown cell, without links and code marks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").strip()


def doors() -> str:
    """What works where, from the table that the tests read."""
    import yaml

    file = Path(__file__).resolve().parents[2] / "tests" / "data" / "doors.yaml"
    cells = yaml.safe_load(file.read_text(encoding="utf-8"))["cells"]

    def mark(cell: str) -> str:
        word, _, where = cell.partition(" ")
        return {"plain": "–", "refused": f"`{where}`" if "::" not in where else "refused"}.get(word, "✓")

    def of(names: Sequence[str]) -> str:
        rows = ((key, *(mark(row[name]) for name in names)) for key, row in cells.items() if key != "plain")
        return table(("", *names), rows)

    names = [*cells["plain"]]
    return "\n".join(of(names[k : k + 5]) for k in range(0, len(names), 5))  # one table would be wider than a window


#: Page, marker, and what stands between ``<!-- marker: ... -->`` and ``<!-- /marker -->``.
PLACES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("README.md", "methods", core_methods),
    ("README.md", "envs", environment_pages),
    ("docs/methods.md", "tiers", tiers),
    ("docs/methods.md", "methods", overview),
    ("docs/modifiers.md", "modifiers", lambda: excerpt(modifiers(), ("modifier", "what it does", "source"))),
    ("docs/losses.md", "losses", lambda: excerpt(losses(), ("switch", "what it does", "source"))),
    (
        "docs/branching.md",
        "strategies",
        lambda: excerpt(strategies(), ("strategy", "what it does", PARAMETERS, "source")),
    ),
    ("docs/environments.md", "envs", environments),
    ("docs/coverage.md", "here", literature),
    ("docs/coverage.md", "absent", absent),
    ("docs/capabilities.md", "doors", doors),
    ("docs/configuration.md", "keys", keys),
    ("docs/rules.md", "rules", rules),
    ("docs/trajectory_log.md", "log", log),
)


def between(text: str, marker: str) -> tuple[int, int]:
    """Where the table of ``marker`` begins and ends in a page."""
    section = re.search(rf"<!-- {marker}: .*? -->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
    if not section:
        raise ValueError(f"expected the markers <!-- {marker}: ... --> and <!-- /{marker} --> in the page")
    return section.span(1)


def write_between(page: Path, marker: str, content: str) -> bool:
    """Put ``content`` between the markers of ``page``; returns whether it was another one before."""
    text = page.read_text(encoding="utf-8")
    start, end = between(text, marker)
    changed = text[start:end] != content
    if changed:
        page.write_text(text[:start] + content + text[end:], encoding="utf-8")
    return changed


def write(root: Path) -> list[Path]:
    """Write every table into its page under ``root``, and the parameters into the recipes; returns changed files."""
    changed = dict.fromkeys(recipes.write(root))
    for name, marker, content in PLACES:
        if write_between(root / name, marker, content()):
            changed[root / name] = None
    return list(changed)
