"""HDPO: a second advantage for tool efficiency, only among the trajectories that solved their task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.methods._episode_level import among_solved, episode_level, solved_trajectories
from verl_turnkey.advantage.methods._step_columns import tool_calls
from verl_turnkey.advantage.params import Positive, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class HdpoParams(Ranged):
    epsilon: Positive = 1e-6  # added to the stds


@register_estimator(
    "hdpo",
    params=HdpoParams,
    needs=("success", "extra.tool_calls"),
    gives=("tool_advantages",),
    paper="HDPO (Metis), arXiv:2604.08545",
    summary="GRPO on the outcome, plus a second advantage for few tool calls among the solved rollouts",
)
def hdpo(batch: StepBatch, params: HdpoParams) -> Credit:
    """Two advantages, the same on every step of a trajectory.

    ::

        A(i)      = (R_i - mean_g R) / (std_g R + epsilon) - penalty     as grpo_steps
        A_tool(i) = (e_i - mean e) / (std e + epsilon),  e = 1 / (T + 1)   over the solved trajectories of the group

    T is the number of tool calls of the trajectory, the sum of the column ``extra.tool_calls``. ``A_tool`` is 0 in a
    group with fewer than two solved trajectories, and for an unsolved trajectory. It is returned as
    ``Credit.extra["tool_advantages"]``, which the loss of the same name reads.

    Source: arXiv:2604.08545 and its released code. A comment there requires that tools were used; the code, and this,
    also include T = 0. The outcome R is the environment's score; the paper's mixes answer and format 0.9 to 0.1.
    """
    episode = episode_level(batch, epsilon=params.epsilon)
    calls = tool_calls(batch, "hdpo")
    solved = solved_trajectories(batch)
    tool = among_solved(batch, 1.0 / (calls + 1.0), solved, params.epsilon)[batch.trajectory]
    return Credit.of_parts(
        {"episode_level": episode},
        batch.penalty,
        metrics={"credit/tool_calls/mean": float(calls.mean()) if len(calls) else 0.0},
        extra={"tool_advantages": tool},
        levels={"tool": tool},
        groups={"episode_level": batch.group, "tool": np.where(solved[batch.trajectory], batch.group, -1)},
    )
