"""One planned run: the warm start of its seed, training by ``turnkey train`` or by the plain loop, its line."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import lines
from lines import Line
from studies import Planned
from tasks import ROOT, TASKS, Task  # which makes the quickstart's modules known

from report import PACKAGES  # isort: skip
from training import Job, launch  # isort: skip

RUNS = ROOT / "runs" / "evidence"
VAL = 128


class RunFailed(RuntimeError):
    """A run that ended with an error; the message has the end of its log."""


class Taken(RuntimeError):
    """Another process is at it."""


def train(study: str, planned: Planned) -> Line:
    """Train, and return the line.

    Raises:
        Taken: another process trains it.
        RunFailed: the warm start or the run ended with an error.
    """
    home = RUNS / planned.task
    with locked(home / study / f"{planned.name}-{planned.lr:g}-{planned.seed}", wait=False) as out:
        with locked(home / f"seed-{planned.seed}") as prepared:
            _prepare(TASKS[planned.task], planned.seed, prepared)
        began = time.monotonic()
        how, steps = (_on_stack if planned.on_stack else _in_loop)(planned, out, prepared)
        about = {
            "task": planned.task,
            "variant": planned.name,
            "lr": planned.lr,
            "seed": planned.seed,
            "method": planned.variant.method,
            "overrides": list(planned.variant.overrides),
            "warm_start": hashlib.sha256((prepared / "model" / "model.safetensors").read_bytes()).hexdigest(),
            "seconds": round(time.monotonic() - began),
            "command": how,
            "versions": {name: _version(name) for name in PACKAGES},
        }
        return lines.line(about, steps)


def _in_loop(planned: Planned, out: Path, prepared: Path) -> tuple[str, lines.Steps]:
    from loop import Loop

    run = Loop(TASKS[planned.task], prepared / "model", planned.variant.method, planned.lr, planned.seed, VAL)
    steps = dict(run.run(planned.steps, planned.validate_every))
    (out / "metrics.json").write_text(json.dumps(steps))
    return "benchmarks/evidence/loop.py", steps


def _on_stack(planned: Planned, out: Path, prepared: Path) -> tuple[str, lines.Steps]:
    """``turnkey train``; goes on from the last checkpoint of a run that was interrupted."""
    for name in ("model", "tasks"):
        if not (out / name).exists():
            (out / name).symlink_to(prepared / name)
    task = TASKS[planned.task]
    job = Job(
        out=out,
        method=planned.variant.method,
        seed=planned.seed,
        steps=planned.steps,
        validate_every=planned.validate_every,
        recipe=task.env,
        task=task.overrides(),
        overrides=(
            f"actor_rollout_ref.actor.optim.lr={planned.lr:g}",
            "trainer.save_freq=4",
            "trainer.val_before_train=false",  # the model is the same for all runs of a seed
            *planned.variant.overrides,
        ),
    )
    with launch(job) as process:
        code = process.wait()
    if code:
        raise RunFailed(f"{out} ended with {code}:\n{job.log.read_text(errors='replace')[-3000:]}")
    return _portable(job.command("RAY")), lines.logged(out)


def _prepare(task: Task, seed: int, folder: Path) -> None:
    """Tasks and warm start of a seed, the same for all runs of it."""
    tasks = folder / "tasks"
    if not (tasks / "val.parquet").is_file():
        tasks.mkdir(exist_ok=True)
        task.write(tasks, VAL, seed)
    if not (folder / "model" / "model.safetensors").is_file():
        script = Path(__file__).with_name("warm_start.py")
        command = [str(script), task.name, "--seed", str(seed), "--out", str(folder / "model")]
        _stage([sys.executable, *command], folder / "warm_start.log")


def _stage(command: list[str], log: Path) -> None:
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RunFailed(f"{' '.join(command)} ended with {code}:\n{log.read_text(errors='replace')[-2000:]}")


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[Path]:
    """``folder``, for one process at a time.

    Raises:
        Taken: another process has it, without ``wait``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken(str(folder)) from None
        yield folder


def _portable(command: list[str]) -> str:
    """Without this machine's paths and without what only names folders of Ray."""
    words = [word for word in command if not word.endswith("=RAY")]
    return " ".join(["turnkey", *words[1:]]).replace(f"{ROOT}/", "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def alone(core: int) -> None:
    """Hold this process and all that it starts to one core and one thread each."""
    os.sched_setaffinity(0, {core})
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
