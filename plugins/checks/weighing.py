"""Checks of ``turnkey.update.weight_by`` in the driver: whether the losses can take weights, and what else weighs."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.losses.registry import weighs
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.schema import TurnkeyConfig, loss_of, loss_params

# What verl's other modes weigh; token-mean, the default, is the one whose place the weights take.
OTHER_MODES = {
    "token-sum": "is a sum that grows with the number of tokens",
    "seq-mean-token-sum": "weighs rows by their tokens and divides by the number of rows",
    "seq-mean-token-sum-norm": "weighs rows by their tokens and divides by their number and a factor",
    "seq-mean-token-mean": "lets rows weigh alike",
}

# verl's losses that end in agg_loss, where the weights come in.
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
    """Refuse what weights by step, episode or task cannot mean; ``mode`` is ``trainer.v1.trainer_mode``.

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
                f"{key} says what weighs alike, and {where}.loss_agg_mode={mean} says otherwise: it "
                f"{OTHER_MODES[mean]}. Set {where}.loss_agg_mode=token-mean, whose place the weights take, or "
                "turnkey.update.weight_by=token",
            )


def _reason(config: DictConfig, turnkey: TurnkeyConfig, name: str) -> str | None:
    """Why the update cannot take weights, and what to change."""
    key = f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"
    spec, params = loss_of(config), loss_params(config, turnkey)
    if turnkey.update.order == "reverse_turns":
        return (
            "turnkey.update.order=reverse_turns makes an update of each turn number, which is a mean over its own "
            "rows, while weights are shares of the whole batch; set turnkey.update.order=batch"
        )
    if OmegaConf.select(config, "distillation.enabled"):
        return "the loss of a distillation takes no weights; set distillation.enabled=false"
    if spec is None:
        return _reason_of_verls(config, name, key)
    if spec.per_row or "group_log_ratio" in spec.needs:
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
            if (given := OmegaConf.select(config, rejects)) is not None:
                return (
                    f"{key} rejects tokens ({rejects}={given}) by the policy as it is in each micro-batch, so that the "
                    f"tokens that count are not known before the update; set {rejects}=null"
                )
    return None
