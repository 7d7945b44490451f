"""Metrics of environment hosts, out of what each measured."""

from __future__ import annotations

from array import array

import pytest

from verl_turnkey.plugins.trainer.hosts import summary


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
    found = summary([reading([], [])])
    assert found["steps"] == found["resets"] == 0
    assert not [name for name in found if "_ms" in name]
    assert summary([]) == {}
