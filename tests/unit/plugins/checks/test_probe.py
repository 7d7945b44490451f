"""What the probe sees of an environment's columns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks import probe
from verl_turnkey.plugins.config.schema import TurnkeyConfig


class Says:
    """In place of the process: each answer has the next of the ``columns``, and refuses the action if it says so."""

    def __init__(self, columns: list[str]) -> None:
        self.columns, self.t = columns, 0

    async def call(self, method: str, *_: Any) -> Any:
        said = self.columns[self.t].split()
        info = {"admissible": None, "extra": dict.fromkeys(said, 1.0), "invalid": "refused" in said}
        self.t += method != "load"
        return ("a room", info) if method == "start" else ("a room", 0.0, self.t == len(self.columns), False, info)

    async def retire(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    ("columns", "given"),
    [
        (["role", "score"], {"role", "score"}),  # the state of the only step, and its answer
        (["", "role score"], {"score"}),
        (["role", "role score", "score"], {"role", "score"}),
        (["role", "score", "role score"], {"score"}),
        (["role", "role score", "role"], {"role"}),
        (["role", "refused role", "role score"], {"role", "score"}),
        (["role", "score", "refused", "score"], {"score"}),
        (["role", "refused", "refused"], None),
    ],
)
def test_columns_are_those_that_a_method_gets_on_every_step(monkeypatch: pytest.MonkeyPatch, columns, given):
    """Of the state before the step and of the answer to it; a batch has a column only if all of its steps have it."""

    async def spawn(modules: Any) -> Says:
        return Says(columns)

    monkeypatch.setattr(probe.ProcessWorker, "spawn", spawn)
    assert asyncio.run(probe.play(TurnkeyConfig(), Task("own/Says-v0", 3), {"role"}))[2] == given
