"""Commands that list what there is. They need no verl and no GPU."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated

import typer

app = typer.Typer()

Markdown = Annotated[bool, typer.Option("--markdown", help="for a page; default: for a terminal")]


@app.command()
def envs(
    module: Annotated[list[str] | None, typer.Option(help="module or .py file that registers environments")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
    markdown: Markdown = False,
) -> None:
    """List the environments. Shows how each is chosen, whether it is installed, and what else it needs."""
    import gymnasium

    from verl_turnkey.envs.registry import listing
    from verl_turnkey.envs.user_modules import import_modules

    known = set(gymnasium.registry)
    import_modules(module or [], "--module")
    if markdown:
        _show("environments", markdown)
        return
    rows = listing(known)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    marks = {True: "found", False: "missing", None: "needed"}
    names = (Column("environment", no_wrap=True), Column("switch", no_wrap=True))
    table = Table(*names, "what it is", "package", "needs", highlight=False)
    for row in rows:
        package = f"{row['package'] or '-'} {row['version'] or ''}".strip()
        table.add_row(
            row["id"],
            row["switch"],
            row["summary"],
            f"not installed: {row['install']}".replace("[", r"\[") if row["install"] else package,
            "\n".join(f"{marks[need['found']]}: {need['what']}" for need in row["needs"]),
        )
    Console(width=None if sys.stdout.isatty() else 190).print(table)


@app.command()
def methods(
    short: Annotated[bool, typer.Option(help="without parameters")] = False,
    markdown: Markdown = False,
) -> None:
    """List the methods. Shows the switch of each, its parameters and the columns that it needs."""
    _show("overview" if short else "methods", markdown)


@app.command()
def modifiers(markdown: Markdown = False) -> None:
    """List the modifiers of credit. Shows the parameters of each and the columns that it needs."""
    _show("modifiers", markdown)


@app.command()
def losses(markdown: Markdown = False) -> None:
    """List the policy losses. Shows the switch of each and its parameters."""
    if find_spec("torch") is None:  # their files name it in annotations; nothing is computed here
        stub = ModuleType("torch")
        stub.__spec__ = ModuleSpec("torch", None)
        stub.__dict__["Tensor"] = object
        sys.modules["torch"] = stub
    _show("losses", markdown)


@app.command()
def keys(markdown: Markdown = False) -> None:
    """List all keys under turnkey, with their defaults."""
    _show("keys", markdown)


def _show(name: str, markdown: bool) -> None:
    from verl_turnkey.plugins.cli import tables  # it imports all methods and losses, which other commands do not need

    tables.show(getattr(tables, name)(), markdown)
