"""What the driver refuses of a strategy, and of an environment whose episodes are to fork."""

import asyncio
import importlib.util
import itertools
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.runner import Declared
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks import agent_loop, probe, rollout
from verl_turnkey.plugins.checks.groups import check_groups
from verl_turnkey.plugins.checks.rewards import check_columns, check_compared, check_rewards
from verl_turnkey.plugins.checks.run import CheckedRun
from verl_turnkey.plugins.config.agent import McpConfig
from verl_turnkey.plugins.config.schema import RolloutConfig, TurnkeyConfig, turnkey_config
from verl_turnkey.plugins.config.training import GroupsConfig

ARENA = {"name": "arena", "compare": "operator:eq"}
COLUMNS = ("parent", "branch", "depth", "leaf_outcome", "turn_value", "value_rollouts")


def config(method: str = "progress", algorithm: Any = None, mode: str = "turnkey_sync", **rollout: Any) -> Any:
    sizes = {"prompt_length": 100, "response_length": 64, "max_model_len": None}
    rollout = {"agent": {"default_agent_loop": "turnkey_env"}, "name": "vllm", **sizes, **rollout}
    return OmegaConf.create(
        {
            "algorithm": {"adv_estimator": method} | (algorithm or {}),
            "actor_rollout_ref": {"rollout": rollout},
            "trainer": {"v1": {"trainer_mode": mode}},
        }
    )


def check_branching(config: Any, turnkey: TurnkeyConfig, columns: tuple[str, ...]) -> tuple[str, ...]:
    loops = [config.actor_rollout_ref.rollout.agent.default_agent_loop]
    return rollout.check_branching(CheckedRun(config, turnkey, loops), columns)


def turnkey(strategy: Any = "vine", **options: Any) -> TurnkeyConfig:
    return TurnkeyConfig(rollout=RolloutConfig(strategy=strategy, **options))


def test_the_columns_of_a_strategy_are_known():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_branching(config(), turnkey("independent"), ()) == ()
        assert check_branching(config(), turnkey(), ("other",)) == COLUMNS
        assert check_branching(config("tree"), turnkey("tree"), ()) == COLUMNS[:4]
        long = turnkey({"name": "probe", "tokens": 163})
        assert check_branching(config(max_model_len=200), long, ()) == COLUMNS
        few = turnkey("probe", branch_tokens=10)  # fewer than a turn has, and enough for an answer
        assert check_branching(config(mode="turnkey_separate_async"), few, ()) == COLUMNS
        gold = check_branching(config("information_gain"), turnkey("probe_gold"), ())
        assert gold == (*COLUMNS, "gold_probability")
        sampled = config("tree", calculate_log_probs=True, n=8)
        assert check_branching(sampled, turnkey("entropy_branch"), ()) == COLUMNS[:4]
    check_columns(CheckedRun(config(), turnkey()), {"score"}, (), COLUMNS)
    with pytest.raises(ConfigError, match=r"progress needs the column 'extra\.turn_value'"):
        check_columns(CheckedRun(config(), turnkey("tree")), {"score"}, (), COLUMNS[:4])
    with pytest.raises(ConfigError, match="strategy adds the column turn_value, and so does the environment"):
        check_columns(CheckedRun(config(), turnkey()), {"turn_value"}, (), COLUMNS)


