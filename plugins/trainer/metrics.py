"""Metrics of the environment hosts, requested once per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from verl_turnkey.plugins.rollout import worker as loop_worker

PREFIX = "hosts/"
TIMES = "rollout_s/"
SECONDS = 0.5  # workers and hosts that answer later are left out: no step waits for a metric


class HostMetrics:
    """What the hosts of the agent-loop ``workers`` measured since the last request."""

    def __init__(self, workers: Sequence[Any] = ()) -> None:
        self._workers = tuple(workers)
        self._pending: dict[int, Any] = {}

    def ask(self) -> None:
        """Request the readings, except from workers that have not answered yet; called after the rollouts of a step."""
        for worker in self._workers:
            if id(worker) not in self._pending:
                self._pending[id(worker)] = worker.__ray_call__.remote(loop_worker.measure)

    def read(self) -> dict[str, float]:
        """The answers as metrics; ``hosts/silent`` counts workers and hosts without one.

        Empty if no environment runs in a host.
        """
        refs = list(self._pending.values())
        answers, dead, late = _answers(refs)
        readings, gone, slow = _answers([reading for hosts, _ in answers for reading in hosts])
        self._pending = {worker: ref for worker, ref in self._pending.items() if ref in late}
        metrics = {f"{PREFIX}{name}": value for name, value in summary(readings).items()}
        if ended := [seconds for _, times in answers for seconds in times]:
            metrics |= {
                f"{TIMES}{name}": float(np.mean([seconds_of[name] for seconds_of in ended])) for name in ended[0]
            }
        silent = dead + gone + len(late) + len(slow)
        return metrics | {f"{PREFIX}silent": float(silent)} if metrics or silent else {}


def _answers(refs: list[Any]) -> tuple[list[Any], int, list[Any]]:
    """The answers so far, the number of errors, and the requests without an answer."""
    if not refs:
        return [], 0, []
    ready, late = ray.wait(refs, num_returns=len(refs), timeout=SECONDS)
    answers, dead = [], 0
    for ref in ready:
        try:
            answers.append(ray.get(ref))
        except RayError:
            dead += 1
    return answers, dead, late


def summary(hosts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of the readings of all hosts (``EnvHost.measure``), without their common prefix.

    Counts are sums over the hosts; ``open/max`` and ``waiting/max`` are those of the fullest one. Quantiles are over
    the calls of all hosts, in milliseconds; ``step_ms/p95_of_slowest`` is that of the host where it is largest.
    """
    if not hosts:
        return {}
    metrics = {"count": float(len(hosts))}
    for name in ("open", "waiting", "in_flight", "lost"):
        metrics[name] = float(sum(host[name] for host in hosts))
    for name in ("open", "waiting"):
        metrics[f"{name}/max"] = float(max(host[name] for host in hosts))
    for kind in ("step", "reset"):
        every = np.concatenate([host[kind] for host in hosts]) * 1e3
        metrics[f"{kind}s"] = float(len(every))
        if len(every):
            p50, p95, most = np.quantile(every, [0.5, 0.95, 1.0]).tolist()
            metrics |= {f"{kind}_ms/p50": p50, f"{kind}_ms/p95": p95, f"{kind}_ms/max": most}
    if slow := [float(np.quantile(host["step"], 0.95)) for host in hosts if len(host["step"])]:
        metrics["step_ms/p95_of_slowest"] = max(slow) * 1e3
    return metrics
