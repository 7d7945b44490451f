"""Hundreds of training steps on the whole stack, undisturbed and with processes killed: resources that grow, steps and
episodes that are lost.

    python benchmarks/long_run.py run runs/long/calm                              # the quickstart's task, 300 steps
    python benchmarks/long_run.py run runs/long/kills --kills 5 --deaths 0.0005   # environments and driver are killed
    python benchmarks/long_run.py show runs/long/calm runs/long/kills             # tables, and docs/long-run.png

With ``--deaths`` each environment has a process of its own, which is killed with that probability in each step. The
driver is killed (SIGKILL) ``--kills`` times, evenly over the steps, and the same command then resumes from the last
checkpoint, as it does after an interruption. Each run takes an hour and a half on two cores.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import fragile_env
import numpy as np
import psutil
import typer

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from report import read_metrics  # noqa: E402
from training import GROUPS, LEVEL, MAX_TURNS, Job, launch  # noqa: E402

EVERY = 15.0
"""seconds between two samples of the processes"""
SAMPLES, STARTS = "samples.jsonl", "starts.jsonl"
ROLES = {
    "TaskRunner": "driver",
    "main_ppo": "launcher",
    "AgentLoopWorker": "agent-loop workers",
    "RewardLoopWorker": "reward workers",
    "EnvHost": "environment hosts",
    "turnkey-environment": "environments",
    "WorkerDict": "training workers",
    "EngineCore|VLLM::": "vLLM engines",
    "vLLM|LoadBalancer": "vLLM servers",
    "StorageUnit|TransferQueue": "TransferQueue",
    r"/ray/|ray::(IDLE|\w+Agent)": "Ray",
}
"""part of a command line -> what its process is; all others are `other`"""
NAMES = list(dict.fromkeys([*ROLES.values(), "other"]))

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(
    out: Annotated[Path, typer.Argument(help="folder of the run")],
    steps: int = 300,
    kills: Annotated[int, typer.Option(help="of the driver")] = 0,
    deaths: Annotated[float, typer.Option(help="probability that an environment's process is killed in a step")] = 0.0,
    tasks: Annotated[int, typer.Option(help="of a step, of 8 episodes each")] = GROUPS,
    seed: int = 0,
) -> None:
    """Train to the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the training process ends as well
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model" / "model.safetensors").is_file():
        script = [str(QUICKSTART / "warm_start.py"), "--out", str(out / "model"), "--seed", str(seed)]
        subprocess.run([sys.executable, *script], check=True)
    recipe = f"{Path(fragile_env.__file__).resolve()}:{fragile_env.ID}" if deaths else "babyai"
    kwargs = {"level": LEVEL, "max_steps": MAX_TURNS} | ({"deaths": deaths} if deaths else {})
    sizes = {"data.train_batch_size": tasks, "actor_rollout_ref.actor.ppo_mini_batch_size": max(1, tasks // 2)}
    overrides = (
        *(f"++turnkey.env.kwargs.{name}={value}" for name, value in kwargs.items()),
        *(f"{name}={value}" for name, value in sizes.items()),
    )
    job = Job(out=out, method="gigpo", seed=seed, steps=steps, recipe=recipe, overrides=overrides)
    while step_of(out) < steps:
        starts = entries(out / STARTS)
        killed = sum(start["killed"] for start in starts)
        until = round(steps * (killed + 1) / (kills + 1)) if killed < kills else steps
        entry: dict[str, Any] = {"began": time.time(), "first": step_of(out), "killed": False, "left": 0}
        with launch(job) as process:
            watcher = Watcher(process, out, len(starts))
            watcher.start()
            try:
                while process.poll() is None and not (until < steps and step_of(out) >= until):
                    time.sleep(1)
                if process.poll() is None:
                    family = descendants(process)
                    os.killpg(process.pid, signal.SIGKILL)
                    _, left = psutil.wait_procs(family, timeout=120)
                    entry |= {"killed": True, "left": len(left)}
            finally:
                watcher.stop()
                entry |= {"ended": time.time(), "last": step_of(out)}
                with (out / STARTS).open("a") as file:
                    file.write(json.dumps(entry) + "\n")
        print(entry, flush=True)
        if not entry["killed"] and process.returncode:
            sys.exit(f"the run ended with {process.returncode}: {job.log}")


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    """The descendants of a process; none if it has ended."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def step_of(out: Path) -> int:
    """The last step whose metrics were written."""
    return max((step for step, data in read_metrics(out).items() if "episode/count" in data), default=0)


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


class Watcher(threading.Thread):
    """Samples memory and number of a run's processes, and its files, every :data:`EVERY` seconds."""

    def __init__(self, process: subprocess.Popen, out: Path, start: int) -> None:
        super().__init__(daemon=True)
        self._process, self._out, self._start, self._over = process, out, start, threading.Event()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(EVERY):
            try:
                sample = self._sample()
            except psutil.NoSuchProcess:
                continue
            with (self._out / SAMPLES).open("a") as file:
                file.write(json.dumps(sample) + "\n")

    def _sample(self) -> dict[str, Any]:
        memory: dict[str, float] = defaultdict(float)
        count: dict[str, int] = defaultdict(int)
        for process in (psutil.Process(self._process.pid), *descendants(self._process)):
            try:
                role, bytes_ = role_of(process), process.memory_full_info().uss
            except psutil.Error:  # it has ended meanwhile
                continue
            memory[role] += bytes_ / 2**20
            count[role] += 1
        files = [path for path in self._out.rglob("*") if path.is_file()]
        return {
            "time": time.time(),
            "start": self._start,
            "step": step_of(self._out),
            "memory": memory,
            "processes": count,
            "files": len(files),
            "disk": sum(path.stat().st_size for path in files if path.exists()) / 2**20,
            "shared": len(os.listdir("/dev/shm")),
        }


def role_of(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((role for part, role in ROLES.items() if re.search(part, line)), "other")


@app.command()
def show(folders: list[Path], picture: Path = ROOT / "docs" / "long-run.png") -> None:
    """Print the tables of growth and of losses, and draw the curves."""
    for out in folders:
        print(f"\n**{out.name}**\n\n{grown(out)}\n\n{lost(out)}")
    draw(folders, picture)


def grown(out: Path) -> str:
    """For each role: processes, memory at the first and at the last sample, and its slope within a start."""
    rows = ["| | processes | MB at the beginning | MB at the end | MB in 100 steps |", "|---|---|---|---|---|"]
    for role in NAMES:
        series = of_role(out, role)
        if not series:
            continue
        slopes = [100 * np.polyfit(*zip(*curve, strict=True), 1)[0] for curve in series if len(dict(curve)) > 2]
        number = max(sample["processes"].get(role, 0) for sample in entries(out / SAMPLES))
        slope = f"{np.median(slopes):+.1f}" if slopes else "-"
        rows.append(f"| {role} | {number} | {series[0][0][1]:.0f} | {series[-1][-1][1]:.0f} | {slope} |")
    return "\n".join(rows)


def of_role(out: Path, role: str) -> list[list[tuple[int, float]]]:
    """(step, MB) of each start, without its first five steps, while everything still loads."""
    starts: dict[int, list[tuple[int, float]]] = defaultdict(list)
    firsts = [start["first"] for start in entries(out / STARTS)]
    for sample in entries(out / SAMPLES):
        first = firsts[sample["start"]] if sample["start"] < len(firsts) else 0
        if role in sample["memory"] and sample["step"] >= first + 5:
            starts[sample["start"]].append((sample["step"], sample["memory"][role]))
    return [*starts.values()]


def lost(out: Path) -> str:
    """The cost of the kills, and the disk space in use at the end."""
    starts, samples, metrics = entries(out / STARTS), entries(out / SAMPLES), read_metrics(out)
    played = sum(data.get("episode/count", 0) for data in metrics.values())
    failed = sum(data.get("episode/failed", 0) for data in metrics.values())
    lines = [
        f"- steps: {len(metrics) - (0 in metrics)}, started {len(starts)} times, {(_hours(starts)):.1f} hours",
        f"- episodes: {played:.0f}, of which {failed:.0f} failed",
        f"- files: {samples[0]['files']} at the beginning, {samples[-1]['files']} at the end, "
        f"{samples[-1]['disk']:.0f} MB; segments in /dev/shm: {samples[0]['shared']}, {samples[-1]['shared']}",
        f"- processes left after a kill: {sum(start['left'] for start in starts)}",
    ]
    for before, after in pairwise(starts):
        again = before["last"] + 1 - min(_trained(out, after))
        lines.append(f"- killed after step {before['last']}: {again} steps were trained again")
    return "\n".join(lines)


def _hours(starts: list[dict[str, Any]]) -> float:
    return sum(start["ended"] - start["began"] for start in starts) / 3600


def _trained(out: Path, start: dict[str, Any]) -> list[int]:
    """The steps that a start trained, from its metrics file."""
    files = {path: int(path.stem.removeprefix("metrics-")) / 1e9 for path in out.glob("metrics-*.jsonl")}
    own = next(path for path, began in sorted(files.items(), key=lambda item: item[1]) if began >= start["began"])
    return [entry["step"] for entry in entries(own) if "episode/count" in entry["data"]]


def draw(folders: list[Path], picture: Path) -> None:
    """Success over the steps of all runs, and below it the memory of each role in the first of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, *below) = plt.subplots(1 + len(folders), figsize=(8, 3 * (1 + len(folders))), layout="constrained")
    for out, axes in zip(folders, below, strict=True):
        points = [(s, d["episode/success_rate"]) for s, d in read_metrics(out).items() if "episode/success_rate" in d]
        steps, rates = zip(*points, strict=True)
        width = min(10, len(rates))
        above.plot(steps[width - 1 :], np.convolve(rates, np.ones(width) / width, "valid"), label=out.name)
        for color, role in zip(plt.get_cmap("tab20").colors, NAMES, strict=False):
            for i, series in enumerate(of_role(out, role)):
                axes.plot(*zip(*series, strict=True), color=color, label=role if i == 0 else None)
        axes.set(title=out.name, xlabel="training step", ylabel="memory in MB", yscale="log")
        axes.legend(fontsize="small", ncols=2)
    above.set(ylabel="success, mean of ten steps", ylim=(0, 1))
    above.legend()
    figure.savefig(picture, dpi=120)
    print(picture)


if __name__ == "__main__":
    app()
