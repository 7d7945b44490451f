"""``turnkey train`` and ``turnkey resume``: run verl's main program with a compact console."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.plugins.cli import console, launch, run_folder
from verl_turnkey.plugins.cli.packages import require_verl, turnkey
from verl_turnkey.plugins.cli.tasks import NUMBERS
from verl_turnkey.plugins.cli.view import compare
from verl_turnkey.plugins.config.overrides import override, values
from verl_turnkey.plugins.shutdown.run_files import locked
from verl_turnkey.plugins.view.runs import starts

app = typer.Typer()

SEEDS = (
    "data.seed",
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.actor.data_loader_seed",
    "critic.data_loader_seed",
)
"""what ``--seed`` sets: the order of the tasks, the sampling, the order of mini-batches of actor and critic"""
PLACES = ("trainer.default_local_dir", "turnkey.log.trajectories", "hydra.run.dir")
"""folders that each of several seeds has for itself"""


@app.command()
def train(
    environment: Annotated[str, typer.Argument(help="short name (babyai), gymnasium id, or my_env.py[:ID]")],
    overrides: Annotated[list[str] | None, typer.Argument(help="more verl overrides; they take precedence")] = None,
    *,
    model: Annotated[str, typer.Option(help="folder or hub name of the model")],
    method: Annotated[str, typer.Option(help="+turnkey=<method>")] = "gigpo",
    device: Annotated[str | None, typer.Option(help="gpu or cpu; default: gpu if there is one")] = None,
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 100,
    seed: Annotated[str | None, typer.Option(help="a seed, or several: 0,1,2 trains and compares a run each")] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of the run; default: runs/<environment>, with a seed runs/<...>-<seed>")
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option("--tasks", help="folder of the tasks; default: <out>/tasks; written if absent")
    ] = None,
    n_train: Annotated[int | None, typer.Option("--train", min=1, help="training tasks to write; default 1024")] = None,
    n_val: Annotated[int | None, typer.Option("--val", min=1, help="validation tasks to write; default 128")] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="write the tasks, print the launch line, and stop")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="show all output of verl, not a line per step")] = False,
) -> None:
    """Train on ENVIRONMENT. Writes the tasks and the launch line, and runs the line after all checks.

    turnkey train babyai --model Qwen/Qwen2.5-1.5B-Instruct --steps 200 turnkey.credit.gamma=0.9
    """
    require_verl("train")
    here, gpus = launch.device_here()
    if device not in (None, "cpu", "gpu"):
        raise typer.BadParameter(f"--device must be gpu or cpu, not {device!r}")
    further = overrides or []
    seeds = _seeds(seed, further)
    if launch.agent_of([environment]):
        raise typer.BadParameter(
            f"turnkey train takes an environment, and {environment} is an agent, whose tasks and settings are yours: "
            f"start it by python -m verl.trainer.main_ppo +turnkey={method} {shlex.quote(environment)} "
            "data.train_files=... (docs/your-agent.md)"
        )
    chosen = {name: number for name, number in (("train", n_train), ("val", n_val)) if number is not None}
    numbers = NUMBERS | chosen
    played = launch.resolve(environment, further)
    runs: dict[Path, list[list[str]]] = {}
    for number in seeds:
        folder = (out or Path("runs") / played.name).absolute()
        if number is not None and (out is None or len(seeds) > 1):
            folder = folder.with_name(f"{folder.name}-{number}")
        _refuse_other_seed(folder, number)
        runs[folder] = launch.overrides(
            played,
            model=model,
            method=method,
            device=device or here,
            gpus=max(1, gpus),
            steps=steps,
            tasks=(task_folder or folder / "tasks").absolute(),
            out=folder,
            further=[*([] if number is None else [override(key, number) for key in SEEDS]), *further],
        )
    for folder, lines in runs.items():
        with nullcontext() if print_only else _alone(folder):
            tasks = (task_folder or folder / "tasks").absolute()
            if launch.write_tasks(played, tasks, *numbers.values()):
                written = f"{numbers['train']} training and {numbers['val']} validation tasks of {played.id} in {tasks}"
                typer.echo(f"# {written}" if print_only else written, err=not print_only)
            else:
                ignored = f" (--{' and --'.join(chosen)} ignored)" if chosen else ""
                typer.echo(f"using the existing tasks in {tasks}{ignored}", err=True)
            if print_only:
                typer.echo(launch.shell_line(lines))
            elif code := _start(lines, folder, verbose, series=len(runs) > 1):
                if len(runs) > 1:
                    typer.echo("to continue, run the same command again: it skips finished seeds", err=True)
                raise typer.Exit(code)
    if len(runs) > 1 and not print_only:
        folders = [Path(os.path.relpath(folder)) for folder in runs]
        typer.echo(f"{turnkey()} compare {shlex.join(map(str, folders))}")
        try:
            compare(folders)
        except Exception as error:  # all are trained, and the command is there to be repeated
            typer.echo(f"no comparison: {' '.join(str(error).split())}", err=True)


def _seeds(text: str | None, further: Sequence[str]) -> list[int] | list[None]:
    """The values of ``--seed``."""
    if text is None:
        return [None]
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise typer.BadParameter(f"--seed: expected an integer of up to nine digits, or several as 0,1,2, got {text!r}")
    seeds = [int(word) for word in text.split(",")]
    if len({*seeds}) < len(seeds):
        raise typer.BadParameter(f"--seed {text} names a seed twice")
    if keys := [key for key in SEEDS if values(further, key)]:
        raise typer.BadParameter(f"--seed sets {', '.join(keys)}: leave out --seed, or the override")
    if len(seeds) > 1 and (keys := [key for key in PLACES if any(values(further, key))]):
        raise typer.BadParameter(f"--seed {text}: all seeds would share {', '.join(keys)}; --out names their folders")
    return seeds


def _refuse_other_seed(folder: Path, seed: int | None) -> None:
    """Refuse a run that was trained with another seed than ``--seed``."""
    if seed is None or not any(folder.glob("*/.hydra/config.yaml")):
        return
    if (before := starts(folder)[-1].config.get(SEEDS[0])) != seed:
        trained = f"{os.path.relpath(folder)} was trained with {'no seed' if before is None else f'seed {before}'}"
        raise typer.BadParameter(f"--seed {seed}: {trained}; choose another --out, or its seed")


def _start(lines: Sequence[Sequence[str]], folder: Path, verbose: bool, *, series: bool) -> int:
    """Run the launch line, unless its run has ended; returns the exit code."""
    started = any(folder.glob("*/.hydra"))
    words = [word for line in lines for word in line]
    if not run_folder.announce(words, os.path.relpath(folder), started=started, series=series):
        return 0
    write_text(folder / "launch.sh", f"#!/usr/bin/env bash\n{launch.shell_line(lines)}\n")
    typer.echo(f"launch line: {os.path.relpath(folder / 'launch.sh')}")
    return console.follow(launch.command(lines), folder, verbose=verbose)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="folder of the run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="more verl overrides; they take precedence")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="training steps in total; default: as before")] = None,
    print_only: Annotated[bool, typer.Option("--print", help="print the launch line and stop")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="show all output of verl, not a line per step")] = False,
) -> None:
    """Continue RUN from its last checkpoint. Runs its launch line again.

    turnkey resume runs/babyai --steps 300
    """
    require_verl("resume")
    trained = run_folder.RunFolder.of(run)
    if trained is None:
        raise typer.BadParameter(f"{run} is not the folder of a run: it contains no .hydra folder")
    folder, words = trained.launch()
    further = [*(overrides or ()), *([] if steps is None else [f"trainer.total_training_steps={steps}"])]
    line = [words, further]
    if print_only:
        typer.echo(f"cd {shlex.quote(str(folder))}\n{launch.shell_line(line)}")
        return
    name, here = os.path.relpath(trained.folder), Path.cwd()
    os.chdir(folder)  # to which paths on the line are relative
    with _alone(trained.folder):
        goes_on = run_folder.announce([*words, *further], name, started=True)
        os.chdir(here)
        if goes_on:
            raise typer.Exit(console.follow(launch.command(line), trained.folder, verbose=verbose, cwd=folder))


def _alone(folder: Path) -> AbstractContextManager[None]:
    """Hold the folder of the run as long as this process follows it."""
    taken = f"{folder}: another turnkey train or resume is at work there"
    return locked(folder, taken, "; wait for its end, or choose another --out")
