"""OPID: each token's advantage plus a small multiple of what a teacher with an analysis of the episode adds to it."""

from __future__ import annotations

from dataclasses import dataclass

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Floats
from verl_turnkey.advantage.modifying import Tokens, register_token_modifier
from verl_turnkey.advantage.params import NotNegative, Ranged


@dataclass(frozen=True)
class OpidParams(Ranged):
    """Parameters of ``opid``; the default is the released scripts'."""

    weight: NotNegative = 0.001  # of the gap; the paper's w_e and w_s


@register_token_modifier(
    "opid",
    params=OpidParams,
    needs=("extra.teacher_gap",),
    paper="OPID, arXiv:2606.26790",
    summary="adds to each token a multiple of the gap between a teacher with an analysis of the episode and the policy",
)
def opid(advantage: Floats, tokens: Tokens, batch: StepBatch, params: OpidParams) -> Floats:
    """``A_t = A + weight D_t``, with the token's gap D; no clip, no normalisation.

    Source: the authors' code (jinyangwu/OPID at 37a15a5), read, not run. It has a text for the episode and further ones
    for single steps; a row with a step's text uses that alone (``step_priority``), which is one text per row as here.
    Its mode ``additive``, two texts at once, is not here. The code's weight is 1, its scripts' 0.001, the default here.
    """
    return advantage + params.weight * tokens.gap
