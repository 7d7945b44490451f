"""RLSD: tokens that a teacher with a skill in its prompt agrees with weigh more, the others less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Floats
from verl_turnkey.advantage.modifying import Tokens, register_token_modifier
from verl_turnkey.advantage.params import BelowOne, Range, Ranged, Unit

#: Gaps are clipped to it before the exponential, far outside of any clip range.
MAX_GAP = 20.0


@dataclass(frozen=True)
class RlsdParams(Ranged):
    """Parameters of ``rlsd``; the defaults are the released scripts'."""

    lam: Unit = 0.5  # share of the factor at the start of training
    clip: BelowOne = 0.2  # the factor is clipped to [1 - clip, 1 + clip]
    decay_steps: Annotated[int, Range(lambda x: x > 0, "positive")] | None = 100
    """training steps until the share is 0; 50 in the released code; null: no decay"""

    def share(self, step: int) -> float:
        """``lam`` at a training step, from 1."""
        return self.lam if self.decay_steps is None else self.lam * max(0.0, 1 - step / self.decay_steps)


@register_token_modifier(
    "rlsd",
    params=RlsdParams,
    needs=("extra.teacher_gap",),
    paper="RLSD (SDAR code base)",
    summary="scales the advantage of each token by how much more likely a teacher with a skill in its prompt finds it",
)
def rlsd(advantage: Floats, tokens: Tokens, batch: StepBatch, params: RlsdParams) -> Floats:
    """``A_t = A ((1 - lam) + lam w_t)`` with ``w_t = clip(exp(sign(A) D_t), 1 - clip, 1 + clip)``.

    D is the token's gap, ``lam`` falls linearly with the training step to 0 after ``decay_steps``. A gap of 0, as
    without a text, leaves A as it is.

    Source: the authors' code (ZJU-REAL/SDAR at 8b85c23, ``rlsd_utils.py``), whose numbers this has. Its code decays
    over 50 steps, all of its scripts over 100, the default here.
    """
    gap = np.clip(tokens.gap, -MAX_GAP, MAX_GAP)
    factor = np.clip(np.exp(np.sign(advantage) * gap), 1 - params.clip, 1 + params.clip)
    return advantage * (1 + params.share(tokens.training_step) * (factor - 1))
