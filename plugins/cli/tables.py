"""What there is, as tables for a terminal, a page or a script, and a method explained.

``turnkey list`` prints them; ``tools/write_tables.py`` writes some into pages.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import shlex
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from verl_turnkey.advantage import ConfigError, EstimatorSpec, ModifierSpec, estimators
from verl_turnkey.advantage import modifiers as all_modifiers
from verl_turnkey.advantage.paper_names import PAPER_NAMES, PaperName, absent, paper_name
from verl_turnkey.advantage.paper_names import plain as plain_name
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.advantage.registry import TIERS
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.verl_api.ledger import loss_names

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec
    from verl_turnkey.plugins.config.presets import Preset

Spec = TypeVar("Spec", bound="EstimatorSpec | ModifierSpec | LossSpec")

NONE: Mapping[str, Any] = MappingProxyType({})
PARAMETERS = "parameters (default)"
WIDTH = 80
"""columns of an explanation"""
ROLE = re.compile(r":\w+:`(?:~[\w.]*\.|\.)?([^`]+)`")
"""a reference in a docstring, and the name that it shows"""
# YAML reads these as other values than strings.
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def shipped() -> dict[str, EstimatorSpec]:
    """The estimators of this package, without those that a user's module registered."""
    return _of_package(estimators())


def shipped_modifiers() -> dict[str, ModifierSpec]:
    """The modifiers of this package."""
    return _of_package(all_modifiers())


def shipped_losses() -> dict[str, LossSpec]:
    """The policy losses of this package that can be chosen under verl."""
    return _of_package(_losses())


def own(kind: Literal["estimators", "modifiers", "losses"]) -> dict[str, Any]:
    """The estimators, modifiers or losses that modules of the user registered: spec by name."""
    return _of_package({"estimators": estimators, "modifiers": all_modifiers, "losses": _losses}[kind](), False)


def _losses() -> dict[str, LossSpec]:
    if not (names := loss_names()):
        return {}
    from verl_turnkey.losses import losses

    return {name: losses()[name] for name in names}


def _of_package(specs: Mapping[str, Spec], this: bool = True) -> dict[str, Spec]:
    """Those of this package, or with ``this=False`` those of others."""
    return {name: spec for name, spec in specs.items() if spec.fn.__module__.startswith("verl_turnkey.") == this}


