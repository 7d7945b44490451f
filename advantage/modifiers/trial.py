"""TRIAL in our reading: turns on which a teacher that sees their consequence disagrees most count most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Floats, run_sums
from verl_turnkey.advantage.modifying import Tokens, register_token_modifier
from verl_turnkey.advantage.params import NotNegative, Ranged


@dataclass(frozen=True)
class TrialParams(Ranged):
    """Parameters of ``trial``; the paper's are not published."""

    coefficient: NotNegative = 0.1  # of the weighted gap, which is clamped to the size of the token's advantage before


@register_token_modifier(
    "trial",
    params=TrialParams,
    needs=("extra.teacher_gap",),
    paper="TRIAL, arXiv:2608.07371",
    summary="adds to each token its gap to a teacher that sees the turn's consequence, weighted by turns",
)
def trial(advantage: Floats, tokens: Tokens, batch: StepBatch, params: TrialParams) -> Floats:
    """``A_t = A + coefficient clamp(w_k D_t, -|A|, |A|)``, with weights of the turns k of a trajectory.

    ::

        s_k = mean |D_t| over the n_k tokens of turn k
        w_k = s_k sum n / sum n s          over the trajectory: the mean of w over its tokens is 1; 0 where all D are 0

    Source: the abstract of arXiv:2608.07371 and two summaries. The weights follow them; the loss and its clamp are
    published nowhere, so the addend and the clamp by the advantage are our reading.
    """
    steps = len(batch)
    number, size = tokens.sums(np.ones(len(tokens.gap)), steps), tokens.sums(np.abs(tokens.gap), steps)
    total, weighted = run_sums(number, batch.runs), run_sums(size, batch.runs)
    scale = np.divide(total, weighted, out=np.zeros_like(total), where=weighted > 0)
    weight = size / np.maximum(number, 1) * scale[batch.trajectory]
    bound = np.abs(advantage)
    return advantage + params.coefficient * np.clip(weight[tokens.step] * tokens.gap, -bound, bound)
