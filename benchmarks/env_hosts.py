"""Microseconds of an environment's step in a host, compared with a direct call.

    python benchmarks/env_hosts.py

The environment does nothing: it returns 500 characters and twelve admissible actions, declared thread-safe (it runs in
a thread of the host) or not (in a process of its own). "Through Ray" is what the agent loop does: remote calls, which
simultaneous steps share. Measured for one episode alone, and for many at once as wall time per step of all of them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import typer

from verl_turnkey.envs import make
from verl_turnkey.envs.hosting.host import EnvHost

OBSERVATION = "You are in a room. " * 26 + "Exit."
ADMISSIBLE = [f"take object {n}" for n in range(12)]
TIMEOUT = 60.0
StepCall = Callable[[str], Awaitable[Any]]


class Idle(gymnasium.Env[str, str]):
    """Returns the same answer at once."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return OBSERVATION, {"state_key": "start", "admissible": ADMISSIBLE, "task": "wait"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return OBSERVATION, 0.0, False, False, {"state_key": action, "admissible": ADMISSIBLE, "success": False}


class IdleInThreads(Idle):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": True, "memory_mb": 1}


PLACES = {"thread of the host": "bench/IdleInThreads-v0", "process of its own": "bench/Idle-v0"}
for env_id, entry_point in zip(PLACES.values(), (IdleInThreads, Idle), strict=True):
    if env_id not in gymnasium.registry:  # this process imports the file a second time, as the user module it is
        gymnasium.register(env_id, entry_point=entry_point)


async def times(step: StepCall, steps: int) -> list[float]:
    """Microseconds of each of ``steps`` steps, after a warm-up."""
    elapsed = []
    for n in range(steps // 10 + steps):
        began = time.perf_counter()
        await step("take object 3")
        if n >= steps // 10:
            elapsed.append(1e6 * (time.perf_counter() - began))
    return elapsed


async def row(name: str, calls: list[StepCall], steps: int) -> str:
    """One line of the table: one episode alone, then all of them at once."""
    alone = sorted(await times(calls[0], steps))
    share = max(1, steps // len(calls))
    began = time.perf_counter()
    await asyncio.gather(*(times(call, share) for call in calls))
    together = 1e6 * (time.perf_counter() - began) / (len(calls) * (share // 10 + share))
    p95 = alone[int(0.95 * len(alone))]
    return f"| {name} | {statistics.median(alone):.1f} | {p95:.1f} | {together:.1f} |"


async def measure(steps: int, episodes: int) -> list[str]:
    from verl_turnkey.envs.hosting.pool import HostPool

    rows = []

    def direct() -> StepCall:
        env = make(PLACES["process of its own"])
        env.reset(seed=0)

        async def step(action: str) -> Any:
            return env.step(action)

        return step

    rows.append(await row("direct call", [direct() for _ in range(episodes)], steps))
    for place, env_id in PLACES.items():
        host = EnvHost([__file__], places=episodes)
        for n in range(episodes):
            await host.start(str(n), env_id, {}, 0, TIMEOUT)
        calls = [lambda action, name=str(n), host=host: host.step(name, action, TIMEOUT) for n in range(episodes)]
        rows.append(await row(f"{place}, without Ray", calls, steps))
        await host.shutdown()
    for place, env_id in PLACES.items():
        pool = HostPool(1, f"bench-{place.split()[0]}", places=episodes, modules=[__file__])
        played = await asyncio.gather(*(pool.start(env_id, {}, 0) for _ in range(episodes)))
        rows.append(await row(f"{place}, through Ray", [episode.step for episode in played], steps))
    return rows


def main(steps: int = 2000, episodes: int = 8) -> None:
    """Print the table.

    Args:
        steps: steps per measurement.
        episodes: episodes that step at once.
    """
    import ray

    with tempfile.TemporaryDirectory(prefix="tk", ignore_cleanup_errors=True) as folder:  # short: sockets go there
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            rows = asyncio.run(measure(steps, episodes))
        finally:
            ray.shutdown()
    print(f"{len(os.sched_getaffinity(0))} CPUs, load average {os.getloadavg()[0]:.1f}, {Path(__file__).name}\n")
    print(f"| step of | one episode, median µs | 95th percentile µs | {episodes} episodes at once, µs per step |")
    print("|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    typer.run(main)
