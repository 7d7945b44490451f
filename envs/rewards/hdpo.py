"""HDPO's two rewards (Metis, arXiv:2604.08545 and its code): being right, and being right with few tool calls.

They are two channels, not two parts of a sum: the first is normalised over the whole group, the second among the right
rollouts only, and the two advantages are weighted (1 and 0.15). Added up before that, the group's normalisation would
drown the small differences in tool calls. Hence neither is a component; the count of tool calls travels with the steps
and the estimator does the rest.
"""

from __future__ import annotations


def accuracy_reward(answer: float, format: float, *, answer_w: float = 0.9, format_w: float = 0.1) -> float:
    """``answer_w * answer + format_w * format``, both scores in [0, 1]; the weights are the released code's."""
    return answer_w * answer + format_w * format


def tool_reward(calls: int, right: bool, *, without_tools: bool = True) -> float:
    """``1 / (calls + 1)`` for a right answer, else 0.

    ``without_tools``: whether a right answer without any tool call counts (1.0). A comment in the released code says it
    does not, its reward manager says it does; the default follows the reward manager.

    Raises:
        ValueError: a negative number of calls.
    """
    if calls < 0:
        raise ValueError(f"expected a number of tool calls >= 0, got {calls}")
    return 1.0 / (calls + 1) if right and (calls or without_tools) else 0.0
