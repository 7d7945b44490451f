"""Turn returns normalised in the group (GTPO), or a turn reward beside the outcome in the first segment (MT-GRPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, compared, distances, group_stats, normalize, ordinals, run_sums
from verl_turnkey.advantage.methods._episode_level import two_levels
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.params import NotNegative, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator

MT_GRPO_EPSILON = 1e-4  # added to its standard deviations


@dataclass(frozen=True)
class TurnNormParams(Ranged):
    rule: Literal["gtpo", "mt_grpo"] = "gtpo"  # the paper whose rule is used
    gamma: Unit = 0.9  # of gtpo: discount of the turn returns
    over: Literal["group", "batch"] = "group"
    """of gtpo: what the returns are compared with, the turns of the group or of the whole batch"""
    turn_w: NotNegative = 1.0  # of mt_grpo: lambda, weight of the turn reward

    @property
    def also_needs(self) -> tuple[str, ...]:
        """The turn reward, for the rule that reads one."""
        return ("extra.turn_score",) if self.rule == "mt_grpo" else ()


@register_estimator(
    "turn_norm",
    params=TurnNormParams,
    paper="GTPO, arXiv:2511.14846; MT-GRPO, arXiv:2505.11821",
    summary="normalizes each turn's discounted return over the turns of its group; or MT-GRPO's two segments",
)
def turn_norm(batch: StepBatch, params: TurnNormParams) -> Credit:
    """Advantage of turns by one of two rules.

    ::

        gtpo:     G(i,t) = r(i,t) + gamma G(i,t+1)
                  A(i,t) = (G(i,t) - mean) / (std + 1e-6) - penalty(i,t)       over all turns of the group, or batch

        mt_grpo:  A(i,0) = z(O_i) + turn_w z(T_i)                              before the first result of a tool
                  A(i,t) = z(O_i)                                              after it
                  A(i,0) = z(T_i + O_i)                                        the only turn of its trajectory

    z is ``(x - mean_g) / (std_g + 1e-4)`` over the trajectories of the group, O the score, T the sum of
    ``extra["turn_score"]`` over the trajectory. Sample stds; a group of one, or of equal values, gives 0.

    Source: GTPO (group turn policy optimization, arXiv:2511.14846) from two third-party implementations, both with
    ``over="batch"``; that is ``rebn`` with another epsilon. Statistics over the group, as its name says, are our
    reading; its shaping of the rewards is not part of this. MT-GRPO (arXiv:2505.11821) from the released code, whose
    episodes have one call of a tool: in longer ones, too, only the first result divides. A turn followed by another as
    one that had a result, and the penalty, are our reading.
    """
    return _gtpo(batch, params) if params.rule == "gtpo" else _mt_grpo(batch, params)


def _gtpo(batch: StepBatch, params: TurnNormParams) -> Credit:
    returns = batch.returns(params.gamma)
    codes, n = (batch.group, batch.n_groups) if params.over == "group" else (np.zeros(len(batch), np.int64), 1)
    return Credit.of_parts(
        {"step_level": compared(returns, codes, n)},
        batch.penalty,
        returns - batch.penalty,
        metrics={"credit/groups": float(batch.n_groups)},
        levels={"return": returns},
        groups={"step_level": codes},
    )


def _mt_grpo(batch: StepBatch, params: TurnNormParams) -> Credit:
    turn = run_sums(step_column(batch, "turn_norm", "turn_score"), batch.runs)[batch.trajectory]

    def z(values: Floats) -> Floats:
        first = batch.first_rows
        stats = group_stats(values[first], batch.group[first], batch.n_groups)
        return normalize(values, batch.group, stats, "mean_std", MT_GRPO_EPSILON)

    first = ordinals(batch.runs) == 0
    only = first & (distances(batch.runs) == 0)
    outcome = np.where(only, z(turn + batch.score), z(batch.score))
    divided = first & ~only
    step = np.where(divided, params.turn_w * z(turn), 0.0)
    return two_levels(batch, outcome, step, np.where(divided, batch.group, -1))
