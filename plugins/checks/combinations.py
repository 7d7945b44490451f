"""Warnings about settings that are valid on their own and rarely intended together."""

from __future__ import annotations

from collections.abc import Iterator

from verl_turnkey.plugins.checks.findings import warn
from verl_turnkey.plugins.checks.run import OURS, Run

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


def warn_of_combinations(run: Run) -> None:
    """Warn of each such combination."""
    for message in (*_rows(run), *_discounts(run), *_histories(run)):
        warn("combination", message=message)
    if run.loss_name.removeprefix("turnkey/") == "rebel" and run.trains_branches:
        assert run.strategy is not None
        warn("rebel-branches", strategy=run.strategy.name)


def _rows(run: Run) -> Iterator[str]:
    name = str(run.config.algorithm.adv_estimator)
    if name in BY_ROWS and run.our_loops and not run.turnkey.rollout.rows_hold_turns:
        yield (
            f"algorithm.adv_estimator={name} treats each row as a rollout, and {run.our_loops[0]} writes a row per "
            f"step: a long episode counts as often as it has steps. To compare episodes use +turnkey={BY_ROWS[name]}"
        )


def _discounts(run: Run) -> Iterator[str]:
    method, name = run.estimator, str(run.config.algorithm.adv_estimator)
    if name in BY_TOKENS:
        return
    discounts = method is not None and method.name in DISCOUNTED
    own = float(getattr(run.params, "gamma", 1.0)) if discounts else 1.0
    outcomes = f"turnkey.credit.gamma={own}" if discounts else "outcomes without a discount"
    for entry in run.turnkey.rewards:
        if entry.get("name") == "potential" and not entry.get("column") and entry.get("gamma") != own:
            changes = f"potential with gamma={entry.get('gamma')} changes which policy is best"
            compares = f"{method.name if method else name} compares {outcomes}"
            yield f"turnkey.rewards: {changes}, since {compares}: set its gamma to {own}"


def _histories(run: Run) -> Iterator[str]:
    method, options = run.estimator, run.turnkey.rollout
    if method is None or method.name != "hgpo" or OURS not in run.loops or options.prompt != "template":
        return
    if (compared := run.params.history) != options.history:
        both = f"turnkey.credit.history={compared} and turnkey.rollout.history={options.history}"
        meant = "hgpo is meant to compare as many past states as the prompts show"
        yield f"{both}: {meant}: set both to the same number"
