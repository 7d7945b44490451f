"""What the driver refuses of a strategy, and of an environment whose episodes are to fork."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.runner import Declared
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks import probe
from verl_turnkey.plugins.checks.branching import check_branching
from verl_turnkey.plugins.checks.rewards import check_columns
from verl_turnkey.plugins.config.schema import RolloutConfig, TurnkeyConfig

COLUMNS = ("parent", "branch", "depth", "leaf_outcome", "turn_value", "value_rollouts")


def config(method: str = "progress", **rollout: Any) -> Any:
    rollout = {"agent": {"default_agent_loop": "turnkey_env"}, "response_length": 64, **rollout}
    return OmegaConf.create({"algorithm": {"adv_estimator": method}, "actor_rollout_ref": {"rollout": rollout}})


def turnkey(strategy: Any = "vine", **options: Any) -> TurnkeyConfig:
    return TurnkeyConfig(rollout=RolloutConfig(strategy=strategy, **options))


def test_the_columns_of_a_strategy_are_known():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_branching(config(), turnkey("independent"), ()) == ()
        assert check_branching(config(), turnkey(), ("other",)) == COLUMNS
        assert check_branching(config("tree"), turnkey("tree"), ()) == COLUMNS[:4]
    check_columns(config(), turnkey(), {"score"}, (), COLUMNS)
    with pytest.raises(ConfigError, match=r"progress needs the column 'extra\.turn_value'"):
        check_columns(config(), turnkey("tree"), {"score"}, (), COLUMNS[:4])
    with pytest.raises(ConfigError, match="strategy gives the column turn_value, and so does the environment"):
        check_columns(config(), turnkey(), {"turn_value"}, (), COLUMNS)


@pytest.mark.parametrize(
    ("rollout", "options", "given", "said"),
    [
        ({"agent": {"default_agent_loop": "tool_agent"}}, {}, (), "no effect with the agent loop tool_agent"),
        ({"full_determinism": True}, {}, (), "full_determinism=true hands to vLLM: set it to false"),
        ({}, {"branch_tokens": 63}, (), "branch_tokens=63 allows no branch: one turn may take 64 tokens"),
        ({}, {"branch_tokens": 7, "max_tokens_per_turn": 8}, (), "one turn may take 8 tokens"),
        ({}, {"strategy": {"name": "vine", "k": 3}}, (), "turnkey.rollout.strategy.k: unknown key"),
        ({}, {}, ("turn_value",), "vine gives the column turn_value, and so does a component of turnkey.rewards"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused(rollout, options, given, said):
    with pytest.raises(ConfigError) as error:
        check_branching(config(**rollout), turnkey(**options), given)
    assert said in str(error.value)


def test_an_estimator_of_verls_knows_no_branches():
    with pytest.raises(ConfigError, match="adv_estimator=grpo does not read: it knows one score per rollout"):
        check_branching(config("grpo"), turnkey("tree"), ())


def test_measuring_for_nobody_is_said():
    with pytest.warns(UserWarning, match="measures turn_value, value_rollouts, and the method gigpo reads none"):
        check_branching(config("gigpo"), turnkey(), ())


@pytest.mark.parametrize("key", ["branch_tokens", "branch_steps", "branches_at_once"])
def test_limits_are_positive(key):
    with pytest.raises(ConfigError, match=f"{key}: expected .*positive, got 0"):
        RolloutConfig(**{key: 0})


class Rooms:
    """In place of the process: shows a number that goes on with each step, or with each call if it is unsteady."""

    def __init__(self, steady: bool, copies: bool) -> None:
        self.steady, self.copies, self.calls, self.shown = steady, copies, itertools.count(), 0
        self.resets = 0

    async def call(self, method: str, *_: Any) -> Any:
        if method == "load":
            return Declared(copies=self.copies)
        self.resets += method == "start"
        self.shown = 0 if method == "start" else self.shown + 1
        seen = f"room {self.shown if self.steady else next(self.calls)}"
        info = {"admissible": ["go"], "extra": {}, "invalid": False, "state_key": None}
        return (seen, info) if method == "start" else (seen, 0.0, self.shown == 3, False, info)

    async def retire(self, seconds: float) -> None:
        pass


def played(monkeypatch: pytest.MonkeyPatch, rooms: Rooms, seed: int | None, forks: bool = True) -> int:
    async def spawn(modules: Any) -> Rooms:
        return rooms

    monkeypatch.setattr(probe.ProcessWorker, "spawn", spawn)
    asyncio.run(probe.play(TurnkeyConfig(), Task("own/Rooms-v0", seed), forks=forks))
    return rooms.resets


def test_what_cannot_be_cloned_is_refused_before_training(monkeypatch: pytest.MonkeyPatch):
    assert played(monkeypatch, Rooms(steady=True, copies=False), 3) == 2
    for rooms, seed, said in (
        (Rooms(steady=False, copies=False), 3, "came to another state after 0 actions"),
        (Rooms(steady=True, copies=False), None, "without a seed cannot be replayed"),
    ):
        with pytest.raises(EnvironmentFailure, match=said) as failure:
            played(monkeypatch, rooms, seed)
        assert failure.value.kind == "clone"
    # What copies itself needs neither, and independent episodes are not cloned.
    assert played(monkeypatch, Rooms(steady=False, copies=True), None) == 1
    assert played(monkeypatch, Rooms(steady=False, copies=False), None, forks=False) == 1
