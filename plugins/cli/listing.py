"""Commands that list what there is. They need no verl and no GPU."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated, Any, Literal

import gymnasium
import typer

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.registry import listing
from verl_turnkey.envs.user_modules import import_installed, import_modules
from verl_turnkey.plugins.cli import tables
from verl_turnkey.plugins.config.presets import names, read

app = typer.Typer(help="List methods, losses, rewards, environments, keys, ...", no_args_is_help=True)

Markdown = Annotated[bool, typer.Option("--markdown", help="for a page; default: for a terminal")]
Json = Annotated[bool, typer.Option("--json", help="for scripts")]


@app.command()
def envs(
    module: Annotated[list[str] | None, typer.Option(help="module or .py file that registers environments")] = None,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """List the environments. Shows how each is chosen, whether it is installed, and what else it needs."""
    before = set(gymnasium.registry)
    import_modules(module or [], "--module", ("envs",))
    if markdown:
        _show("environments", markdown)
        return
    rows = listing(before)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo("\n".join(line for row in rows for line in _environment(row, shutil.get_terminal_size().columns)))


def _environment(row: dict[str, Any], width: int) -> list[str]:
    """An environment as a heading and indented lines, none longer than ``width`` where words allow it."""
    package = f"{row['package'] or ''} {row['version'] or ''}".strip()
    marks = {True: "found", False: "missing", None: "needed"}
    lines = [row["summary"], f"not installed: {row['install']}" if row["install"] else package]
    lines += [f"{marks[need['found']]}: {need['what']}" for need in row["needs"]]
    heading = f"{row['id']}  {row['switch']}" if row["switch"] != row["id"] else row["id"]
    wrapped = [part for line in lines if line for part in textwrap.wrap(line, width - 4, break_on_hyphens=False)]
    return [heading, *(f"    {part}" for part in wrapped), ""]


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="explain this one: a name of ours, of a paper, an arXiv number")
    ] = None,
    short: Annotated[bool, typer.Option(help="without parameters")] = False,
    formula: Annotated[bool, typer.Option(help="with NAME: its formula, source, and deviations from it")] = False,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """List the methods, or explain NAME. Shows switch, tier, parameters and the columns that each needs."""
    if name is not None:
        _stand_in_for_torch()
        _own("estimators")
        _explain(tables.explain(name, formula), markdown, as_json)
        return
    _show("overview" if short else "methods", markdown, as_json, _own("estimators"))


@app.command()
def modifiers(markdown: Markdown = False, as_json: Json = False) -> None:
    """List the modifiers of credit. Shows the parameters of each and the columns that it needs."""
    _show("modifiers", markdown, as_json, _own("modifiers"))


@app.command()
def losses(markdown: Markdown = False, as_json: Json = False) -> None:
    """List the policy losses. Shows the switch of each and its parameters."""
    _stand_in_for_torch()
    _show("losses", markdown, as_json, _own("losses"))


@app.command()
def keys(markdown: Markdown = False, as_json: Json = False) -> None:
    """List all keys under turnkey, with their defaults."""
    _show("keys", markdown, as_json)


@app.command()
def rewards(
    name: Annotated[str | None, typer.Argument(help="explain the options of this one")] = None,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """List the components of turnkey.rewards, or explain NAME."""
    if name is not None:
        _explain(tables.explain_reward(name), markdown, as_json)
        return
    _show("rewards", markdown, as_json)


@app.command()
def columns(markdown: Markdown = False, as_json: Json = False) -> None:
    """List the columns of the trajectory log."""
    _show("columns", markdown, as_json)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="show this one: every value and its source")] = None,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """List the published settings, or show those of one preset."""
    if name is None:
        _show("presets", markdown, as_json)
        return
    if name not in names():
        raise typer.BadParameter(
            f"no preset {name!r}{did_you_mean(name, names()) or ';'} `turnkey list presets` lists them"
        )
    preset = read(name)
    if as_json:
        tables.show(tables.settings(preset), markdown, as_json)
        return
    typer.echo(f"{preset.title}\n\n    {' '.join(preset.switches)}\n")
    tables.show(tables.settings(preset), markdown)
    for word, source in preset.sources.items():
        typer.echo(f"{word}: {source}")


def _stand_in_for_torch() -> None:
    """Where it is not installed: losses name it in annotations, and nothing is computed here."""
    if find_spec("torch") is None:
        stub = ModuleType("torch")
        stub.__spec__ = ModuleSpec("torch", None)
        stub.__dict__["Tensor"] = object
        sys.modules["torch"] = stub


def _own(kind: Literal["estimators", "modifiers", "losses"]) -> dict[str, Any]:
    """What installed packages register of ``kind``."""
    import_installed([kind.replace("modifiers", "estimators")])
    return tables.own(kind)


def _explain(text: str, markdown: bool, as_json: bool) -> None:
    if markdown or as_json:
        raise typer.BadParameter("--json and --markdown apply to the full table; leave out NAME to get it")
    typer.echo(text)


def _show(name: str, markdown: bool, as_json: bool = False, *own: Any) -> None:
    tables.show(getattr(tables, name)(*own), markdown, as_json)
