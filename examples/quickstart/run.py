"""The quickstart: tasks, a warm-started tiny model, stock ``verl.trainer.main_ppo`` with ``+turnkey=gigpo``, a report.

Called by ``examples/quickstart.sh``, which installs what this needs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from report import draw, read_metrics, summarise  # noqa: E402
from training import HISTORY, LEVEL, MAX_TURNS, Job, follow, launch  # noqa: E402

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def main(
    steps: Annotated[int, typer.Option(help="training steps; the number is fixed, nothing stops early")] = 20,
    seed: Annotated[int, typer.Option(help="tasks, warm start and sampling")] = 0,
    method: Annotated[str, typer.Option(help="a method: +turnkey=<method>")] = "gigpo",
    out: Annotated[Path, typer.Option(help="folder of this run")] = Path("runs/quickstart"),
    resume: Annotated[bool, typer.Option(help="go on from the last checkpoint instead of starting over")] = False,
    n_val: Annotated[int, typer.Option(help="validation episodes, the same seeds before and after")] = 128,
    validate_every: Annotated[int, typer.Option(help="further validations every so many steps; 0: none")] = 0,
    override: Annotated[list[str] | None, typer.Option(help="one more override of the launch command")] = None,
) -> None:
    """Train for a fixed number of steps and compare validation before and after."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the training process is ended as well
    began = float(os.environ.get("TURNKEY_QUICKSTART_STARTED") or time.time())
    out = out.resolve()
    if not resume and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    setup_file = out / "setup.json"
    wanted = {"seed": seed, "method": method, "n_val": n_val}
    if resume and setup_file.exists():
        setup = json.loads(setup_file.read_text())
        changed = {key: setup[key] for key, value in wanted.items() if setup[key] != value}
        if changed:
            raise typer.BadParameter(f"the run in {out} was started with {changed}; --resume goes on with the same")
    else:
        _prepare(out, seed, n_val)
        setup = {**wanted, "seconds_setup": round(time.time() - began, 1)}
        setup_file.write_text(json.dumps(setup))

    job = Job(
        out=out, method=method, seed=seed, steps=steps, validate_every=validate_every, overrides=tuple(override or ())
    )
    console.print(
        f"training: {steps} steps of {job.episodes} episodes with [bold]+turnkey={method}[/] (log: {job.log})"
    )
    started = time.time()
    with launch(job) as process:
        follow(process, job, console)
    setup["seconds_train"] = round(setup.get("seconds_train", 0) + time.time() - started, 1)  # over all starts
    setup_file.write_text(json.dumps(setup))

    metrics = read_metrics(out)
    summary = summarise(metrics, setup, steps=steps)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(metrics, summary, out / "learning_curve.png")
    _table(summary)
    console.print(f"picture: {out / 'learning_curve.png'}\nnumbers: {out / 'summary.json'}")


def _prepare(out: Path, seed: int, n_val: int) -> None:
    """Tasks with disjoint seeds, and the tiny model."""
    turnkey = Path(sys.executable).with_name("turnkey")
    kwargs = json.dumps({"level": LEVEL, "max_steps": MAX_TURNS})
    tasks = (
        f"tasks {out}/tasks --env turnkey/MiniGrid-v0 --train 1024 --val {n_val} --seed {seed} --data-source doorkey"
    )
    _stage("tasks", [str(turnkey), *tasks.split(), "--kwargs", kwargs], out / "tasks.log")
    warm_start = f"--out {out}/model --seed {seed} --level {LEVEL} --history {HISTORY} --max-turns {MAX_TURNS}"
    _stage(
        "warm start (supervised, mixed demonstrations)",
        [sys.executable, str(HERE / "warm_start.py"), *warm_start.split()],
        out / "warm_start.log",
    )


def _stage(name: str, command: list[str], log: Path) -> None:
    began = time.time()
    with console.status(f"{name} ..."), log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        console.print(f"[red]{name} failed[/] (exit {code}); the end of {log}:")
        console.print(log.read_text()[-2000:], markup=False)
        raise typer.Exit(code)
    console.print(f"{name}: {time.time() - began:.0f} s")


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
