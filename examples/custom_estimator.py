"""An estimator of your own, in one file: the discounted return of a step against the mean of its group.

Try it with ``python examples/custom_estimator.py``. Train with it by
``turnkey.modules=[examples/custom_estimator.py]`` and ``algorithm.adv_estimator=return_baseline``; its
parameters are the keys of ``turnkey.credit``.
"""

from dataclasses import dataclass

from verl_turnkey.advantage import Credit, StepBatch, compute_credit, register_estimator
from verl_turnkey.advantage.group_ops import discounted_returns, group_stats, normalize
from verl_turnkey.advantage.params import check


@dataclass(frozen=True)
class ReturnBaselineParams:
    """The keys under ``turnkey.credit``. An unknown key, a wrong type or a value out of range stops the run."""

    gamma: float = 0.95

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, "gamma", "a number in [0, 1]", self.gamma)


@register_estimator("return_baseline", params=ReturnBaselineParams, summary="step return against the group's mean")
def return_baseline(batch: StepBatch, params: ReturnBaselineParams) -> Credit:
    """``A(i, t) = R(i, t) - mean of R over all steps of the group - penalty(i, t)``."""
    returns = discounted_returns(batch.reward, batch.runs, params.gamma)
    stats = group_stats(returns, batch.group, batch.n_groups)
    advantage = normalize(returns, batch.group, stats, "mean", epsilon=1e-6)
    return Credit.of_parts(
        {"step_level": advantage},
        batch.penalty,
        returns,
        levels={"return": returns},
        groups={"step_level": batch.group},
    )


if __name__ == "__main__":
    steps = StepBatch(group=["task"] * 3, trajectory=["good", "good", "bad"], step=[0, 1, 0], reward=[0.0, 1.0, 0.0])
    print(compute_credit("return_baseline", steps, gamma=0.5))
