"""DynaMO's modulation: certain winners weigh more, and steps that would move the entropy most weigh less."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import ROUNDING, equal, run_sums
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import NotNegative, Range, Ranged, Unit


@dataclass(frozen=True)
class DynamoModulationParams(Ranged):
    """Parameters of ``dynamo_modulation``, the method and the modifier; the defaults are the authors' run script's."""

    a: NotNegative = 0.2  # how much more the most certain steps with positive credit weigh; 0.4 in another setting
    floor: Unit = 0.6  # the smallest weight of a step that would move the entropy
    steepness: Annotated[float, Range(lambda x: 0 <= x <= 500, "a number in [0, 500]")] = 50.0
    """of the fall from 1 to the floor"""
    threshold: Unit = 0.99  # share of the largest change of entropy at which it falls; 0.9 in another setting


@register_modifier(
    "dynamo_modulation",
    params=DynamoModulationParams,
    needs=("tokens", "extra.entropy", "extra.log_prob"),
    paper="DynaMO, arXiv:2602.19208",
    summary="certain steps with positive credit weigh more, and those that would move the entropy most weigh less",
)
def dynamo_modulation(batch: StepBatch, params: DynamoModulationParams, estimate: Estimate) -> Credit:
    """``A B_comp B_stab``, on steps in place of tokens (our reading).

    ::

        B_comp(t) = 1 + a (max H - H(t)) / (max H - min H)      where A > 0, else 1; H: extra.entropy
        dH(t)     = A (p (log p + H(t)) - its mean over the trajectory)
        x(t)      = |dH(t)| / max |dH|                          log p: extra.log_prob / tokens, p = exp(log p)
        B_stab(t) = floor + (1 - floor) / (1 + exp(steepness (x(t) - threshold)))

    Minimum and maxima are over all steps of the batch. A step without an entropy (nan) keeps its weight.

    Source: the authors' code, which does so for each token inside the loss, with the current policy's ratio and without
    clipped tokens; at the first update the ratio is 1 and none is clipped. The budget of rollouts per task, the other
    half of the paper, is a sampler and not part of this.
    """
    credit = estimate(batch)
    entropy = step_column(batch, "dynamo_modulation", "entropy", gaps=True)
    has_entropy = ~np.isnan(entropy)
    log_p = step_column(batch, "dynamo_modulation", "log_prob", high=ROUNDING) / np.maximum(batch.tokens, 1)
    log_p = np.minimum(log_p, 0.0)
    low, high = (entropy[has_entropy].min(), entropy[has_entropy].max()) if has_entropy.any() else (0.0, 0.0)
    certain = np.where(has_entropy & ~equal(low, high), high - entropy, 0.0) / max(high - low, np.finfo(float).tiny)
    gain = np.where(credit.advantage > 0, 1 + params.a * certain, 1.0)
    pull = np.where(has_entropy, np.exp(log_p) * (log_p + entropy), 0.0)
    steps = np.maximum(run_sums(has_entropy.astype(np.float64), batch.runs), 1.0)
    centre = (run_sums(pull, batch.runs) / steps)[batch.trajectory]
    change = np.abs(credit.advantage * np.where(has_entropy & ~equal(pull, centre), pull - centre, 0.0))
    largest = float(change.max(initial=0.0))
    x = change / largest if largest > 0 else change
    calm = params.floor + (1 - params.floor) / (1 + np.exp(params.steepness * (x - params.threshold)))
    return replace(credit, advantage=credit.advantage * gain * calm, levels={"gain": gain, "calm": calm})
