"""How an environment's process is started, and what is said about its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.processes import Child


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 5, f"signal {signal.SIGRTMIN + 5}")]
)
def test_every_signal_that_kills_is_told(monkeypatch, tmp_path, number, name):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path, as some programs put there

    async def main():
        child = await Child.spawn()
        os.kill(child._process.pid, number)
        with pytest.raises(EnvironmentFailure, match=f"was killed by {name} during a test"):
            await child.call("close", (), 20.0, "a test", "key")

    assert isinstance(sys.path[-1], Path)
    asyncio.run(main())
