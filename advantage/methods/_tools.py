"""The number of tool calls of trajectories."""

from __future__ import annotations

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Floats, run_sums
from verl_turnkey.advantage.methods._step_columns import step_column


def tool_calls(batch: StepBatch, method: str) -> Floats:
    """The sum of ``extra.tool_calls`` over each trajectory -> (n_trajectories,)."""
    return run_sums(step_column(batch, method, "tool_calls", 0.0), batch.runs)
