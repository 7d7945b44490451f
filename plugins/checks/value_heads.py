"""Checks of a method with an advantage for each decision of a turn: its critic's heads, and who else moves tokens."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ValueHead
from verl_turnkey.plugins.checks.findings import Refusal, refuse, warn
from verl_turnkey.plugins.config.checkpoint_files import FSDP, damage
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify, credit_params, estimator_of, turnkey_config
from verl_turnkey.plugins.rollout.streams import FORMAT


def heads_of(config: DictConfig, turnkey: TurnkeyConfig) -> tuple[ValueHead, ...]:
    """The heads that the method reads of a critic; none: verl's one value is enough."""
    spec = estimator_of(config)
    return () if spec is None else spec.heads(credit_params(config, turnkey))


def check_value_heads(config: DictConfig, turnkey: TurnkeyConfig, *, use_critic: bool) -> None:
    """Refuse a critic that cannot have the heads that the method reads.

    Raises:
        ConfigError: names the key to change.
    """
    if not use_critic or not (heads := heads_of(config, turnkey)):
        return
    what = f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads {len(heads)} heads of the critic"
    one = "turnkey.credit.heads=1, one value in the place of all"
    if (strategy := str(config.critic.strategy)) not in FSDP:
        refuse(
            "heads-engine",
            f"{what}, which only FSDP builds, and critic.strategy={strategy}: set critic.strategy=fsdp2, or {one}",
        )
    if rank := OmegaConf.select(config, "critic.model.lora_rank"):
        refuse(
            "heads-lora",
            f"{what}, and critic.model.lora_rank={rank} trains an adapter without them: set critic.model.lora_rank=0, "
            f"or {one}",
        )
    if (mean := str(config.critic.loss_agg_mode)) != "token-mean":
        warn(
            "heads-aggregation",
            f"critic.loss_agg_mode={mean} has no effect: {what}, each of which is fitted at one token of a turn",
        )


def check_streams(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Refuse modifiers of tokens where the method gives the tokens of each decision of a turn their own advantages.

    Raises:
        ConfigError: names the keys to change.
    """
    spec = estimator_of(config)
    by_token = [one.spec.name for one in credit_modify(config, turnkey) if one.by_token]
    if by_token and spec and "subgoal_advantages" in spec.gives and turnkey.rollout.action_format == FORMAT:
        refuse(
            "streams-and-tokens",
            f"{spec.name} gives the tokens of each decision of a turn their own advantages, and the modifier "
            f"{by_token[0]} (turnkey.credit.modify) changes those of single tokens: drop the modifier, or set another "
            f"turnkey.rollout.action_format than {FORMAT}",
        )


def check_resumed_heads(folder: Path, config: DictConfig) -> None:
    """Refuse to resume from the critic in ``folder`` with another number of heads; verl saves the model's config there.

    Raises:
        ConfigError: names the keys to change.
    """
    file = folder / "huggingface" / "config.json"
    if str(config.critic.strategy) not in FSDP or damage(file):
        return
    names = json.loads(file.read_text(encoding="utf-8")).get("id2label")
    heads = len(heads_of(config, turnkey_config(config))) or 1
    if names is not None and len(names) != heads:
        raise Refusal(
            "heads-of-checkpoint",
            f"the critic in {folder} was trained with another number of heads ({len(names)}) than "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads ({heads}): set algorithm.adv_estimator to "
            f"the method that trained it (for hae also turnkey.credit.heads={len(names)}), or start over with "
            "trainer.resume_mode=disable",
        )
