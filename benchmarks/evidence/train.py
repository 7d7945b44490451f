"""One planned run: warm start of its seed, training with ``turnkey train`` or in the plain loop, its line."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lines
from lines import Line
from studies import Planned
from tasks import ROOT, TASKS, Task  # puts the quickstart's modules on the path

from report import versions  # isort: skip
from training import Job, launch  # isort: skip

RUNS = ROOT / "runs" / "evidence"


class RunFailed(RuntimeError):
    """A run that ended with an error; the message has the end of its log."""


class Taken(RuntimeError):
    """Another process trains this run."""


def train(study: str, planned: Planned, *, again: bool = False) -> Line:
    """Train unless there is a line, or ``again``; saves the line if there is none, and returns it.

    Raises:
        Taken: another process trains it.
        RunFailed: the warm start or the run ended with an error, or before the end.
    """
    critic = f"-{planned.variant.critic_lr:g}" if planned.variant.critic_lr else ""
    where = f"{planned.name}-{planned.lr:g}{critic}-{planned.seed}"
    with locked(RUNS / planned.task / study / where, wait=False) as out:
        kept = lines.kept(study, planned.key)
        if kept and not again:
            return kept
        if kept:
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
        line = _trained(study, planned, out)
        if not kept:
            with locked(RUNS):
                lines.add(study, line)
        return line


def _trained(study: str, planned: Planned, out: Path) -> Line:
    prepared = _prepare(TASKS[planned.task], planned.seed, RUNS / planned.task)
    began = time.monotonic()
    launched, steps = (_on_stack if planned.on_stack else _in_loop)(planned, out, prepared)
    about = {
        "task": planned.task,
        "variant": planned.name,
        "lr": planned.lr,
        **({"critic_lr": planned.variant.critic_lr} if planned.variant.critic_lr else {}),
        "seed": planned.seed,
        "method": planned.variant.method,
        "overrides": list(planned.variant.overrides),
        "warm_start": _checksum(prepared.model),
        "seconds": round(time.monotonic() - began),
        "command": lines.command(study, planned.key),
        **launched,
        "revision": _revision(),
        "versions": versions(),
    }
    try:
        line = lines.line(about, steps)
    except LookupError as error:
        raise RunFailed(f"{out}: {error}") from None
    if lines.validations(line)[0][-1:] != [planned.steps]:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)  # or it would only resume there and end again
        raise RunFailed(f"{out} was not validated at step {planned.steps}")
    return line


def _in_loop(planned: Planned, out: Path, prepared: Prepared) -> tuple[dict[str, str], lines.Steps]:
    from loop import Loop

    task = TASKS[planned.task]
    run = Loop(task, prepared.model, planned.variant, planned.lr, planned.seed, task.val_tasks)
    if not planned.validate_before:
        return {}, dict(run.run(planned.steps, planned.validate_every))
    same = hashlib.sha256(f"{task} {_checksum(prepared.model)}".encode()).hexdigest()
    with locked(RUNS / planned.task / f"validated-{planned.seed}") as folder:
        steps = run.run(planned.steps, planned.validate_every, folder / f"{same[:16]}.pt")
        before = dict([next(steps)])  # then other methods may reuse it
    return {}, before | dict(steps)


def _revision() -> str:
    """Of this checkout; ``-dirty`` where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _checksum(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def _on_stack(planned: Planned, out: Path, prepared: Prepared) -> tuple[dict[str, str], lines.Steps]:
    """Run ``turnkey train``, and keep its launch line; an interrupted run resumes from its last checkpoint."""
    for name, there in (("model", prepared.model), ("tasks", prepared.tasks)):
        if not (out / name).exists():
            (out / name).symlink_to(there)
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
            f"trainer.val_before_train={str(planned.validate_before).lower()}",
            *planned.variant.overrides,
        ),
    )
    with launch(job) as process:
        code = process.wait()
    if code:
        raise RunFailed(f"{out} ended with {code}:\n{job.log.read_text(errors='replace')[-3000:]}")
    return {"launch": _portable(job.command("RAY"))}, lines.logged(out)


@dataclass(frozen=True)
class Prepared:
    """What the runs of a seed share."""

    model: Path
    tasks: Path


def _prepare(task: Task, seed: int, home: Path) -> Prepared:
    """Make the tasks and the warm start of a seed, unless they exist."""
    with locked(home / f"tasks-{seed}") as tasks:
        if not (tasks / "val.parquet").is_file():
            task.write(tasks, task.val_tasks, seed)
    of_model = seed if task.model_seed is None else task.model_seed
    with locked(home / f"model-{of_model}") as model:
        if not (model / "model.safetensors").is_file():
            script = Path(__file__).with_name("warm_start.py")
            command = [str(script), task.name, "--seed", str(of_model), "--out", str(model)]
            _stage([sys.executable, *command], model / "warm_start.log")
    return Prepared(model, tasks)


def _stage(command: list[str], log: Path) -> None:
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RunFailed(f"{' '.join(command)} ended with {code}:\n{log.read_text(errors='replace')[-2000:]}")


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[Path]:
    """Lock ``folder`` for this process.

    Raises:
        Taken: another process has it, and ``wait`` is false.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken(str(folder)) from None
        yield folder


def _portable(command: list[str]) -> str:
    """The command without this machine's paths and Ray's folders."""
    words = [word for word in command if not word.endswith("=RAY")]
    return " ".join(["turnkey", *words[1:]]).replace(f"{ROOT}/", "")


def alone(core: int) -> None:
    """Pin this process and its children to one core, with one thread each."""
    os.sched_setaffinity(0, {core})
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
