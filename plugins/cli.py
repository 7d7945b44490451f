"""The command ``turnkey``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Turn-level credit for LLM agents on stock verl.",
    rich_markup_mode=None,
)


@app.command()
def doctor(
    ray: Annotated[bool, typer.Option(help="look inside a Ray worker too")] = True,
    address: Annotated[str | None, typer.Option(help="a running Ray cluster; default: start one here")] = None,
) -> None:
    """Show every extension point, here and in a Ray worker; exit 1 when something is wrong."""
    from verl_turnkey.plugins.doctor import run

    raise typer.Exit(run(in_ray=ray, address=address))


@app.command()
def tasks(
    out: Annotated[Path, typer.Argument(help="folder for train.parquet and val.parquet")],
    env: Annotated[str, typer.Option(help="gymnasium id of the environment")],
    kwargs: Annotated[str, typer.Option(help="arguments of the environment, as JSON")] = "{}",
    train: Annotated[int, typer.Option(help="number of training tasks")] = 1024,
    val: Annotated[int, typer.Option(help="number of validation tasks")] = 128,
    seed: Annotated[int, typer.Option(help="draws the tasks' seeds; training and validation never share one")] = 0,
    data_source: Annotated[str | None, typer.Option(help="name in verl's validation metrics")] = None,
    module: Annotated[list[str] | None, typer.Option(help="module or .py file that registers the environment")] = None,
) -> None:
    """Write tasks as the parquet files that verl reads."""
    from verl_turnkey.envs import make
    from verl_turnkey.envs.modules import import_modules
    from verl_turnkey.envs.tasks import Task, split_seeds, write_parquet

    import_modules(module or [])
    try:
        arguments = json.loads(kwargs)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--kwargs must be a JSON object, got {kwargs!r} ({error})") from None
    make(env, arguments).close()  # a bad id or argument is found here, not in the training run
    out.mkdir(parents=True, exist_ok=True)
    train_seeds, val_seeds = split_seeds(train, val, seed)
    for split, seeds in (("train", train_seeds), ("val", val_seeds)):
        path = out / f"{split}.parquet"
        write_parquet(path, [Task(env, s, arguments) for s in seeds], data_source or env.split("/")[-1], split)
        typer.echo(f"{len(seeds)} tasks in {path}")


@app.command()
def recipe(name: Annotated[str, typer.Argument(help="a method, base, or loss/<policy loss>")]) -> None:
    """Print a recipe file as the dataclasses define it."""
    from verl_turnkey.plugins.recipes import render

    typer.echo(render(name), nl=False)


@app.command()
def methods(
    short: Annotated[bool, typer.Option(help="without parameters, as it stands in the README")] = False,
) -> None:
    """Print the table of methods, as it stands in docs/methods.md."""
    from verl_turnkey.plugins import tables

    typer.echo(tables.overview() if short else tables.methods(), nl=False)


@app.command()
def losses() -> None:
    """Print the table of policy losses, as it stands in docs/losses.md."""
    from verl_turnkey.plugins import tables

    typer.echo(tables.losses(), nl=False)


@app.command()
def keys() -> None:
    """Print the table of all keys under ``turnkey:``, as it stands in docs/configuration.md."""
    from verl_turnkey.plugins import tables

    typer.echo(tables.keys(), nl=False)


def main() -> None:
    """Entry point of the console script: errors of the user's input in one line, not in a traceback."""
    try:
        app()
    except (ValueError, LookupError, ImportError, TypeError) as error:
        typer.echo(f"turnkey: {error.args[0] if error.args else error}", err=True)
        raise SystemExit(2) from None
