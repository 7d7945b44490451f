"""The example of docs/operations.md is what the hosts compute on such a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_turnkey.envs.adapters.alfworld.env import ALFWorldText
from verl_turnkey.envs.hosting import capacity

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"


def test_the_node_of_the_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "cpus", lambda: 64)
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 512 * 1024)
    workers = 8
    hosts = workers * capacity.hosts(workers)
    calls = capacity.calls_at_once(hosts)
    megabytes = ALFWorldText.metadata["memory_mb"]
    places = capacity.memory_for_a_host_mb(hosts) // megabytes
    page = PAGE.read_text(encoding="utf-8")
    assert f"| {hosts} |" in page
    assert f"| {calls} per host, {hosts * calls} in total |" in page
    assert f"ALFWorld, {megabytes} MB: {places} per host, {hosts * places:,} in total |" in page


def test_eight_such_nodes_with_a_worker_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "cpus", lambda: 64)
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 512 * 1024)
    hosts = capacity.hosts(1)
    calls = capacity.calls_at_once(hosts)
    places = capacity.memory_for_a_host_mb(hosts) // ALFWorldText.metadata["memory_mb"]
    total = [f"{8 * per_node:,}" for per_node in (hosts, hosts * calls, hosts * places)]
    words = "have {} hosts, {} concurrent calls and {} ALFWorld slots".format(*total)
    assert words in " ".join(PAGE.read_text(encoding="utf-8").split())
