"""Driver checks of ``turnkey.update.importance``: what the weights are computed from, and what else would apply."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.schema import TurnkeyConfig, loss_of

CORRECTION = "algorithm.rollout_correction"


def check_importance(config: DictConfig, turnkey: TurnkeyConfig, mode: str) -> None:
    """Refuse weights that cannot be computed, or that another setting would replace or distort.

    ``mode`` is ``trainer.v1.trainer_mode``.

    Raises:
        ConfigError: names the key to change.
    """
    if turnkey.update.importance is None:
        return
    key = f"turnkey.update.importance={turnkey.update.importance}"
    if not mode.startswith("turnkey_"):
        refuse(
            "importance-trainer",
            f"{key} needs a trainer that computes the weights, but trainer.v1.trainer_mode is {mode!r}: set "
            f"trainer.v1.trainer_mode=turnkey_{mode}",
        )
    if OmegaConf.select(config, f"{CORRECTION}.bypass_mode"):
        refuse(
            "importance-bypass",
            f"{key} compares old_log_probs with those of the rollout, which {CORRECTION}.bypass_mode=true makes the "
            f"same: set {CORRECTION}.bypass_mode=false, or turnkey.update.importance=null",
        )
    elif (theirs := OmegaConf.select(config, f"{CORRECTION}.rollout_is")) is not None:
        refuse(
            "importance-twice",
            f"{key} would replace the weights of {CORRECTION}.rollout_is={theirs}: set {CORRECTION}.rollout_is=null, "
            "or turnkey.update.importance=null",
        )
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        refuse(
            "importance-log-probs",
            f"{key} compares with the rollout's log-probabilities: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true",
        )
    spec, name = loss_of(config), str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    if name == "geo_mean" or (spec is not None and spec.per_row):
        refuse(
            "importance-row-loss",
            f"the loss {name} is one number per row, while {key} weights parts of a row: set "
            "turnkey.update.importance=null, or choose another actor_rollout_ref.actor.policy_loss.loss_mode",
        )