@pytest.mark.parametrize(
    ("rollout", "options", "columns", "message"),
    [
        ({"agent": {"default_agent_loop": "tool_agent"}}, {}, (), "no effect with the agent loop tool_agent"),
        ({}, {"branch_tokens": 63}, (), "branch_tokens=63 allows no branch: one turn may take 64 tokens"),
        ({}, {"branch_tokens": 7, "max_tokens_per_turn": 8}, (), "one turn may take 8 tokens"),
        ({}, {"strategy": {"name": "vine", "k": 3}}, (), "turnkey.rollout.strategy.k: unknown key"),
        ({}, {"strategy": "probe", "branch_tokens": 9}, (), "allows no answer: one may take 10 tokens"),
        ({}, {"strategy": {"name": "probe", "reward": {"name": "answr"}}}, (), "did you mean 'answer'"),
        ({"mode": "turnkey_colocate_async"}, {"strategy": "probe_gold"}, (), "=turnkey_colocate_async drops"),
        ({"name": "trtllm"}, {"strategy": "probe_gold"}, (), "rollout.name=trtllm does not give"),
        ({"name": "sglang"}, {"strategy": "probe_gold"}, (), "rollout.name=sglang does not give: set it to vllm, or"),
        ({}, {"strategy": {"name": "probe", "stop": ["\n", ""]}}, (), "stop: expected a list of strings that are not"),
        ({}, {"strategy": {"name": "probe", "tokens": 164}}, (), "data.max_response_length = 164"),
        ({"max_model_len": 163}, {"strategy": {"name": "probe", "tokens": 163}}, (), "rollout.max_model_len = 163"),
        (
            {"calculate_log_probs": False, "n": 8},
            {"strategy": "entropy_branch"},
            (),
            "reads the log-probabilities of turns: set actor_rollout_ref.rollout.calculate_log_probs=true",
        ),
        (
            {"calculate_log_probs": True, "n": 8},
            {"strategy": {"name": "entropy_branch", "trajectories": 8}},
            (),
            "strategy.trajectories=8 leaves no branch besides the actor_rollout_ref.rollout.n=8",
        ),
        ({}, {}, ("turn_value",), "vine adds the column turn_value, and so does a component of turnkey.rewards"),
        (
            {"method": "grpo"},
            {"strategy": "tree"},
            (),
            "adv_estimator=grpo does not read: it knows one score per rollout",
        ),
        ({}, {"strategy": {"name": "probe", "reward": ARENA}}, (), "reward: expected a component of one episode alone"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused(rollout, options, columns, message):
    with pytest.raises(ConfigError) as error:
        check_branching(config(**rollout), turnkey(**options), columns)
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["filter_groups", "use_kl_in_reward"])
def test_what_knows_one_outcome_per_rollout_is_refused_with_trained_branches(key):
    algorithm = {"filter_groups": {"enable": key == "filter_groups"}, "use_kl_in_reward": key == "use_kl_in_reward"}
    check_branching(config(algorithm=algorithm), turnkey(), ())
    with pytest.raises(ConfigError, match=f"algorithm.{key}.* turnkey.rollout.strategy=tree trains"):
        check_branching(config("tree", algorithm), turnkey("tree"), ())


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("tree", r"the method gigpo reads no extra\.parent"),
        ("vine", "measures turn_value, value_rollouts, and the method gigpo reads none"),
    ],
)
def test_what_the_method_does_not_read_is_said(strategy, words):
    with pytest.warns(UserWarning, match=words):
        check_branching(config("gigpo"), turnkey(strategy), ())


