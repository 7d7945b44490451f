"""MatchTIR's dual-level advantage: the trajectory against its group, and each turn against the turns of its ordinal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import compared, joint_codes, ordinals
from verl_turnkey.advantage.methods._episode_level import Singleton, episode_level, two_levels
from verl_turnkey.advantage.params import NotNegative, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class DualLevelParams(Ranged):
    """Parameters of ``dual_level``; the defaults are the paper's."""

    gamma: Unit = 0.9  # discount of the turn returns
    trajectory_w: NotNegative = 1.0  # weight of the trajectory level; the released code averages: 0.5
    turn_w: NotNegative = 1.0  # weight of the turn level; the released code averages: 0.5
    singleton: Singleton = "zero"
    """advantage of a group of one trajectory, and of a turn that no other member has: 0, or its raw score and return
    (released code)"""


@register_estimator(
    "dual_level",
    params=DualLevelParams,
    paper="MatchTIR, arXiv:2601.10712",
    summary="compares each trajectory with its group, and the return of its k-th turn with the group's k-th turns",
)
def dual_level(batch: StepBatch, params: DualLevelParams) -> Credit:
    """Dual-level advantage of every turn.

    ::

        R(i,k)   = r(i,k) + gamma R(i,k+1)                            return of the turn
        A_g(i)   = (R_i - mean_g) / (std_g + 1e-6)                    R_i: score, the sum of the turns' rewards
        A_l(i,k) = (R(i,k) - mean) / (std + 1e-6)                     over the members of the group with a k-th turn
        A(i,k)   = trajectory_w A_g(i) + turn_w A_l(i,k) - penalty(i,k)

    ``k`` counts the turns that a trajectory has, whatever their step numbers. Needs nothing but rewards; the paper's
    are those of the reward component ``matchtir``. ``Credit.returns`` is R(i,k) minus the penalty.

    Source: arXiv:2601.10712 (the sum, from its figure) and the released code MatchTIR, which averages the two
    (``trajectory_w=turn_w=0.5``) and gives a turn without counterpart its raw return (``singleton="score"``). That it
    gets 0, and the penalty, are our reading.
    """
    returns = batch.returns(params.gamma)
    trajectory = episode_level(batch, singleton=params.singleton)
    ordinal, n = joint_codes(batch.group, ordinals(batch.runs))
    turn = compared(returns, ordinal, n)
    if params.singleton == "score":
        turn = np.where(np.bincount(ordinal, minlength=n)[ordinal] == 1, returns, turn)
    return two_levels(batch, params.trajectory_w * trajectory, params.turn_w * turn, ordinal, returns)
