"""HDPO's condition on any method: credit for few tool calls, among the solved rollouts of a group alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import mean
from verl_turnkey.advantage.methods._episode_level import among_solved, solved_trajectories
from verl_turnkey.advantage.methods._step_columns import tool_calls
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import NotNegative, Ranged


@dataclass(frozen=True)
class ToolGateParams(Ranged):
    weight: NotNegative = 0.15  # of the tool term; the paper's tool_w
    average: Literal["rated", "all"] = "rated"
    """what the tool term is a mean over: the rollouts that have one, as in the paper, or all"""


@register_modifier(
    "tool_gate",
    params=ToolGateParams,
    needs=("success", "tokens", "extra.tool_calls"),
    paper="HDPO (Metis), arXiv:2604.08545",
    summary="adds credit for few tool calls among the solved rollouts of a group",
)
def tool_gate(batch: StepBatch, params: ToolGateParams, estimate: Estimate) -> Credit:
    """``A + weight c A_tool``, with hdpo's tool advantage.

    ::

        A_tool(i) = (e_i - mean e) / (std e + 1e-6),  e = 1 / (T + 1)     over the solved trajectories of the group
        c         = tokens of the batch / tokens of trajectories with A_tool other than 0        average="rated"; else 1

    A_tool is 0 for an unsolved trajectory and with fewer than two solved ones.

    Source: arXiv:2604.08545 and its code, where A_tool has a loss of its own (``+turnkey=hdpo +turnkey/loss=hdpo``)
    that is averaged over the trajectories which have one. With ``loss_agg_mode=token-mean`` one advantage with the
    factor c has the same gradient while no token is clipped.
    """
    credit = estimate(batch)
    calls = tool_calls(batch, "tool_gate")
    tool = among_solved(batch, 1.0 / (calls + 1.0), solved_trajectories(batch), 1e-6)[batch.trajectory]
    rated = int(batch.tokens[tool != 0].sum())
    factor = int(batch.tokens.sum()) / rated if params.average == "rated" and rated else 1.0
    metrics = {"share_rated": mean(tool != 0), "factor": float(factor)}
    return replace(credit, advantage=credit.advantage + params.weight * factor * tool, metrics=metrics)
