"""ReBN: REINFORCE with the discounted returns normalized to mean 0 and std 1 over all turns of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Std, group_stats, normalize
from verl_turnkey.advantage.params import Positive, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class RebnParams(Ranged):
    """Parameters of ``rebn``; the defaults are the paper's for games, but for ``std``, which it does not name."""

    gamma: Unit = 0.9  # discount of the step returns; the paper takes 1.0 where there is one reward at the end
    std: Std = "sample"  # std over the batch: the released code has both
    epsilon: Positive = 1e-9  # added to the std


@register_estimator(
    "rebn",
    params=RebnParams,
    paper="GEM, arXiv:2510.01051",
    summary="normalizes each step's discounted return over all steps of the batch; no groups, no critic",
)
def rebn(batch: StepBatch, params: RebnParams) -> Credit:
    """Return batch normalization.

    ::

        G(t) = r(t) + gamma G(t+1)                      return of the step
        A(t) = (G(t) - mean G) / (std G + epsilon) - penalty(t)      over all steps of all episodes of the batch

    A penalty changes no other step's advantage. A batch of one step, or one whose returns are all equal, gives minus
    the penalties. ``Credit.returns`` is G minus the penalty.

    Source: GEM, arXiv:2510.01051, Eq 1 to 4; the released code has the sample std (``train_tinker``) and the population
    std (``train_oat``), the paper does not say. One of its examples normalizes the padded (rows x tokens) tensor, so
    that padding enters the statistics: not offered. The sample std as the default, and the penalty, are our reading.
    """
    returns = batch.returns(params.gamma)
    everything = np.zeros(len(batch), dtype=np.int64)
    stats = group_stats(returns, everything, 1, params.std)
    advantage = normalize(returns, everything, stats, "mean_std", params.epsilon)
    metrics = {"credit/return/mean": float(stats.mean[0]), "credit/return/std": float(stats.std[0])}
    return Credit.of_parts(
        {"step_level": advantage},
        batch.penalty,
        returns - batch.penalty,
        metrics=metrics,
        levels={"return": returns},
        groups={"step_level": everything},
    )
