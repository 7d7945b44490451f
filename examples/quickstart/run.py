"""The quickstart: tasks, a warm start, stock ``verl.trainer.main_ppo`` with ``+turnkey=gigpo``, a report, the viewer.

Called by ``examples/quickstart.sh``, which installs what this needs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from models import Setup, setup_of  # noqa: E402
from report import draw, read_metrics, summarise  # noqa: E402
from training import TURNKEY, Job, console, launch, stage  # noqa: E402


def main(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2: 135M parameters, on errands in words; tiny: random weights, on a grid; or a folder"
        ),
    ] = "smollm2",
    steps: Annotated[
        int | None,
        typer.Option(help="training steps; 10 (8 smaller ones without bf16), 20 with tiny, 18 in a house"),
    ] = None,
    seed: Annotated[int, typer.Option(help="tasks, warm start and sampling")] = 0,
    game: Annotated[
        str, typer.Option(help="of a chat model: errands, two_errands, three_errands, service (calls of tools)")
    ] = "errands",
    method: Annotated[str, typer.Option(help="a method: +turnkey=<method>")] = "gigpo",
    out: Annotated[Path, typer.Option(help="folder of this run")] = Path("runs/quickstart"),
    resume: Annotated[bool, typer.Option(help="go on from the last checkpoint instead of starting over")] = False,
    n_val: Annotated[
        int | None,
        typer.Option(help="validation episodes, the same before and after; 64 (errands without bf16: 32), tiny 128"),
    ] = None,
    validate_every: Annotated[int, typer.Option(help="further validations every so many steps; 0: none")] = 0,
    override: Annotated[list[str] | None, typer.Option(help="one more override of the launch command")] = None,
) -> None:
    """Train for a fixed number of steps and compare validation before and after."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the training process ends as well
    began = float(os.environ.get("TURNKEY_QUICKSTART_STARTED") or time.time())
    chosen = setup_of(model, game)  # before the last run's folder is removed: there may be no such model
    steps, n_val = steps or chosen.steps, n_val or chosen.n_val
    out = out.resolve()
    if not resume and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    setup_file = out / "setup.json"
    settings = {"model": model, "game": game, "seed": seed, "method": method, "n_val": n_val}
    if resume and setup_file.exists():
        setup = json.loads(setup_file.read_text())
        changed = {key: setup[key] for key, value in settings.items() if setup.get(key, value) != value}
        if changed:
            raise typer.BadParameter(f"the run in {out} was started with {changed}; --resume goes on with the same")
    else:
        _prepare(chosen, out, seed, n_val)
        setup = {**settings, "seconds_setup": round(time.time() - began, 1)}
        setup_file.write_text(json.dumps(setup))

    job = Job(
        out=out,
        method=method,
        seed=seed,
        steps=steps,
        validate_every=validate_every,
        overrides=tuple(override or ()),
        **chosen.job,
    )
    console.print(
        f"training: {steps} steps of {job.episodes} episodes with [bold]+turnkey={method}[/] (log: {job.log})"
    )
    started = time.time()
    with launch(job, show=True) as process:
        code = process.wait()
    if code:
        raise typer.Exit(code)
    setup["seconds_train"] = round(setup.get("seconds_train", 0) + time.time() - started, 1)  # over all starts
    setup_file.write_text(json.dumps(setup))

    metrics = read_metrics(out)
    summary = summarise(metrics, setup, steps=steps)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(metrics, summary, out / "learning_curve.png")
    _table(summary)
    stage("the page", [TURNKEY, "view", str(out), "--out", str(out / "view.html")], out / "view.log")
    for what, name in (("picture", "learning_curve.png"), ("numbers", "summary.json"), ("each turn", "view.html")):
        console.print(f"{what:<10}{out / name}")
    activate = os.path.relpath(Path(sys.prefix) / "bin" / "activate")
    console.print(f"next: . {activate}; turnkey view {os.path.relpath(out)} --open")


def _prepare(chosen: Setup, out: Path, seed: int, n_val: int) -> None:
    """Tasks with disjoint seeds, and a model that knows the game a little."""
    counts = f"--train 1024 --val {n_val} --seed {seed} --data-source quickstart".split()
    tasks = [TURNKEY, "tasks", f"{out}/tasks", "--env", chosen.env, *counts, "--kwargs", json.dumps(chosen.kwargs)]
    stage("tasks", tasks, out / "tasks.log")
    script, *arguments = chosen.warm_start
    warm_start = [sys.executable, str(HERE / script), *arguments, "--out", f"{out}/model", "--seed", str(seed)]
    stage("warm start (supervised, mixed demonstrations)", warm_start, out / "warm_start.log")


def _table(summary: dict) -> None:
    console.print(f"\nvalidation: {summary['n_val']} episodes on other seeds than training, sampled at temperature 1")
    table = Table("", "before", "after")
    for name, key, form in (
        ("success", "success", "{:.3f}"),
        ("episode length", "length", "{:.1f}"),
        ("invalid actions", "invalid", "{:.1%}"),
    ):
        table.add_row(name, form.format(summary[f"{key}_before"]), form.format(summary[f"{key}_after"]))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
