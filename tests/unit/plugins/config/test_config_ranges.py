"""What the node ``turnkey:`` takes at the edges of its ranges, and under which names methods are found."""

from __future__ import annotations

import re

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify, credit_params, estimator_of, turnkey_config


@pytest.mark.parametrize(
    "node",
    [
        {"rollout": {"history": 0, "invalid_action_penalty": 0.0, "max_turns": 1, "max_tokens_per_turn": 1}},
        {"env": {"hosts": 1, "restarts": 0, "step_timeout": 0.1}},
        {"update": {"mini_batches": 1, "ratio_clip": 0.99}},
        {"log": {"share": 0.0, "episodes_per_step": 1, "keep_texts": 1}},
        {"log": {"share": 1.0, "episodes_per_step": None, "keep_texts": None}},
        {"update": {"order": "reverse_turns", "mini_batches": None}},
        {"groups": {"keep": 0.01, "keep_by": "spread"}},
    ],
)
def test_what_is_just_possible(node):
    parsed = turnkey_config({"turnkey": node})
    for part, values in node.items():
        assert {key: getattr(getattr(parsed, part), key) for key in values} == values


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("rollout", "history", -1),
        ("rollout", "invalid_action_penalty", -0.1),
        ("rollout", "max_turns", 0),
        ("rollout", "stop", [""]),
        ("rollout", "max_tokens_per_turn", 0),
        ("env", "hosts", 0),
        ("env", "restarts", -1),
        ("env", "step_timeout", 0.0),
        ("env", "reset_timeout", 0.0),
        ("update", "mini_batches", 0),
        ("log", "share", -0.1),
        ("log", "share", 1.1),
        ("log", "episodes_per_step", 0),
        ("log", "keep_texts", 0),
        ("update", "ratio_clip", 0.0),
        ("update", "ratio_clip", 1.0),
        ("groups", "keep", 0.0),
        ("groups", "keep", 1.01),
        ("groups", "n_low", 0),
        ("groups", "n_high", 0),
        ("groups", "hint_high", 1.1),
        ("groups", "hint_low", 0.1),
        ("groups", "decay", -0.1),
        ("groups", "decay", 1.1),
    ],
)
def test_what_is_just_not(part, key, value):
    with pytest.raises(ConfigError, match=rf"^turnkey\.{part}\.{key}: expected .*, got {re.escape(str(value))}$"):
        turnkey_config({"turnkey": {part: {key: value}}})


def test_turn_by_turn_has_no_mini_batches():
    with pytest.raises(ConfigError, match=r"^turnkey\.update\.mini_batches: expected null with order=reverse_turns"):
        turnkey_config({"turnkey": {"update": {"order": "reverse_turns", "mini_batches": 2}}})


def test_all_groups_are_no_share_of_a_spread():
    with pytest.raises(ConfigError, match=r"^turnkey\.groups\.keep_by: expected groups with keep=1, got 'spread'"):
        turnkey_config({"turnkey": {"groups": {"keep_by": "spread"}}})


@pytest.mark.parametrize("name", ["gigpo", "turnkey/gigpo"])
def test_an_estimator_is_ours_under_both_names(name):
    config = {"algorithm": {"adv_estimator": name}}
    assert estimator_of(config).name == "gigpo"
    assert credit_params(config, TurnkeyConfig(credit={"gamma": 0.5})).gamma == 0.5


def test_modifiers_are_no_parameters_of_the_method():
    config = {"algorithm": {"adv_estimator": "gigpo"}}
    turnkey = TurnkeyConfig(credit={"gamma": 0.5, "modify": [{"name": "a_grae", "alpha": 0.5}, "empg"]})
    assert credit_params(config, turnkey).gamma == 0.5
    assert [modifier.spec.name for modifier in credit_modify(config, turnkey)] == ["a_grae", "empg"]
    assert credit_modify(config, turnkey)[0].params.alpha == 0.5
    assert credit_modify(config, TurnkeyConfig()) == ()
    with pytest.raises(
        ConfigError, match=r"turnkey\.credit\.modify\[0\]: unknown modifier 'a_gra'; did you mean 'a_grae'"
    ):
        credit_modify(config, TurnkeyConfig(credit={"modify": ["a_gra"]}))


def test_an_estimator_of_verls_is_not():
    config = {"algorithm": {"adv_estimator": "grpo"}}
    assert estimator_of(config) is None
    assert credit_modify(config, TurnkeyConfig(credit={"modify": ["empg"]})) == ()
    assert credit_params(config, TurnkeyConfig(credit={"gamma": 0.5})) is None
