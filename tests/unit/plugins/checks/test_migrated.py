"""A mini-batch in rows, as verl-agent counts, on a launch line where verl counts tasks."""

from __future__ import annotations

import warnings

import pytest
from omegaconf import OmegaConf

from verl_turnkey.plugins.checks.run import Run
from verl_turnkey.plugins.checks.update import check_migrated
from verl_turnkey.plugins.config.schema import EnvConfig, RolloutConfig, TurnkeyConfig
from verl_turnkey.plugins.config.training import UpdateConfig

ALFWORLD = EnvConfig(id="turnkey/ALFWorld-v0")


def advice(size: int, loops: tuple[str, ...] = ("turnkey_env",), method: str = "gigpo", **node: object) -> str:
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": 16, "train_files": None},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": size}, "rollout": {"n": 8}},
            "algorithm": {"adv_estimator": method},
        }
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_migrated(Run(config, TurnkeyConfig(env=ALFWORLD, **node), loops))
    return " ".join(str(warning.message) for warning in caught)


def test_the_line_of_verl_agents_example_names_the_key_and_the_preset():
    text = advice(256)
    assert "16 x 8 episodes have about 4224: set turnkey.update.mini_batches=16" in text
    assert "+turnkey/preset=gigpo_alfworld_1.5b sets turnkey.update.mini_batches=16 and" in text
    assert "'turnkey.rewards=[{name: step, weight: 10}]'" in text


def test_rewards_that_are_the_presets_are_not_named():
    text = advice(256, rewards=[{"name": "step", "weight": 10}])
    assert "gigpo_alfworld_1.5b sets turnkey.update.mini_batches=16" in text
    assert "turnkey.rewards" not in text


def test_a_method_without_a_preset_gets_the_number_alone():
    text = advice(256, method="rebn")
    assert "turnkey.update.mini_batches=16" in text
    assert "preset" not in text


@pytest.mark.parametrize(("size", "number"), [(17, 248), (64, 66), (2112, 2)])
def test_the_number_is_that_of_the_optimizer_steps(size, number):
    assert f"set turnkey.update.mini_batches={number} " in advice(size)


def test_a_row_of_several_turns_is_counted_once():
    conversation = RolloutConfig(prompt="conversation")
    assert "have about 128: set turnkey.update.mini_batches=2 " in advice(64, rollout=conversation)
    assert advice(128, rollout=conversation) == ""
    assert "have about 128" in advice(64, loops=("tool_agent",))


@pytest.mark.parametrize(
    ("size", "update"),
    [
        (16, UpdateConfig()),
        (8, UpdateConfig()),
        (4224, UpdateConfig()),  # a whole batch of rows
        (256, UpdateConfig(mini_batches=4)),
        (256, UpdateConfig(order="reverse_turns")),
    ],
)
def test_nothing_is_said_where_both_ways_to_count_agree_or_the_number_is_set(size, update):
    assert advice(size, update=update) == ""
