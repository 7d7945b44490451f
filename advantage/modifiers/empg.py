"""EMPG: certain steps weigh more than uncertain ones, and a step that leads to a certain one gets a bonus."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import equal, mean, next_values
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import NotNegative, Ranged

_EPSILON = 1e-8


@dataclass(frozen=True)
class EmpgParams(Ranged):
    k: NotNegative = 1.0  # how fast a step's weight falls with its entropy
    k_next: NotNegative = 1.0  # how fast the bonus falls with the entropy of the next step
    zeta: NotNegative = 0.1  # size of the bonus


@register_modifier(
    "empg",
    params=EmpgParams,
    needs=("extra.entropy",),
    paper="EMPG, arXiv:2509.09265",
    summary="weighs each step by how certain the policy was, adds a bonus for reaching certain steps, and centres",
)
def empg(batch: StepBatch, params: EmpgParams, estimate: Estimate) -> Credit:
    """Entropy-modulated credit; minimum, maximum and means are over all steps of the batch.

    ::

        h(t)  = (H(t) - min H) / (max H - min H + 1e-8)              H: extra.entropy, mean over the step's tokens
        g(t)  = exp(-k h(t)) / (mean exp(-k h) + 1e-8)
        A'(t) = A(t) g(t) + zeta exp(-k_next h(t+1))                 no bonus on the last step of a trajectory
        A(t)  = A'(t) - mean A'

    A step without an entropy (nan) has g = 1, and the step before it no bonus (our reading). With ``zeta > 0`` a
    constant group is not 0: its steps share in the bonus and in the mean.

    Source: arXiv:2509.09265, the authors' page and two ports, one of which has ``zeta=0.05``.
    """
    credit = estimate(batch)
    entropy = step_column(batch, "empg", "entropy", gaps=True)
    has_entropy = ~np.isnan(entropy)
    low, high = (entropy[has_entropy].min(), entropy[has_entropy].max()) if has_entropy.any() else (0.0, 0.0)
    spread = 0.0 if equal(high, low) else high - low
    h = np.where(has_entropy & (spread > 0), entropy - low, 0.0) / (spread + _EPSILON)
    certain = np.exp(-params.k * h)
    gain = np.where(has_entropy, certain / (mean(certain[has_entropy]) + _EPSILON), 1.0)
    clear = np.where(has_entropy, np.exp(-params.k_next * h), 0.0)
    bonus = params.zeta * next_values(clear, batch.runs, 0.0)
    advantage = credit.advantage * gain + bonus
    metrics = {"gain/max": float(gain.max(initial=1.0))}
    levels = {"gain": gain, "bonus": bonus}
    return replace(credit, advantage=advantage - mean(advantage), metrics=metrics, levels=levels)
