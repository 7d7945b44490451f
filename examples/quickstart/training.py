"""Stock verl as a child process: ``turnkey train`` with the settings of the quickstart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

LEVEL = "MiniGrid-DoorKey-5x5-v0"
MAX_TURNS = 20
HISTORY = 1
GROUPS, ROLLOUTS = 8, 8
TURNKEY = str(Path(sys.executable).with_name("turnkey"))
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def task_overrides(
    *,
    template: str = "minigrid",
    history: int = HISTORY,
    max_turns: int = MAX_TURNS,
    prompt_tokens: int = 80,
    response_tokens: int = 4,
) -> tuple[str, ...]:
    """What of the launch line depends on what is played: DoorKey, unless something else is said."""
    return (
        f"turnkey.rollout.template={template}",
        "turnkey.rollout.action_format=plain",
        f"turnkey.rollout.history={history}",
        f"turnkey.rollout.max_turns={max_turns}",
        f"data.max_prompt_length={prompt_tokens}",
        f"data.max_response_length={response_tokens}",
    )


@dataclass(frozen=True)
class Job:
    """One training run in the folder ``out``."""

    out: Path
    method: str
    seed: int
    steps: int
    validate_every: int = 0
    overrides: tuple[str, ...] = ()
    recipe: str = "babyai"
    task: tuple[str, ...] = task_overrides()
    groups: int = GROUPS
    rollouts: int = ROLLOUTS
    mini_batches: int = 2
    lr: float = 5e-4
    tokens: int = 16384
    """of a micro-batch"""

    @property
    def episodes(self) -> int:
        return self.groups * self.rollouts

    @property
    def log(self) -> Path:
        return self.out / "train.log"

    def command(self, ray_dir: str) -> list[str]:
        """``turnkey train`` as anybody would call it, which writes the launch line to ``launch.sh`` and runs it."""
        turnkey = [TURNKEY, "train", self.recipe, "--model", f"{self.out}/model"]
        turnkey += ["--method", self.method, "--device", "cpu", "--steps", str(self.steps), "--out", str(self.out)]
        overrides = f"""
            data.train_batch_size={self.groups}
            data.seed={self.seed}
            actor_rollout_ref.rollout.n={self.rollouts}
            actor_rollout_ref.rollout.temperature=1.0
            actor_rollout_ref.rollout.val_kwargs.do_sample=true
            actor_rollout_ref.rollout.val_kwargs.temperature=1.0
            actor_rollout_ref.rollout.val_kwargs.top_p=1.0
            actor_rollout_ref.rollout.seed={self.seed}
            actor_rollout_ref.actor.ppo_mini_batch_size={self.groups // self.mini_batches}
            actor_rollout_ref.actor.ppo_max_token_len_per_gpu={self.tokens}
            actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={self.tokens}
            actor_rollout_ref.actor.optim.lr={self.lr}
            actor_rollout_ref.actor.optim.weight_decay=0.0
            trainer.test_freq={self.validate_every or 1000000}
            trainer.resume_mode=auto
            trainer.project_name=quickstart
            +ray_kwargs.ray_init._temp_dir={ray_dir}
        """
        return [*turnkey, *self.task, *overrides.split(), *self.overrides]


def stage(name: str, command: list[str], log: Path) -> None:
    """Run ``command`` to its end with its output in ``log``, and say how long it took.

    Raises:
        typer.Exit: it failed; the end of its log is shown.
    """
    began = time.time()
    with console.status(f"{name} ..."), log.open("w") as file:
        # Threads that spin while they wait would stop each other wherever anything else runs.
        env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env, check=False).returncode
    if code:
        console.print(f"[red]{name} failed[/] (exit {code}); the end of {log}:")
        console.print(log.read_text()[-2000:], markup=False)
        raise typer.Exit(code)
    console.print(f"{name}: {time.time() - began:.0f} s")


@contextmanager
def launch(job: Job, *, show: bool = False) -> Iterator[subprocess.Popen]:
    """Start the run with a Ray of its own; ends it, and only it, when the caller leaves early.

    ``show``: on this console, as ``turnkey train`` shows a run; all of its output is in ``job.log`` either way.
    """
    ray_dir = tempfile.mkdtemp(prefix="tk-")  # short: Ray puts Unix sockets below it
    # verl opens its metrics file for writing anew: a file per start keeps the curve of a resumed run.
    metrics = job.out / f"metrics-{time.time_ns()}.jsonl"
    env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)}
    with (job.out / "console.log").open("a") as log:
        output = {} if show else {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(job.command(ray_dir), env=env, start_new_session=True, **output)
        try:
            yield process
        finally:
            if process.poll() is None:
                _end(process)
            shutil.rmtree(ray_dir, ignore_errors=True)


def _end(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
