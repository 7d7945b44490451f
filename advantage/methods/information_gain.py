"""IGPO: a turn earns what it adds to the probability of the gold answer, the last one the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats
from verl_turnkey.advantage.methods._episode_level import EPSILON
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.params import ConfigError, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator

VARIANCE_EPSILON = 1e-8  # inside the root, as in the released code


@dataclass(frozen=True)
class InformationGainParams(Ranged):
    """Parameters of ``information_gain``; the defaults: the paper's gain, and the pools of the released script."""

    gamma: Unit = 1.0  # discount of the normalized turn rewards
    gain: Literal["probability", "log_probability"] = "probability"
    """what the information gain is a difference of (the released script: log_probability)"""
    pool: Literal["separate", "joint"] = "separate"
    """gains and outcomes of a group normalized in a pool each, or in one (the default in the released code)"""


@register_estimator(
    "information_gain",
    params=InformationGainParams,
    needs=("extra.gold_probability",),
    before=("extra.gold_probability",),
    paper="IGPO, arXiv:2510.14967",
    summary="credits each turn with the rise of the gold answer's probability until the end, the last with the outcome",
)
def information_gain(batch: StepBatch, params: InformationGainParams) -> Credit:
    """Discounted sum of normalised information gains and of the normalised outcome.

    ::

        r(t) = v(t+1) - v(t)  for every turn but the last, whose r is the outcome R_i
        z(t) = (r(t) - mean_g) / (sqrt(var_g + 1e-8) + 1e-6)         population variance, over the pool of the group
        A(t) = z(t) + gamma A(t+1) - penalty(t)

    ``v(t)`` is ``extra["gold_probability"]``: the probability that the policy gives to the gold answer before turn t,
    the exponential of the mean log-probability of its tokens; its logarithm with ``gain="log_probability"``. A pool of
    one value, or of equal values, gives 0.

    Source: arXiv:2510.14967 for the gain; the newer of two released versions of the code for pools and normaliser:
    ``probability`` and ``joint`` are its defaults, its script sets the other two. ``separate`` is our default, as equal
    outcomes give 0 with it: in a joint pool they are compared with the gains. The code finds turns by rewards that are
    not 0, so that a gain of exactly 0 is left out; ours are the steps of the batch. The older version normalises per
    token position and is not offered. The penalty is our reading.
    """
    value = step_column(batch, "information_gain", "gold_probability", 0.0, 1.0)
    if params.gain == "log_probability":
        value = _logarithm(batch, value)
    last = ops.next_values(np.zeros(len(batch)), batch.runs, 1.0) > 0
    reward = np.where(last, batch.score, ops.next_values(value, batch.runs, 0.0) - value)
    pool = batch.group if params.pool == "joint" else 2 * batch.group + last
    counted = np.append(np.flatnonzero(~last), batch.runs.last)  # each outcome once
    stats = ops.group_stats(reward[counted], pool[counted], 2 * batch.n_groups, "population")
    spread = stats.std[pool]
    centred = ops.normalize(reward, pool, stats, "mean", EPSILON)
    z = np.where(spread > 0, centred / (np.sqrt(spread**2 + VARIANCE_EPSILON) + EPSILON), 0.0)
    gains = reward[~last]
    outcomes = ops.at_the_end(z[batch.runs.last][batch.trajectory], batch.runs, params.gamma)
    z = np.where(last, 0.0, z) + outcomes
    total = ops.discounted_returns(z, batch.runs, params.gamma)
    return Credit.of_parts(
        {
            "episode_level": ops.discounted_returns(outcomes, batch.runs, params.gamma),
            "step_level": ops.discounted_returns(z - outcomes, batch.runs, params.gamma),
        },
        batch.penalty,
        total=np.where(ops.equal(total, np.zeros_like(total)), 0.0, total),
        metrics={
            "credit/groups": float(batch.n_groups),
            "credit/information_gain/mean": float(gains.mean()) if len(gains) else 0.0,
        },
        levels={"turn_reward": reward},
        groups={"episode_level": batch.group, "step_level": batch.group},
    )


def _logarithm(batch: StepBatch, value: Floats) -> Floats:
    """``log(value)`` where a gain reads it: not of a trajectory's only turn."""
    zero = np.flatnonzero((ops.ordinals(batch.runs) + ops.distances(batch.runs) > 0) & (value == 0))
    if len(zero):
        row = int(zero[0])
        raise ConfigError(
            f'information_gain.gain="log_probability" needs extra.gold_probability above 0, got 0 in row {row}, '
            f"trajectory {batch.ids['trajectory'][batch.trajectory[row]]!r}, step {batch.step[row]}"
        )
    return np.log(np.where(value > 0, value, 1.0))
