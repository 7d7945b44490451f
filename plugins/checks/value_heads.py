"""Checks of a method with an advantage for each decision of a turn: its critic's heads, and who else moves tokens."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from verl_turnkey.advantage import ValueHead
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.plugins.checks.findings import Refusal, refuse
from verl_turnkey.plugins.checks.run import Run, warn_idle
from verl_turnkey.plugins.config.checkpoint_files import FSDP, damage
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_params, estimator_of, turnkey_config
from verl_turnkey.plugins.rollout.token_spans import STREAM_FORMAT


def heads_of(config: DictConfig, turnkey: TurnkeyConfig) -> tuple[ValueHead, ...]:
    """The heads that the method reads of a critic; none: verl's one value is enough."""
    spec = estimator_of(config)
    return () if spec is None else spec.heads(credit_params(config, turnkey))


def check_value_heads(run: Run) -> None:
    """Refuse a critic that cannot have the heads that the method reads."""
    if not run.use_critic or not (heads := heads_of(run.config, run.turnkey)):
        return
    critic = run.config.critic
    reads = f"{run.setting('algorithm.adv_estimator')} reads {len(heads)} heads of the critic"
    single = "turnkey.credit.heads=1, one value in the place of all"
    if (strategy := str(critic.strategy)) not in FSDP:
        problem = f"{reads}, which only FSDP builds, and critic.strategy={strategy}"
        refuse("heads-engine", f"{problem}: set critic.strategy=fsdp2, or {single}")
    if rank := run.get("critic.model.lora_rank"):
        problem = f"{reads}, and critic.model.lora_rank={rank} trains an adapter without them"
        refuse("heads-lora", f"{problem}: set critic.model.lora_rank=0, or {single}")
    if (mean := str(critic.loss_agg_mode)) != "token-mean":
        fitted = f"{reads}, each of which is fitted at one token of a turn"
        warn_idle("heads-aggregation", f"critic.loss_agg_mode={mean}", fitted)


def check_streams(run: Run) -> None:
    """Refuse modifiers of tokens where the method gives the tokens of each decision of a turn their own advantages."""
    method, by_token = run.estimator, [modifier.spec.name for modifier in run.modifiers if modifier.by_token]
    in_streams = run.turnkey.rollout.action_format == STREAM_FORMAT
    if by_token and method and "subgoal_advantages" in method.gives and in_streams:
        problem = f"{method.name} gives the tokens of each decision of a turn their own advantages, and the modifier"
        fix = f"drop the modifier, or set another turnkey.rollout.action_format than {STREAM_FORMAT}"
        refuse("streams-and-tokens", f"{problem} {by_token[0]} changes those of single tokens: {fix}")


def check_resumed_heads(folder: Path, config: DictConfig) -> None:
    """Refuse to resume from the critic in ``folder`` with another number of heads than its saved config has."""
    file = folder / "huggingface" / "config.json"
    if str(config.critic.strategy) not in FSDP or damage(file):
        return
    names = json.loads(read_text(file, only_utf8=True)).get("id2label")
    heads, method = len(heads_of(config, turnkey_config(config))) or 1, config.algorithm.adv_estimator
    if names is not None and len(names) != heads:
        raise Refusal(
            "heads-of-checkpoint",
            f"the critic in {folder} was trained with another number of heads ({len(names)}) than "
            f"algorithm.adv_estimator={method} reads ({heads}): set algorithm.adv_estimator to the method that trained "
            f"it (for hae also turnkey.credit.heads={len(names)}), or start over with trainer.resume_mode=disable",
        )