@pytest.mark.parametrize(
    ("options", "turn"),
    [
        ({"branch_tokens": 128}, 8),
        ({"branch_tokens": 640}, None),
        ({"branch_steps": 3}, 7),
        ({"branch_steps": 10}, None),
    ],
)
def test_a_budget_without_room_for_early_branches_is_said(options, turn):
    """Ten turns of at most 64 tokens."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_branching(config(), turnkey(max_turns=10, **options), ())
        short = {"name": "vine", "turns": 2}
        check_branching(config(), turnkey(short, max_turns=10, **options), ())
    assert [f"before turn {turn}" in str(warning.message) for warning in caught] == ([] if turn is None else [True])


@pytest.mark.parametrize("key", ["branch_tokens", "branch_steps", "branches_at_once"])
def test_limits_are_positive(key):
    with pytest.raises(ConfigError, match=f"{key}: expected .*positive, got 0"):
        RolloutConfig(**{key: 0})


class Rooms:
    """In place of the process: shows a number that goes on with each step, or with each call if it is unsteady."""

    def __init__(self, steady: bool, copies: bool) -> None:
        self.steady, self.copies, self.calls, self.room = steady, copies, itertools.count(), 0
        self.resets, self.copy_is_off = 0, 0

    async def call(self, method: str, *_: Any) -> Any:
        if method == "load":
            return Declared(copies=self.copies)
        if method == "step_clone":
            return f"room {self.room + self.copy_is_off + 1}", {"state_key": None}
        self.resets += method == "start"
        self.room = 0 if method == "start" else self.room + 1
        seen = f"room {self.room if self.steady else next(self.calls)}"
        info = {"admissible": ["go"], "extra": {}, "invalid": False, "state_key": None}
        return (seen, info) if method == "start" else (seen, 0.0, self.room == 3, False, info)

    async def retire(self, seconds: float) -> None:
        pass


def played(monkeypatch: pytest.MonkeyPatch, rooms: Rooms, seed: int | None, forks: bool = True) -> int:
    monkeypatch.setattr(probe.ProcessWorker, "spawn", AsyncMock(return_value=rooms))
    asyncio.run(probe.play(TurnkeyConfig(), Task("own/Rooms-v0", seed), forks=forks))
    return rooms.resets


def test_what_cannot_be_cloned_is_refused_before_training(monkeypatch: pytest.MonkeyPatch):
    assert played(monkeypatch, Rooms(steady=True, copies=False), 3) == 2
    for rooms, seed, message in (
        (Rooms(steady=False, copies=False), 3, "reached another state after 0 actions"),
        (Rooms(steady=True, copies=False), None, "without a seed cannot be replayed"),
    ):
        with pytest.raises(EnvironmentFailure, match=message) as failure:
            played(monkeypatch, rooms, seed)
        assert failure.value.kind == "clone"
    # What copies itself needs no seed, and independent episodes are not cloned.
    assert played(monkeypatch, Rooms(steady=True, copies=True), None) == 1
    assert played(monkeypatch, Rooms(steady=False, copies=False), None, forks=False) == 1
    off = Rooms(steady=True, copies=True)
    off.copy_is_off = 1
    with pytest.raises(EnvironmentFailure, match="another state after 1 actions in a copy of it"):
        played(monkeypatch, off, 3)


@pytest.mark.parametrize(
    ("n", "strategy", "message"),
    [
        (1, "independent", r"rewards\[0\] \(arena\) compares .*: set actor_rollout_ref\.rollout\.n to 2 or more"),
        (4, "vine", r"turnkey\.rewards\[0\] \(arena\) .* turnkey\.rollout\.strategy=vine plays branches"),
        (4, "tree", "strategy=tree plays branches"),
        (4, "independent", None),
        (4, "probe", None),
    ],
)
def test_rollouts_are_compared_where_there_are_some_and_no_branches(n, strategy, message):
    whole = config(n=n)
    whole.reward = {"reward_model": {"enable": False}, "reward_manager": {"name": "naive", "source": "register"}}
    compared = TurnkeyConfig(rollout=RolloutConfig(strategy=strategy), rewards=[ARENA])
    composed = check_rewards(CheckedRun(whole, compared))  # all that an evaluation asks for: it compares nobody
    assert composed.labels == ("arena", "arena_calls")
    if message is None:
        check_compared(CheckedRun(whole, compared), composed)
    else:
        with pytest.raises(ConfigError, match=message):
            check_compared(CheckedRun(whole, compared), composed)


# --- What the driver refuses of ``turnkey.groups`` --------------------------------------------------------------------
def checked(groups: dict[str, Any], mode: str = "turnkey_sync", **changes: Any) -> None:
    config = OmegaConf.create(
        {
            "turnkey": {"groups": groups, **changes.get("turnkey", {})},
            "algorithm": {"adv_estimator": changes.get("method", "gigpo")} | changes.get("algorithm", {}),
            "actor_rollout_ref": {"rollout": {"n": changes.get("n", 8)}},
            "data": {"train_batch_size": changes.get("tasks", 8)},
            "trainer": {"v1": {"trainer_mode": mode, "separate_async": {"parameter_sync_step": 4}}},
        }
    )
    loops = [changes.get("loop", "turnkey_env")]
    check_groups(CheckedRun(config, turnkey_config(config), loops, files=changes.get("files", [])))


def test_what_works_is_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked({}, "sync")
        checked({"keep": 0.125})
        checked({"keep": 0.5}, "turnkey_separate_async")
        checked({"keep": 0.01, "keep_by": "spread"}, method="grpo")
        checked({"allocation": "prior", "decay": 0.5, "keep": 0.5})
        checked({"allocation": "variance"}, n=3)


@pytest.mark.parametrize(
    ("groups", "changes", "words"),
    [
        ({"allocation": "variance", "n_low": 1, "n_high": 3}, {"n": 2}, "may play a task once"),
        ({"n_low": 2}, {}, "n_low and n_high have no effect with allocation=even"),
        ({"keep": 0.5}, {"method": "shrinkage"}, "shrinkage then remembers only the kept groups of earlier batches"),
        ({"hint_high": 0.5}, {"method": "shrinkage"}, "shrinkage remembers of earlier batches includes outcomes with"),
    ],
)
def test_what_is_hardly_meant_is_said(groups, changes, words):
    with pytest.warns(UserWarning, match=words):
        checked(groups, **changes)


@pytest.mark.parametrize(
    ("groups", "changes", "message"),
    [
        ({"keep": 0.5}, {"mode": "sync"}, "trainer.v1.trainer_mode=turnkey_sync"),
        ({"keep": 0.5}, {"n": 1}, "rollout.n=1: raise it to 2 or more"),
        ({"keep": 0.12}, {}, "less than one of the 8 groups of an update (data.train_batch_size): raise it to 0.125"),
        ({"keep": 0.4}, {"mode": "turnkey_separate_async"}, "less than one of the 2 groups"),
        (
            {"keep": 0.5},
            {"method": "tree", "turnkey": {"rollout": {"strategy": "tree"}}},
            "turnkey.rollout.strategy=tree trains several: set turnkey.groups.keep to 1",
        ),
        ({"allocation": "variance"}, {"n": 2}, "gives each task from 2 to 3 episodes"),
        ({"allocation": "prior", "n_high": 8}, {}, "expected n_low < actor_rollout_ref.rollout.n < n_high"),
        ({"allocation": "prior"}, {"tasks": 1}, "raise data.train_batch_size"),
        (
            {"allocation": "variance"},
            {"algorithm": {"filter_groups": {"enable": True}}},
            "algorithm.filter_groups.enable=true first drops groups whose outcomes are all equal: set it to false",
        ),
        ({"hint_high": 0.5}, {"loop": "tool_agent"}, "hint_high=0.5 has no effect with the agent loop tool_agent"),
        (
            {"hint_high": 0.5},
            {"algorithm": {"filter_groups": {"enable": True}}},
            "algorithm.filter_groups.enable=true drops first",
        ),
        (
            {"allocation": "variance"},
            {"turnkey": {"rollout": {"strategy": {"name": "entropy_branch", "trajectories": 16}}}},
            "strategy=entropy_branch counts its trajectories by actor_rollout_ref.rollout.n: set turnkey.groups",
        ),
        ({"allocation": "prior"}, {"mode": "sync"}, "trainer.v1.trainer_mode=turnkey_sync"),
    ],
)
def test_what_cannot_work_is_refused(groups, changes, message):
    with pytest.raises(ConfigError) as error:
        checked(groups, **changes)
    assert message in str(error.value)


def test_data_that_say_how_often_themselves_are_refused(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [], "__rollout_n__": 3}\n')
    checked({"keep": 0.5}, files=[str(rows)])
    with pytest.raises(ConfigError, match=r"rows\.jsonl has a column __rollout_n__, which .* would overwrite"):
        checked({"allocation": "variance"}, files=[str(rows)])


@pytest.mark.parametrize(("n", "low", "high"), [(16, 8, 24), (5, 3, 7), (3, 2, 4)])
def test_the_bounds_are_half_and_one_and_a_half(n, low, high):
    assert GroupsConfig().bounds(n) == (low, high)
    assert GroupsConfig(n_low=1, n_high=9).bounds(n) == (1, 9)


def test_hints_need_a_column_and_a_template_that_shows_the_task(tmp_path: Path):
    with_hints, without, template = tmp_path / "with.jsonl", tmp_path / "without.jsonl", tmp_path / "bare.txt"
    with_hints.write_text('{"prompt": [], "turnkey_hint": "left"}\n')
    without.write_text('{"prompt": []}\n')
    template.write_text("{observation}\n")
    checked({"hint_high": 0.5}, files=[str(with_hints)])
    with pytest.raises(ConfigError, match=r"without\.jsonl has no column 'turnkey_hint'"):
        checked({"hint_high": 0.5}, files=[str(with_hints), str(without)])
    with pytest.raises(ConfigError, match=r"bare\.txt does not show the \{task\}"):
        checked({"hint_high": 0.5}, files=[], turnkey={"rollout": {"template": str(template)}})


# --- What the driver refuses of MCP servers; the lines of recipe/rules.yaml have the other rules ----------------------
PAD = {"pad": {"command": "sh"}}


def check(servers: Any = PAD, shared: tuple[str, ...] = (), **rollout: Any) -> None:
    rollout = {"action_format": "tools", **rollout}
    turnkey = TurnkeyConfig(mcp=McpConfig(servers, [*shared]), rollout=RolloutConfig(**rollout))
    agent_loop.check_mcp(CheckedRun(OmegaConf.create({}), turnkey))


def test_what_works_passes() -> None:
    check(None, action_format="plain")
    check()
    check({"web": {"url": "http://host/mcp"}}, ("web",), strategy="tree")


def test_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_loop, "find_spec", lambda name: None if name == "mcp" else importlib.util.find_spec(name))
    with pytest.raises(ConfigError, match=r'needs the package mcp: pip install "verl-turnkey\[mcp\]"'):
        check()


def test_shared_names_must_be_those_of_servers() -> None:
    with pytest.raises(ConfigError, match=r"turnkey\.mcp\.shared names 'pat'; turnkey\.mcp\.servers has pad"):
        check(PAD, ("pat",))


def test_forks_need_servers_without_state() -> None:
    both = {**PAD, "web": {"url": "http://host/mcp"}}
    with pytest.raises(ConfigError, match=r"strategy=tree forks episodes, .* MCP server web: set turnkey\.mcp\.shared"):
        check(both, ("pad",), strategy="tree")


@pytest.mark.parametrize("number", [0, -1])
def test_a_bound_is_positive(number: int) -> None:
    with pytest.raises(ConfigError, match="message_bytes"):
        McpConfig(message_bytes=number)
