"""Checks of a method with an advantage for each decision of a turn: its critic's heads, and who else moves tokens."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from verl_turnkey.advantage import ValueHead
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.plugins.checks.findings import refusal, refuse, warn
from verl_turnkey.plugins.checks.run import Run
from verl_turnkey.plugins.config.checkpoint_files import FSDP, damage
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_params, estimator_of, turnkey_config
from verl_turnkey.plugins.rollout.streams import FORMAT


def heads_of(config: DictConfig, turnkey: TurnkeyConfig) -> tuple[ValueHead, ...]:
    """The heads that the method reads of a critic; none: verl's one value is enough."""
    spec = estimator_of(config)
    return () if spec is None else spec.heads(credit_params(config, turnkey))


def check_value_heads(run: Run) -> None:
    """Refuse a critic that cannot have the heads that the method reads."""
    if not run.use_critic or not (heads := heads_of(run.config, run.turnkey)):
        return
    critic = run.config.critic
    if (strategy := str(critic.strategy)) not in FSDP:
        refuse("heads-engine", method=run.shown("algorithm.adv_estimator"), number=len(heads), strategy=strategy)
    if rank := run.get("critic.model.lora_rank"):
        refuse("heads-lora", method=run.shown("algorithm.adv_estimator"), number=len(heads), rank=rank)
    if (mean := str(critic.loss_agg_mode)) != "token-mean":
        warn("heads-aggregation", mean=mean, method=run.shown("algorithm.adv_estimator"), number=len(heads))


def check_streams(run: Run) -> None:
    """Refuse modifiers of tokens where the method gives the tokens of each decision of a turn their own advantages."""
    method, by_token = run.estimator, [modifier.spec.name for modifier in run.modifiers if modifier.by_token]
    in_streams = run.turnkey.rollout.action_format == FORMAT
    if by_token and method and "subgoal_advantages" in method.gives and in_streams:
        refuse("streams-and-tokens", method=method.name, modifier=by_token[0])


def check_resumed_heads(folder: Path, config: DictConfig) -> None:
    """Refuse to resume from the critic in ``folder`` with another number of heads than its saved config has."""
    file = folder / "huggingface" / "config.json"
    if str(config.critic.strategy) not in FSDP or damage(file):
        return
    names = json.loads(read_text(file, only_utf8=True)).get("id2label")
    heads, method = len(heads_of(config, turnkey_config(config))) or 1, config.algorithm.adv_estimator
    if names is not None and len(names) != heads:
        raise refusal("heads-of-checkpoint", folder=folder, number=len(names), method=method, heads=heads)
