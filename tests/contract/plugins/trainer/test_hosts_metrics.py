"""Metrics of environment hosts, out of what each measured."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from contract_tools import hanging

from verl_turnkey.plugins.trainer import rollout_metrics
from verl_turnkey.plugins.trainer.rollout_metrics import HostMetrics, summary


def reading(step: list[float], reset: list[float], **counts: int) -> dict[str, object]:
    counts = {"open": 0, "waiting": 0, "in_flight": 0, "lost": 0} | counts
    return {"step": array("f", step), "reset": array("f", reset), **counts}


def test_summary_over_hosts():
    fast = reading([0.001] * 99 + [0.002], [0.1], open=3, waiting=0, in_flight=2)
    slow = reading([0.010] * 100, [0.3], open=1, waiting=4, lost=2)
    idle = reading([], [])
    assert summary([fast, slow, idle]) == pytest.approx(
        {
            "count": 3,
            "open": 4,
            "waiting": 4,
            "in_flight": 2,
            "lost": 2,
            "open/max": 3,
            "waiting/max": 4,
            "steps": 200,
            "step_ms/p50": 6,
            "step_ms/p95": 10,
            "step_ms/max": 10,
            "resets": 2,
            "reset_ms/p50": 200,
            "reset_ms/p95": 290,
            "reset_ms/max": 300,
            "step_ms/p95_of_slowest": 10,
        }
    )


def test_hosts_that_did_nothing_have_no_latency():
    rollout_metrics = summary([reading([], [])])
    assert rollout_metrics["steps"] == rollout_metrics["resets"] == 0
    assert not [name for name in rollout_metrics if "_ms" in name]
    assert summary([]) == {}


def test_nobody_waits_for_hosts(ray_queue, monkeypatch):
    monkeypatch.setattr(rollout_metrics, "SECONDS", 3.0)
    times = [{"model": 3.0, "environment": 1.0, "waiting": 0.0}, {"model": 5.0, "environment": 0.5, "waiting": 0.25}]
    answer, never, refs = ray.put(([ray.put(reading([0.01], [0.1], open=2))], times[:1])), hanging(), []

    def worker(ref: Any) -> Any:
        def remote(_: Any) -> Any:
            refs.append(ref)
            return ref

        return SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote))

    half = ray.put(([ray.put(reading([0.03], [], open=1)), never], times[1:]))  # of its two hosts one is blocked
    made = HostMetrics([worker(answer), worker(never), worker(half)])
    assert made.read() == {}
    for _ in range(2):
        made.ask()
        numbers = made.read()
        assert [numbers[name] for name in ("hosts/count", "hosts/open", "hosts/silent")] == [2, 3, 2]
        assert [numbers[f"rollout_s/{name}"] for name in times[0]] == [4, 0.75, 0.125]
    assert refs.count(never) == 1, "a worker that hangs is asked once"
    assert refs.count(answer) == 2
    ray.cancel(never, force=True)
