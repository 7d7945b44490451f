"""verl's configuration for Megatron, composed and checked: what needs FSDP is refused, the rest is called untested."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from test_rules import ids_of
from verl.workers.config.actor import McoreActorConfig

from verl_turnkey.plugins.checks.rules import rules

WAYS = (("ppo_megatron_trainer", ()), ("ppo_trainer", ("model_engine=megatron",)))


def megatron(stock_overrides: list[str], *words: str, way: tuple[str, tuple[str, ...]] = WAYS[1]) -> DictConfig:
    name, choice = way
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=[*words, *choice, *stock_overrides])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
@pytest.mark.parametrize("recipe", ["gigpo", "turn_gae"])
def test_it_composes_and_is_called_untested(stock_overrides, way, recipe):
    config = megatron(stock_overrides, f"+turnkey={recipe}", way=way)
    assert config.actor_rollout_ref.actor._target_.endswith(McoreActorConfig.__name__)
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"
    ids = ids_of(config)
    assert "strategy-untested" in ids
    assert {id for id in ids if rules()[id].level == "error"} == set()


@pytest.mark.parametrize(
    ("refused_by", "words"),
    [
        ("strategy-unusable", ["+turnkey=gigpo", "actor_rollout_ref.actor.strategy=fsdp2"]),
        ("loss-strategy", ["+turnkey=gigpo", "actor_rollout_ref.actor.policy_loss.loss_mode=st_ppo"]),
        ("rank-engine", ["+turnkey=gigpo", "turnkey.credit.modify=[rank_shaping]"]),
        ("prm-engine", ["+turnkey=istar"]),
        ("lora-megatron", ["+turnkey=gigpo", "actor_rollout_ref.model.lora_rank=8"]),
    ],
)
def test_what_needs_fsdp_is_refused(stock_overrides, refused_by, words):
    assert rules()[refused_by].level == "error"
    assert refused_by in ids_of(megatron(stock_overrides, *words))
