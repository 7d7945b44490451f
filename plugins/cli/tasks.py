"""``turnkey tasks``: tasks as the parquet files that verl reads, from seeds or from rows of one's own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_turnkey.envs import make
from verl_turnkey.envs.tasks import Task, split_seeds, write_parquet
from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.cli.env_checks import write_tasks
from verl_turnkey.plugins.cli.task_rows import TaskRow, arguments_of, split_rows, task_rows
from verl_turnkey.plugins.config.overrides import override

app = typer.Typer()

NUMBERS = {"train": 1024, "val": 128}
"""tasks without --from"""


@app.command()
def tasks(
    out: Annotated[Path, typer.Argument(help="folder for train.parquet and val.parquet")],
    env: Annotated[str | None, typer.Option(help="short name (babyai), gymnasium id, or my_env.py[:ID]")] = None,
    kwargs: Annotated[str, typer.Option(help="arguments of the environment, as JSON")] = "{}",
    val_kwargs: Annotated[str, typer.Option(help="what is different for validation, as JSON")] = "{}",
    source: Annotated[
        str | None, typer.Option("--from", help="rows of your own: jsonl, json, csv, tsv, parquet; or NAME@SPLIT")
    ] = None,
    val_source: Annotated[
        str | None, typer.Option("--val-from", help="validation rows; default: some of the rows of --from")
    ] = None,
    columns: Annotated[str, typer.Option(help='with --from, as JSON: {"answer": "my_column"}')] = "{}",
    train: Annotated[int | None, typer.Option(min=1, help="training tasks; default 1024, or all rows")] = None,
    val: Annotated[int | None, typer.Option(min=1, help="validation tasks; default 128, or a tenth of rows")] = None,
    seed: Annotated[int, typer.Option(help="draws the tasks' seeds; training and validation never share one")] = 0,
    data_source: Annotated[str | None, typer.Option(help="name in verl's validation metrics")] = None,
    module: Annotated[list[str] | None, typer.Option(help="module that registers the id of --env")] = None,
    harbor: Annotated[Path | None, typer.Option(help="folder of Harbor tasks; --val-from names another one")] = None,
    ignore_dockerfile: Annotated[bool, typer.Option(help="Harbor tasks run on this machine's programs")] = False,
) -> None:
    """Write tasks as the parquet files that verl reads. From seeds of an environment, rows of your own, or Harbor."""
    if (env is None) == (harbor is None):
        raise typer.BadParameter("give either --env or --harbor")
    if harbor is not None:
        val_folder = None if val_source is None else Path(val_source)
        options: dict[str, Any] = {"train": train, "val": val, "seed": seed, "data_source": data_source}
        lines = write_tasks(out, harbor, val_folder, ignore_dockerfile=ignore_dockerfile, **options)
        typer.echo("\n".join(lines))
        return
    assert env is not None
    played = launch.environment(env, module or [])
    arguments = {"train": json_object(kwargs)}
    held_out = played.held_out("val") if played.recipe else {}
    arguments["val"] = {**held_out, **arguments["train"], **json_object(val_kwargs, "--val-kwargs")}
    if source is None:
        if val_source is not None or json_object(columns, "--columns"):
            raise typer.BadParameter("--val-from and --columns go with --from")
        numbers = (train or NUMBERS["train"], val or NUMBERS["val"])
        rows = {split: [TaskRow()] * number for split, number in zip(arguments, numbers, strict=True)}
    else:
        rows = _rows(played.id, source, val_source, json_object(columns, "--columns"), train=train, val=val, seed=seed)
    seeds = dict(zip(rows, split_seeds(len(rows["train"]), len(rows["val"]), seed), strict=True))
    written = {
        split: [
            Task(played.id, drawn if row.seed is None else row.seed, arguments[split] | row.kwargs)
            for row, drawn in zip(rows[split], seeds[split], strict=True)
        ]
        for split in rows
    }
    for of_split in written.values():  # a bad id or argument is found here, not in the training run
        make(played.id, {**played.kwargs, **of_split[0].kwargs}).close()
    for split, of_split in written.items():
        path = out / f"{split}.parquet"
        further: dict[str, Any] = {
            f"{name}s": [getattr(row, name) for row in rows[split]] for name in ("prompt", "answer", "hint")
        }
        write_parquet(path, of_split, data_source or played.name, split, **further)
        typer.echo(f"{len(of_split)} tasks in {path}")
    if modules := [*(module or ()), *([str(played.module)] if played.module else ())]:
        words = (override("turnkey.env.id", played.id), override("turnkey.modules", modules))
        typer.echo(f"on a launch line: {shlex.join(words)}")


def _rows(
    env: str, source: str, val_source: str | None, columns: dict[str, Any], **numbers: Any
) -> dict[str, list[TaskRow]]:
    """The rows of training and of validation, without an equal one in both; ``numbers``: of :func:`split_rows`."""
    accepted = arguments_of(env)
    rows, summary = task_rows(source, accepted, columns)
    typer.echo(summary)
    others = None if val_source is None else task_rows(val_source, accepted, columns)[0]
    return dict(zip(("train", "val"), split_rows(rows, others, **numbers), strict=True))


def json_object(text: str, option: str = "--kwargs") -> dict[str, Any]:
    """The value of ``option`` as a dict."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{option} must be a JSON object, got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{option} must be a JSON object, got {text!r}")
    return value