def attribute_docs(cls: type) -> dict[str, str]:
    """The documentation of a dataclass's fields: the string below a field, or the comment behind it."""
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for before, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr):
            docs[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
        elif before.lineno in comments:
            docs[before.target.id] = comments[before.lineno]
    return docs


def scalar(value: Any) -> str:
    """A value as YAML: JSON, but words without quotes, and floats always with a decimal point."""
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    if isinstance(value, str) and value.isidentifier() and value.lower() not in YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def methods(own: Mapping[str, EstimatorSpec] = NONE) -> str:
    """One row per estimator, the core ones first; last those that modules of the user registered."""
    specs = [(f"[`+turnkey={name}`](methods/{name}.md)", spec.tier, spec) for name, spec in by_tier()]
    specs += [(f"`adv_estimator={name}`", "own", spec) for name, spec in own.items()]
    rows = ((switch, tier, spec.summary, defaults(spec.params()), *needs(spec)) for switch, tier, spec in specs)
    return table(("switch", "tier", "what it does", PARAMETERS, "needs", "source"), rows)


def overview(own: Mapping[str, EstimatorSpec] = NONE) -> str:
    """One short row per estimator."""
    return excerpt(methods(own), ("switch", "tier", "what it does", "needs"))


def by_tier() -> list[tuple[str, EstimatorSpec]]:
    order = list(TIERS)
    return sorted(shipped().items(), key=lambda item: (order.index(item[1].tier), item[0]))


def modifiers(own: Mapping[str, ModifierSpec] = NONE) -> str:
    """One row per modifier; last those that modules of the user registered."""
    specs = {f"[`{name}`](#{name})": spec for name, spec in shipped_modifiers().items()}
    specs |= {f"`{name}`": spec for name, spec in own.items()}
    rows = ((name, spec.summary, defaults(spec.params()), *needs(spec)) for name, spec in specs.items())
    return table(("modifier", "what it does", PARAMETERS, "needs", "source"), rows)


def losses(own: Mapping[str, LossSpec] = NONE) -> str:
    """One row per policy loss; last those that modules of the user registered."""
    specs = {f"+turnkey/loss={name}": spec for name, spec in shipped_losses().items()}
    specs |= {f"loss_mode={name}": spec for name, spec in own.items()}
    rows = ((f"`{switch}`", spec.summary, defaults(spec.params()), spec.paper) for switch, spec in specs.items())
    return table(("switch", "what it does", PARAMETERS, "source"), rows)


def excerpt(markdown: str, columns: Sequence[str]) -> str:
    """``columns`` of a markdown table."""
    head, *rows = _rows_of(markdown)
    places = [head.index(column) for column in columns]
    return table(columns, ([row[place] for place in places] for row in rows))


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


def needs(spec: EstimatorSpec | ModifierSpec) -> tuple[str, str]:
    """The columns that it cannot do without under its default parameters, and its source."""
    return ", ".join((*spec.needs, *getattr(spec.params(), "also_needs", ()))) or "-", spec.paper


def defaults(params: Any) -> str:
    return ", ".join(f"`{entry.name}={scalar(getattr(params, entry.name))}`" for entry in fields(params))


def keys() -> str:
    """One row per key of the ``turnkey`` node that users set, with its default."""
    rows = []
    for key, default, doc in _rows("turnkey", TurnkeyConfig()):
        if not (key.startswith("turnkey.preset.") or doc.startswith("set by the driver")):
            meaning = re.sub(r"; (null|0): (none|never|no [a-z]+)$", "", doc)
            rows.append((f"`{key}`", f"`{scalar(default)}`", meaning))
    return table(("key", "default", "meaning"), rows)


def _rows(where: str, node: Any) -> Iterator[tuple[str, Any, str]]:
    docs = attribute_docs(type(node))
    for entry in fields(node):
        key, value = f"{where}.{entry.name}", getattr(node, entry.name)
        if is_dataclass(value):
            yield from _rows(key, value)
        else:
            yield key, value, docs[entry.name]


def rewards() -> str:
    """One row per component of ``turnkey.rewards``."""
    from verl_turnkey.envs.rewards import rewards as components

    rows = ((name, plain(spec.summary), options(spec.cls)) for name, spec in components().items())
    return table(("component", "what it does", PARAMETERS), rows)


def options(cls: Any) -> str:
    """The options of a component with their defaults, long ones as dots; required ones without."""
    return ", ".join(f"`{name}{default if len(default) < 40 else '=...'}`" for name, default, _ in _options(cls))


def _options(cls: Any) -> Iterator[tuple[str, str, str]]:
    """Name, default behind a ``=``, and meaning of each field, inherited ones included."""
    docs = {
        name: doc
        for base in reversed(cls.__mro__)
        if hasattr(base, "__dataclass_fields__")
        for name, doc in attribute_docs(base).items()
    }
    for entry in fields(cls):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        yield entry.name, "" if default is MISSING else f"={scalar(default)}", plain(docs.get(entry.name, ""))


def columns() -> str:
    """One row per column of the trajectory log."""
    from verl_turnkey.plugins.log.schema import TABLES

    rows = ((name, f"`{column.name}`", column.meaning) for name, log in TABLES.items() for column in log.columns)
    return table(("table", "column", "meaning"), rows)


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
    wide = names.index("what it does") if "what it does" in names else len(names) - 3
    shares = [None, 3, 2] if below else [None, 1, 2]
    if len(names) > 3:
        shares = [*[None] * wide, 3, *[1] * (len(names) - wide - 1)]
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


def explain(name: str, formula: bool = False) -> str:
    """Explain ``name``, ours or a paper's: its launch line, its summary and parameters, any difference, its page.

    ``formula``: also the docstring of each part, with formula, source and differences from the paper and released
    code, before its parameters.
    """
    if (spec := own("estimators").get(name)) is not None:
        first = f"{name} is a method of the module {spec.fn.__module__}"
        lines = [first, "", f"    +turnkey=base algorithm.adv_estimator={name}"]
        return _text([*lines, *_part("method", spec, spec.params, "+turnkey.credit.", formula)])
    kinds = {"modifier": shipped_modifiers(), "method": shipped()}
    ours = {plain_name(key): (kind, key) for kind, specs in kinds.items() for key in specs}.get(plain_name(name))
    entry = _entry_of(*ours) if ours else paper_name(name)
    if entry is None and (missing := absent(name)):
        return "\n".join(_wrapped(f"{name} is not here: {missing.why}"))
    if entry is None:
        aliases = (alias for entry in PAPER_NAMES for alias in entry.names.split(" / "))
        names = [*shipped(), *shipped_modifiers(), *own("estimators"), *aliases]
        raise ConfigError(f"no method, loss, strategy or modifier is called {name!r}{did_you_mean(name, names)}")
    others = ", ".join(other for other in entry.names.split(" / ") if plain_name(other) != plain_name(name))
    first = f"{ours[1]} is a {ours[0]} of this package" if ours else entry.equivalent(name)
    lines = [f"{first} (also: {others})" if others else first, "", f"    {entry.line}"]
    lines += ["", f"{'note' if entry.exact else 'differs'}: {entry.note}"] if entry.note else []
    for part in _parts(entry.line):
        lines += _part(*part, formula)
    return _text([*lines, "", f"page: docs/{entry.page}"])


def explain_reward(name: str) -> str:
    """Explain the component ``name`` of ``turnkey.rewards``: its summary and its options."""
    from verl_turnkey.envs.rewards import rewards as components

    if (spec := components().get(name)) is None:
        raise ConfigError(f"no component of turnkey.rewards is called {name!r}{did_you_mean(name, components())}")
    lines = [f"{name}: {plain(spec.summary)}", ""]
    lines += [f"  {option}{default}  {meaning}" for option, default, meaning in _options(spec.cls)]
    return _text([*lines, "", "page: docs/rewards.md"])


def _part(kind: str, spec: Any, params: type, key: str, formula: bool) -> Iterator[str]:
    """An empty line, then a part of a launch line with its formula, if wanted, and its parameters."""
    source = spec.source if kind == "strategy" else spec.paper
    yield from ("", f"{kind} {spec.name}: {spec.summary}{f' ({source})' if source else ''}")
    if kind != "strategy" and spec.needs:
        yield f"  needs {', '.join(spec.needs)}"
    if formula:
        yield from ("", *_plain_docstring(spec), "parameters")
    docs, default = attribute_docs(params), params()
    for entry in fields(params):
        yield f"  {key}{entry.name}={scalar(getattr(default, entry.name))}  {docs.get(entry.name, '')}"


def _plain_docstring(spec: Any) -> Iterator[str]:
    """The docstring of a part without markup and the errors it raises; formulas stay as they are."""
    doc = (inspect.getdoc(getattr(spec, "fn", None) or spec.cls) or "").partition("\nRaises:\n")[0]
    doc = re.sub("``([a-z]{2,})``", r"'\1'", ROLE.sub(r"\1", doc))  # a name that would read as an ordinary word
    for block in doc.replace("``", "").split("\n\n"):
        if block.startswith("    "):
            yield from (*block.rstrip().splitlines(), "")
        elif block != "::":
            yield from (*textwrap.wrap(re.sub("::$", ":", block), WIDTH, break_on_hyphens=False), "")


def _text(lines: Iterable[str]) -> str:
    return "\n".join(wrapped for line in lines for wrapped in _wrapped(line))


def _entry_of(kind: str, name: str) -> PaperName:
    """The entry of a method or modifier by our own name: of a method with the names of all its papers."""
    if kind == "modifier":
        line = f"+turnkey=grpo_steps 'turnkey.credit.modify=[{name}]'"
        entries = (entry for entry in PAPER_NAMES if f"{entry.ours} ".startswith(f"the modifier {name} "))
        return next(entries, PaperName(name, name, line, f"modifiers.md#{name}"))
    same = [entry for entry in PAPER_NAMES if entry.exact and entry.ours == name]
    names = " / ".join(entry.names for entry in same) or name
    note = "; ".join(entry.note for entry in same if entry.note)
    return PaperName(names, name, f"+turnkey={name}", f"methods/{name}.md", note)


def _parts(line: str) -> Iterator[tuple[str, Any, type, str]]:
    """The parts that a launch line selects: kind, spec, class of parameters, and the prefix of their keys."""
    import yaml

    words = dict(word.split("=", 1) for word in shlex.split(line))
    if (method := words["+turnkey"]) in shipped():
        yield "method", shipped()[method], shipped()[method].params, "turnkey.credit."
    if loss := words.get("+turnkey/loss"):
        yield "loss", shipped_losses()[loss], shipped_losses()[loss].params, "turnkey.loss."
    recipe = [words["+turnkey/modifier"]] if "+turnkey/modifier" in words else []
    for name in recipe or yaml.safe_load(words.get("turnkey.credit.modify", "[]")):
        yield "modifier", shipped_modifiers()[name], shipped_modifiers()[name].params, ""
    if strategy := words.get("turnkey.rollout.strategy"):
        from verl_turnkey.plugins.rollout.strategies import read_strategy

        if (chosen := read_strategy(yaml.safe_load(strategy))) is not None:
            yield "strategy", chosen[0], chosen[0].cls, ""


def _wrapped(line: str) -> list[str]:
    """``line`` wrapped to :data:`WIDTH` columns; a line to copy (four spaces) stays whole."""
    if line.startswith("    ") or not line:
        return [line]
    indent = "      " if line.startswith("  ") else "  "
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
