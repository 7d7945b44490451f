"""PAV: the policy's own advantage of a step plus the progress it makes for a prover; VinePPO without the latter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Runs, next_values
from verl_turnkey.advantage.methods._gae import Whiten, moments
from verl_turnkey.advantage.methods._step_columns import refuse_trees, step_column
from verl_turnkey.advantage.params import AtLeastOne, NotNegative, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class ProgressParams(Ranged):
    alpha: NotNegative = 3.0  # weight of the prover's progress: 5 and 3 in the paper for 2B and 9B models; 0: VinePPO
    prover: Literal["given", "best_of_k"] = "given"
    """whose values tell progress: those of extra.prover_value (or turn_value itself), or best of k of turn_value"""
    k: AtLeastOne = 4  # tries of the best-of-k prover
    segments: bool | Literal["auto"] = "auto"
    """every step from one measured state to the next gets what all of them add (SPO's chain); extra.value_rollouts says
    which states were measured; auto: where the rollout gives that column"""
    whiten: Whiten = "none"  # normalize advantages over the turns of the batch, as VinePPO and SPO do, or not

    @property
    def also_needs(self) -> tuple[str, ...]:
        return ("extra.value_rollouts",) if self.segments is True else ()


@register_estimator(
    "progress",
    params=ProgressParams,
    needs=("extra.turn_value",),
    before=("extra.turn_value", "extra.prover_value", "extra.value_rollouts"),
    paper="PAV, arXiv:2410.08146; VinePPO, arXiv:2410.01679; SPO, arXiv:2505.23564",
    summary="what a step adds to estimates of success: the policy's own, and those of a prover; no groups, no critic",
)
def progress(batch: StepBatch, params: ProgressParams) -> Credit:
    """Advantage under the policy plus advantage under a prover, from estimates of success before each step.

    ::

        A_pi(t) = r(t) + V(t+1) - V(t)                        V: extra.turn_value; after the end 0
        A_mu(t) = r(t) + Q(t+1) - Q(t)                        Q: the prover's value; after the end 0
        A(t)    = white(A_pi(t) + alpha A_mu(t)) - penalty(t)       white: whiten, by default nothing

    ``V(t)`` estimates, in the unit of the rewards, what is still to come before step t: the mean return of fresh
    rollouts from there, or a model. ``prover="best_of_k"``: Q = 1 - (1 - V)^k, so V must be a probability.
    ``prover="given"``: Q is ``extra["prover_value"]`` where the batch has it, else V. ``alpha=0`` is VinePPO's
    advantage. The estimates are the baseline: a group of equal outcomes is not 0 where they were wrong.
    ``whiten="turns"``: mean 0 and sample deviation 1 over the turns of the batch. ``Credit.returns`` is None.

    ``segments``: A_pi(t) and A_mu(t) are their sums over the steps of t's segment. One begins with each episode, and
    with each step before which the value was measured (``extra.value_rollouts`` above 0). With ``auto`` this holds
    wherever a strategy measures values: it changes nothing where every state was measured, and where states were left
    out (``vine`` with ``every``, a budget, failed branches; ``spo_chain``) the values between are not estimates, and
    steps before them would get exactly 0.

    Source: PAV (arXiv:2410.08146), whose step reward is Q_pi + alpha A_mu with A_mu(t) the change of the prover's
    probability of success and the outcome as its last value: the same here with an outcome reward of 0 or 1. It
    subtracts a learned value as baseline; V in its place, as VinePPO (arXiv:2410.01679) has it, and rewards before the
    end are our reading. ``segments``: SPO's chain (arXiv:2505.23564), whose segments are of tokens and not of turns.
    VinePPO and SPO whiten over tokens, ``whiten`` over turns.
    """
    bounds = (0.0, 1.0) if params.prover == "best_of_k" else ()
    value = step_column(batch, "progress", "turn_value", *bounds)
    by_column = params.prover == "given" and "extra.prover_value" in batch.given
    prover = step_column(batch, "progress", "prover_value") if by_column else value
    if params.prover == "best_of_k":
        prover = best_of_k(value, params.k)
    reward = batch.rewards(1.0)
    rise = reward + next_values(value, batch.runs, 0.0) - value
    prover_rise = reward + next_values(prover, batch.runs, 0.0) - prover
    if params.segments is True or (params.segments == "auto" and "extra.value_rollouts" in batch.given):
        refuse_trees(batch, "progress.segments")
        measured = step_column(batch, "progress", "value_rollouts", 0.0) > 0
        rise, prover_rise = (over_segments(change, measured, batch.runs) for change in (rise, prover_rise))
    mean, std = moments(rise + params.alpha * prover_rise, batch, params.whiten)
    return Credit.of_parts(
        {"episode_level": (rise - mean) / std, "step_level": params.alpha * prover_rise / std},
        batch.penalty,
        metrics={"credit/groups": float(batch.n_groups)},
        levels={"turn_value": value, "prover_value": prover},
    )


def over_segments(values: Floats, begins: NDArray[np.bool_], runs: Runs) -> Floats:
    """Sum of ``values`` (S,) over the segment of each step -> (S,); one begins with each run and where ``begins``."""
    first = begins[runs.order]
    first[runs.starts] = True
    starts = np.flatnonzero(first)
    sums = np.add.reduceat(values[runs.order], starts)
    result = np.empty_like(values)
    result[runs.order] = sums[np.cumsum(first) - 1]
    return result


def best_of_k(probability: Floats, k: int) -> Floats:
    """Probability that at least one of ``k`` tries succeeds."""
    return 1 - (1 - probability) ** k
