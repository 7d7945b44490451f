"""Driver checks of the modifier ``rank_shaping``: the pass that measures hidden states has to see all of them."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.limits import ACTOR
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify
from verl_turnkey.plugins.credit.supplied import BYPASS, OF_RANK


def check_hidden_rank(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Refuse modifiers that read hidden states in a run that cannot measure them."""
    readers = [one.spec.name for one in credit_modify(config, turnkey) if OF_RANK & {*one.columns}]
    if not readers:
        return
    what = f"the modifier {readers[0]} measures the hidden states of the old policy's forward pass"
    if OmegaConf.select(config, BYPASS):
        refuse("rank-bypass", f"{what}, and {BYPASS}=true leaves it out: set {BYPASS}=false")
    actor = config.actor_rollout_ref.actor
    if str(actor.strategy) not in FSDP:
        refuse("rank-engine", f"{what}, with FSDP alone: set {ACTOR}.strategy=fsdp2 instead of {actor.strategy}")
    key = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    if (spread := max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)) > 1:
        refuse("rank-sequence-parallel", f"{what}, of which each rank has a part with {key}={spread}: set {key}=1")
