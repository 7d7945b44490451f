"""What hosts take for the memory of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_turnkey.envs.hosting import capacity

MEMORY = "MemTotal:       8388608 kB\nMemFree:          524288 kB\nMemAvailable:    2097152 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "free", "lacking"),
    [
        pytest.param(MEMORY, 2048, 0, id="enough"),
        pytest.param(MEMORY.replace("2097152", "524288"), 512, 819 - 512, id="less than a tenth is free"),
        pytest.param(MEMORY.partition("MemAvailable")[0], 4096, 0, id="unknown"),
    ],
)
def test_memory_of_a_machine_without_control_groups(meminfo, free, lacking, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "_text", lambda path: meminfo if path == Path("/proc/meminfo") else "")
    assert capacity.free_memory_mb() == free
    assert capacity.lacking_memory_mb() == lacking
