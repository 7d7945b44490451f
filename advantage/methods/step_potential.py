"""SPAE: the outcome's advantage fades once a step's potential is saturated, and rising potential adds to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Bools, Floats, Ints, Runs
from verl_turnkey.advantage.methods._episode_level import EPSILON, episode_level, token_counts
from verl_turnkey.advantage.methods._step_columns import value_after
from verl_turnkey.advantage.params import Finite, NotNegative, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class StepPotentialParams(Ranged):
    """Parameters of ``step_potential``; the defaults are the paper's, but for ``saturation``."""

    alpha: Unit = 0.5  # how far the outcome's advantage fades after saturated steps: to 1 - alpha
    xi: NotNegative = 0.5  # weight of the change of potential
    saturation: Finite = 0.9  # potential above which a step counts as saturated: not stated; the released probe's


@register_estimator(
    "step_potential",
    params=StepPotentialParams,
    needs=("extra.potential",),
    paper="SPAE, arXiv:2601.03823",
    summary="shapes the outcome's advantage by each step's potential: fades when it is saturated, gains when it rises",
)
def step_potential(batch: StepBatch, params: StepPotentialParams) -> Credit:
    """Step potential advantage.

    ::

        C(k)  = number of earlier steps of the trajectory with Phi > saturation
        f(k)  = 1 - alpha (1 - exp(-C(k)))                                  saturation factor
        d(k)  = Phi(k) - Phi(k-1), scaled to [0, 1] over the batch           Phi before the first step: 0
        g(k)  = exp(d(k)) - mean of exp(d) over the steps of the batch
        A     = f(k) (R_i - mean_g R) + xi g(k), then mean 0 and std 1 over all tokens of the batch; - penalty

    ``Phi(k)`` is ``extra["potential"]``, of the state after step k: the paper's :func:`potential` of a probe's answers,
    or any estimate of success. In a batch without the column ``tokens`` each step counts once.

    Source: arXiv:2601.03823; its training code is not released, its probe is. Our reading: turns as steps; 0 before the
    first step; scaling and mean over the steps of the batch; the default of ``saturation``; the sample std plus 1e-6;
    the penalty. Because the whole batch is centred, a group of equal outcomes is 0 before the last line only.
    """
    phi = value_after(batch, "step_potential", "potential")
    factor = saturation_factor(saturated_before(phi > params.saturation, batch.runs), params.alpha)
    everything = np.zeros(len(batch), np.int64)
    gain = np.exp(_unit_interval(phi - ops.previous_values(phi, batch.runs, 0)))
    gain = ops.compared(gain, everything, 1, "mean")
    outcome = episode_level(batch, "mean")
    shaped = factor * outcome + params.xi * gain
    stats = ops.group_stats(shaped, everything, 1, weights=token_counts(batch))
    advantage = ops.normalize(shaped, everything, stats, "mean_std", EPSILON)
    scale = stats.std[0] + EPSILON if stats.std[0] else np.inf
    parts = {"episode_level": factor * outcome / scale, "step_level": params.xi * gain / scale}
    return Credit.of_parts(
        {**parts, "whitening": advantage - sum(parts.values())},
        batch.penalty,
        total=advantage,
        levels={"potential": phi, "potential_gain": gain, "saturation_factor": factor},
        groups={"episode_level": batch.group, "step_level": everything},
    )


def potential(accuracy: Floats, confidence: Floats) -> Floats:
    """The paper's potential in [-1, 1] of a state: how right, and how sure, answers are that are asked for there."""
    return 1.5 * accuracy * confidence + 0.5 * accuracy - confidence


def saturated_before(saturated: Bools, runs: Runs) -> Ints:
    """Number of earlier saturated steps of the same trajectory, (S,)."""
    return ops.running_sums(saturated.astype(np.int64), runs) - saturated


def saturation_factor(count: Ints, alpha: float) -> Floats:
    """``1 - alpha (1 - exp(-count))``: 1 without an earlier saturated step, towards 1 - alpha with many."""
    return 1 - alpha * (1 - np.exp(-count.astype(np.float64)))


def _unit_interval(values: Floats) -> Floats:
    if not len(values) or ops.equal(values.min(), values.max()):
        return np.zeros(len(values))
    return (values - values.min()) / (values.max() - values.min())
