"""What the probe sees of an environment's columns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins.checks import probe
from verl_turnkey.plugins.checks.findings import Refusal
from verl_turnkey.plugins.config.schema import RolloutConfig, TurnkeyConfig


class Says:
    """In place of the process: each answer has the next of the ``columns``, and refuses the action if it says so."""

    def __init__(self, columns: list[str]) -> None:
        self.columns, self.t = columns, 0

    async def call(self, method: str, *_: Any) -> Any:
        names = self.columns[self.t].split()
        info = {"admissible": None, "extra": dict.fromkeys(names, 1.0), "invalid": "refused" in names}
        self.t += method != "load"
        return ("a room", info) if method == "start" else ("a room", 0.0, self.t == len(self.columns), False, info)

    async def retire(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    ("columns", "expected"),
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
def test_columns_are_those_that_a_method_gets_on_every_step(monkeypatch: pytest.MonkeyPatch, columns, expected):
    """Of the state before the step and of the answer to it; a batch has a column only if all of its steps have it."""

    async def spawn(modules: Any) -> Says:
        return Says(columns)

    monkeypatch.setattr(probe.ProcessWorker, "spawn", spawn)
    assert asyncio.run(probe.play(TurnkeyConfig(), Task("own/Says-v0", 3), {"role"}))[2] == expected


class Players(Says):
    """Names whose move it is; the ``columns`` are the roles."""

    async def call(self, method: str, *_: Any) -> Any:
        role = self.columns[self.t]
        info = {"admissible": None, "extra": {"role": role} if role else {}, "invalid": False, "task": ""}
        self.t += method != "load"
        return ("a room", info) if method == "start" else ("a room", 0.0, self.t == len(self.columns), False, info)


@pytest.mark.parametrize(
    ("roles", "rollout", "refused"),
    [
        (["a", "b", "a"], {}, True),
        (["", "a", "", "b", ""], {}, True),
        (["a", "b", "a"], {"prompt": "conversation", "history": 0}, True),
        (["a", "b", "a"], {"history": 0}, False),
        (["a", "b", "a"], {"history": 0, "summary": "own:short"}, True),
        (["a", "a", "b"], {}, False),  # the state after the last step is in no prompt
        (["a", "a", "a"], {}, False),
    ],
)
def test_roles_with_one_memory_are_refused(monkeypatch: pytest.MonkeyPatch, roles, rollout, refused: bool):
    async def spawn(modules: Any) -> Players:
        return Players(roles)

    monkeypatch.setattr(probe.ProcessWorker, "spawn", spawn)
    play = probe.play(TurnkeyConfig(rollout=RolloutConfig(**rollout)), Task("own/Players-v0", 3))
    if not refused:
        asyncio.run(play)
        return
    with pytest.raises(Refusal, match=r"several roles: 'a' and 'b' .*turnkey\.rollout\.history=0") as error:
        asyncio.run(play)
    assert error.value.id == "roles-share-memory"


@pytest.mark.parametrize(
    ("strategy", "extra", "truth", "lacks"),
    [
        ("probe", {}, None, True),
        ("probe", {"gold_answer": "Paris"}, None, False),
        ("probe", {}, "Paris", False),
        ("probe_gold", {}, "", True),
        ("probe_gold", {"gold_answers": ["Paris"]}, "", False),
        ({"name": "probe", "reward": {"name": "outcome"}}, {}, None, False),
        ("vine", {}, None, False),
        ("independent", {}, None, False),
    ],
)
def test_a_task_without_the_right_answer_that_a_strategy_needs(
    tmp_path: Path, monkeypatch, strategy, extra, truth, lacks
):
    file = f"{tmp_path}/tasks.parquet"
    row = {COLUMN: Task("own/Says-v0", 3).to_json()}
    pd.DataFrame([row if truth is None else {**row, "reward_model": {"ground_truth": truth}}]).to_parquet(file)

    async def play(*_: Any) -> Any:
        return "a room", {"task": "t", "admissible": None, "extra": extra}, {"score"}

    monkeypatch.setattr(probe, "play", play)
    config = OmegaConf.create(
        {"algorithm": {"adv_estimator": "gae"}, "actor_rollout_ref": {"model": {"path": "none/here"}}}
    )
    turnkey = TurnkeyConfig(rollout=RolloutConfig(strategy=strategy))
    if not lacks:
        assert probe.probe(config, turnkey, file) == {"score"}
        return
    with pytest.raises(ConfigError, match="the task has no right answer") as error:
        probe.probe(config, turnkey, file)
    assert f"turnkey.rollout.strategy={strategy} " in str(error.value)
