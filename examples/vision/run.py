"""Pictures of a room, a tiny Qwen3-VL, stock ``verl.trainer.main_ppo`` with ``+turnkey=gigpo``, and a table.

Called by ``examples/vision/run.sh``, which installs what this needs. It fetches torchvision itself, without which no
processor of images loads, and which the CPU stack leaves out.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "quickstart"))

from grey import KWARGS  # noqa: E402
from report import draw, read_metrics  # noqa: E402
from training import TURNKEY, Job, console, launch, stage, task_overrides  # noqa: E402

from verl_turnkey.envs import make  # noqa: E402
from verl_turnkey.envs.adapters._shared import cache_folder  # noqa: E402
from verl_turnkey.envs.tasks import split_seeds  # noqa: E402

GREY = HERE / "grey.py"
TRAIN = 1024
TORCHVISION = "0.28.0"
"""of torch 2.13.0, which examples/install_cpu.sh pins"""
INDEX = "https://download.pytorch.org/whl/cpu"
ONE_PICTURE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt={image: 1, video: 0}"


def main(
    steps: Annotated[int, typer.Option(help="training steps")] = 20,
    seed: Annotated[int, typer.Option(help="tasks, warm start and sampling")] = 0,
    method: Annotated[str, typer.Option(help="a method: +turnkey=<method>")] = "gigpo",
    out: Annotated[Path, typer.Option(help="folder of this run")] = Path("runs/vision"),
    n_val: Annotated[int, typer.Option(help="validation tasks, each with pictures and with grey ones")] = 64,
    demonstrations: Annotated[int, typer.Option(help="episodes that the warm start watches")] = 1500,
    override: Annotated[list[str] | None, typer.Option(help="one more override of the launch command")] = None,
) -> None:
    """Train for a fixed number of steps; validate before and after, with pictures and with grey ones."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the training process ends as well
    out = out.resolve()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    _torchvision()
    for name, folder, env in (("pictures", "tasks", "turnkey/MiniGrid-v0"), ("grey", "grey", str(GREY))):
        counts = f"--train {TRAIN} --val {n_val} --seed {seed} --data-source {name} --kwargs".split()
        command = [TURNKEY, "tasks", f"{out}/{folder}", "--env", env, *counts, json.dumps(KWARGS)]
        stage(f"tasks, {name}", command, out / f"tasks_{name}.log")
    watch = f"--out {out}/model --seed {seed} --episodes {demonstrations}".split()
    warm_start = [sys.executable, str(HERE / "warm_start.py"), *watch]
    stage("warm start (supervised, mixed demonstrations)", warm_start, out / "warm_start.log")

    job = Job(
        out=out,
        method=method,
        seed=seed,
        steps=steps,
        task=task_overrides(history=0, max_turns=KWARGS["max_steps"], prompt_tokens=128),
        overrides=(
            f"data.val_files=[{out}/tasks/val.parquet,{out}/grey/val.parquet]",
            f"turnkey.modules=[{GREY}]",
            ONE_PICTURE,
            *(override or ()),
        ),
    )
    console.print(f"training: {steps} steps of {job.episodes} episodes with +turnkey={method} (log: {job.log})")
    with launch(job, show=True) as process:
        if code := process.wait():
            raise typer.Exit(code)

    metrics = read_metrics(out)
    success = {name: _validated(metrics, name) for name in ("pictures", "grey")}
    success["random actions"] = dict.fromkeys(success["grey"], _chance(n_val, seed))
    summary = {"method": method, "seed": seed, "n_val": n_val, "validation": success["pictures"], "success": success}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(metrics, summary, out / "learning_curve.png")
    table = Table("success", "before", "after")
    for name, by_step in success.items():
        before, *_, after = by_step.values()
        table.add_row(name, f"{before:.3f}", f"{after:.3f}")
    console.print(table)
    console.print(f"{out / 'learning_curve.png'}\nnext: turnkey view {os.path.relpath(out)} --open")


def _torchvision() -> None:
    """Let the processes of this run import torchvision, from a folder of its own where it is not installed."""
    if find_spec("torchvision") is not None:
        return
    folder = cache_folder(f"torchvision-{TORCHVISION}-{sys.implementation.cache_tag}")
    if not folder.exists():
        new = folder.with_name(f"{folder.name}-{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1"]
        pip += ["--target", str(new)]
        from_index = [*pip, "--index-url", INDEX, f"torchvision=={TORCHVISION}+cpu"]
        if subprocess.run(from_index, capture_output=True, check=False).returncode:
            # Without PyTorch's own index there is the build for CUDA. Its Python part, which is all that images need,
            # runs on a CPU, once it no longer describes the operators of its compiled part.
            subprocess.run([*pip, f"torchvision=={TORCHVISION}"], check=True)
            (new / "torchvision" / "_meta_registrations.py").write_text("")
        new.rename(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def _validated(metrics: dict[int, dict[str, float]], source: str) -> dict[int, float]:
    """Success in the validations of a data source, by step."""
    key = f"val-core/{source}/acc/mean@1"
    return {step: data[key] for step, data in metrics.items() if key in data}


def _chance(n_val: int, seed: int, times: int = 8) -> float:
    """Success of random actions in the validation tasks."""
    env, rng, won = make("turnkey/MiniGrid-v0", {**KWARGS, "images": False}), random.Random(seed), 0
    _, seeds = split_seeds(TRAIN, n_val, seed)
    for env_seed in seeds * times:
        _, info = env.reset(seed=env_seed)
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(rng.choice(info["admissible"]))
            over = terminated or truncated
        won += info["success"]
    return won / (times * n_val)


if __name__ == "__main__":
    typer.run(main)
