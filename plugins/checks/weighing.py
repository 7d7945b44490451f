"""Driver checks of ``turnkey.update.weight_by``: whether losses accept weights, and whether others apply, too."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.losses.registry import weighs
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.schema import TurnkeyConfig, loss_of, loss_params

# How verl's other modes weight tokens; the weights replace token-mean, the default.
OTHER_MODES = {
    "token-sum": "is a sum that grows with the number of tokens",
    "seq-mean-token-sum": "weights rows by their tokens and divides by the number of rows",
    "seq-mean-token-sum-norm": "weights rows by their tokens and divides by their number and a factor",
    "seq-mean-token-mean": "weights all rows equally",
}

# verl's losses that end in agg_loss, where the weights are applied.
TAKE_WEIGHTS = (
    "vanilla",
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
)


def check_weights(config: DictConfig, turnkey: TurnkeyConfig, mode: str, *, use_critic: bool) -> None:
    """Refuse settings that conflict with weights by step, episode or task; ``mode`` is ``trainer.v1.trainer_mode``.

    Raises:
        ConfigError: names the key to change.
    """
    if turnkey.update.weight_by == "token":
        return
    key = f"turnkey.update.weight_by={turnkey.update.weight_by}"
    if not mode.startswith("turnkey_"):
        refuse(
            "weights-trainer",
            f"{key} needs a trainer that computes the weights, but trainer.v1.trainer_mode is {mode!r}: set "
            f"trainer.v1.trainer_mode=turnkey_{mode}",
        )
    name = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    if reason := _reason(config, turnkey, name):
        refuse("weights-unusable", f"{key}: {reason}, or set turnkey.update.weight_by=token")
    for where in ("actor_rollout_ref.actor", *(["critic"] if use_critic else [])):
        mean = OmegaConf.select(config, f"{where}.loss_agg_mode")
        if mean in OTHER_MODES:
            refuse(
                "weights-aggregation",
                f"{key} conflicts with {where}.loss_agg_mode={mean}, which "
                f"{OTHER_MODES[mean]}. Set {where}.loss_agg_mode=token-mean, which the weights replace, or "
                "turnkey.update.weight_by=token",
            )


def _reason(config: DictConfig, turnkey: TurnkeyConfig, name: str) -> str | None:
    """Why the update cannot take weights, and what to change."""
    key = f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"
    spec, params = loss_of(config), loss_params(config, turnkey)
    if turnkey.update.order == "reverse_turns":
        return (
            "turnkey.update.order=reverse_turns updates each turn number separately, averaged over its own rows, "
            "while weights are shares of the whole batch; set turnkey.update.order=batch"
        )
    if OmegaConf.select(config, "distillation.enabled"):
        return "the loss of a distillation takes no weights; set distillation.enabled=false"
    if spec is None:
        return _reason_of_verls(config, name, key)
    if spec.per_row or spec.compares_groups:
        return f"the loss {name} is one number per row, a mean over rows; choose another {key.partition('=')[0]}"
    if weighs(spec, params):
        return f"the loss {name} weighs its tokens itself (turnkey.loss: {params}){_instead(params)}"
    return None


def _instead(params: Any) -> str:
    if getattr(params, "aggregate", None) == "turns":
        return "; turnkey.loss.aggregate=tokens with turnkey.update.weight_by=step is the same mean over turns"
    return "; choose one of the two"


def _reason_of_verls(config: DictConfig, name: str, key: str) -> str | None:
    if name == "geo_mean":
        return f"{key} takes a mean over the rows of each micro-batch itself; choose another loss"
    if name not in TAKE_WEIGHTS:
        return (
            f"whether {key} takes weights is not known: register your loss with verl_turnkey.losses.register_loss, "
            f"or choose one of {', '.join(TAKE_WEIGHTS)}"
        )
    if name == "bypass_mode":
        for where in ("algorithm", "actor_rollout_ref.actor.policy_loss"):
            rejects = f"{where}.rollout_correction.rollout_rs"
            if (value := OmegaConf.select(config, rejects)) is not None:
                return (
                    f"{key} rejects tokens ({rejects}={value}) by the policy of each micro-batch, so that the "
                    f"trained tokens are not known before the update; set {rejects}=null"
                )
    return None
