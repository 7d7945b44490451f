"""ProRAG: the outcome's advantage of a trajectory plus the normalised score of each of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import group_stats, normalize
from verl_turnkey.advantage.methods._episode_level import EPSILON, episode_level, token_counts, two_levels
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.params import NotNegative, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class DualGranularityParams(Ranged):
    """Parameters of ``dual_granularity``; the defaults are those of the released run."""

    beta: NotNegative = 0.3  # weight of the step level
    weight: Literal["tokens", "steps"] = "tokens"
    """how often a step counts in mean and std: once per token (paper), where long steps dominate, or once"""


@register_estimator(
    "dual_granularity",
    params=DualGranularityParams,
    needs=("extra.turn_score",),
    paper="ProRAG, arXiv:2601.21912",
    summary="GRPO on the outcome, plus each step's score normalized over all tokens of the group",
)
def dual_granularity(batch: StepBatch, params: DualGranularityParams) -> Credit:
    """Outcome advantage plus process advantage.

    ::

        A_out(i)    = (R_i - mean_g R) / (std_g R + 1e-6)
        A_step(i,k) = (q(i,k) - mean_g q) / (std_g q + 1e-6)       over all model tokens of the group, population std
        A(i,k)      = A_out(i) + beta A_step(i,k) - penalty(i,k)

    ``q`` is ``extra["turn_score"]``; all tokens of a turn have its score. With ``weight="steps"``, and in a batch
    without the column ``tokens``, each step counts once. A group of one trajectory has A_out = 0, one whose scores are
    all equal A_step = 0.

    Source: arXiv:2601.21912 and the released code ProRAG: beta 0.3 in its run script, 0.5 as its argument's default.
    Its score is a process reward model's plus 1 for a well-formed step and minus 2 for another; its outcome is 2 F1 (0
    below 0.2) plus or minus 1 for the format. ``weight="steps"`` and the penalty are ours.
    """
    outcome = episode_level(batch)
    score = step_column(batch, "dual_granularity", "turn_score")
    weights = token_counts(batch) if params.weight == "tokens" else None
    stats = group_stats(score, batch.group, batch.n_groups, "population", weights)
    step = normalize(score, batch.group, stats, "mean_std", EPSILON)
    return two_levels(batch, outcome, params.beta * step, batch.group)
