"""An estimator of your own, in one file: the discounted return of a step against the mean of its group.

Try it here with ``python examples/custom_estimator.py``. To train with it, let verl import the file (the module must be
importable on every node) and name it in the launch command::

    export VERL_USE_EXTERNAL_MODULES=custom_estimator
    python -m verl.trainer.main_ppo ... algorithm.adv_estimator=return_baseline trainer.v1.trainer_mode=turnkey_sync \
        +turnkey.credit.gamma=0.9
"""

from dataclasses import dataclass

from verl_turnkey.advantage import Credit, StepBatch, compute_credit, register_estimator
from verl_turnkey.advantage.params import check
from verl_turnkey.advantage.segments import discounted_returns, group_stats, normalise


@dataclass(frozen=True)
class ReturnBaselineParams:
    """The keys under ``turnkey.credit``: unknown ones, wrong types and values out of range stop the run at its start."""

    gamma: float = 0.95

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, "gamma", "a number in [0, 1]", self.gamma)


@register_estimator("return_baseline", params=ReturnBaselineParams, summary="step return against the group's mean")
def return_baseline(batch: StepBatch, params: ReturnBaselineParams) -> Credit:
    """``A(i, t) = R(i, t) - mean of R over all steps of the group``."""
    returns = discounted_returns(batch.reward, batch.runs, params.gamma)
    stats = group_stats(returns, batch.group, batch.n_groups)
    advantage = normalise(returns, batch.group, stats, "mean", epsilon=1e-6)
    return Credit(advantage, returns, metrics={"credit/return/mean": float(returns.mean()) if len(batch) else 0.0})


if __name__ == "__main__":
    steps = StepBatch(group=["task"] * 3, trajectory=["good", "good", "bad"], step=[0, 1, 0], reward=[0.0, 1.0, 0.0])
    print(compute_credit("return_baseline", steps, gamma=0.5))
