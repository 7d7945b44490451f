"""The launch line of every paper's name is composed with verl's own configuration, and read as a run reads it."""

from __future__ import annotations

import shlex

import pytest

from verl_turnkey.advantage.paper_names import PAPER_NAMES
from verl_turnkey.plugins.config import command_line
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.schema import credit_modify, credit_params, loss_params, turnkey_config
from verl_turnkey.plugins.rollout.strategies import read_strategy


def names(line: str) -> str:
    return ", ".join(entry.names.split(" / ")[0] for entry in PAPER_NAMES if entry.line == line)


@pytest.mark.parametrize("line", sorted({entry.line for entry in PAPER_NAMES}), ids=names)
def test_the_line_of_a_paper_composes(line):
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    words = shlex.split(line)
    command_line.check(words)
    config = composed(words)
    turnkey = turnkey_config(config)
    credit_params(config, turnkey), credit_modify(config, turnkey), loss_params(config, turnkey)
    read_strategy(turnkey.rollout.strategy)
    assert str(config.algorithm.adv_estimator) in ADV_ESTIMATOR_REGISTRY
    assert str(config.actor_rollout_ref.actor.policy_loss.loss_mode) in POLICY_LOSS_REGISTRY
