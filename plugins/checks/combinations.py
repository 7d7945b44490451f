"""Warnings about settings that are valid on their own and rarely intended together."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.findings import warn
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_params, estimator_of
from verl_turnkey.plugins.rollout.strategies import read_strategy
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

# verl's estimators that treat each row as a rollout, and our method that makes the same comparison by steps.
# Under grpo verl itself takes the last row of an episode; gae works on tokens.
BY_ROWS = {
    "rloo": "rloo_steps",
    "rloo_vectorized": "rloo_steps",
    "opo": "rloo_steps",
    "gpg": "grpo_steps with turnkey.credit.norm=mean",
    "grpo_passk": "maxrl",
    "grpo_vectorized": "grpo_steps",
    "reinforce_plus_plus": "rebn",
    "reinforce_plus_plus_baseline": "seeupo",
}
# Methods without a part that sums an episode's rewards without a discount.
DISCOUNTED = ("rebn", "turn_gae", "vc_gae", "turn_norm", "marshal", "hae")
# verl's estimators that discount rewards per token: they do not compare sums over an episode's steps.
BY_TOKENS = ("gae", "reinforce_plus_plus")


def warn_of_combinations(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """Warn of each such combination; ``loops``: the agent loops of the training rows."""
    for message in (*_rows(config, turnkey, loops), *_discounts(config, turnkey), *_histories(config, turnkey, loops)):
        warn("combination", message)
    strategy = read_strategy(turnkey.rollout.strategy)
    loss = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")).removeprefix("turnkey/")
    if loss == "rebel" and strategy is not None and strategy[0].trains:
        warn(
            "rebel-branches",
            f"the policy loss rebel compares the outcomes of whole rollouts, and turnkey.rollout.strategy="
            f"{strategy[0].name} trains branches that share their beginning: take another loss, or no branches",
        )


def _rows(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> Iterator[str]:
    name = str(config.algorithm.adv_estimator)
    if name in BY_ROWS and (ours := {*AGENT_LOOPS} & {*loops}) and not turnkey.rollout.rows_hold_turns:
        yield (
            f"algorithm.adv_estimator={name} treats each row as a rollout, and {min(ours)} writes a row per step: a "
            f"long episode counts as often as it has steps. To compare episodes use +turnkey={BY_ROWS[name]}"
        )


def _discounts(config: DictConfig, turnkey: TurnkeyConfig) -> Iterator[str]:
    spec, name = estimator_of(config), str(config.algorithm.adv_estimator)
    if name in BY_TOKENS:
        return
    own = float(getattr(credit_params(config, turnkey), "gamma", 1.0)) if spec and spec.name in DISCOUNTED else 1.0
    outcomes = f"turnkey.credit.gamma={own}" if spec and spec.name in DISCOUNTED else "outcomes without a discount"
    for entry in turnkey.rewards:
        if entry.get("name") == "potential" and not entry.get("column") and entry.get("gamma") != own:
            yield (
                f"turnkey.rewards: potential with gamma={entry.get('gamma')} changes which policy is best, since "
                f"{spec.name if spec else name} compares {outcomes}: set its gamma to {own}"
            )


def _histories(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> Iterator[str]:
    spec = estimator_of(config)
    if spec is None or spec.name != "hgpo" or "turnkey_env" not in loops or turnkey.rollout.prompt != "template":
        return
    compared = credit_params(config, turnkey).history
    if compared != turnkey.rollout.history:
        yield (
            f"turnkey.credit.history={compared} and turnkey.rollout.history={turnkey.rollout.history}: hgpo is meant "
            "to compare as many past states as the prompts show: set both to the same number"
        )
