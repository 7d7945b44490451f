"""What methods with process rewards share: a term of the outcome plus a weighted term of the step."""

from __future__ import annotations

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, Std, group_stats, normalize

EPSILON = 1e-6  # added to standard deviations


def z_scores(values: Floats, codes: Ints, n: int, std: Std = "sample", epsilon: float = EPSILON) -> Floats:
    """``(x - mean) / (std + epsilon)`` of ``values`` (S,) in their groups ``codes``; 0 alone or without spread."""
    return normalize(values, codes, group_stats(values, codes, n, std), "mean_std", epsilon)


def token_counts(batch: StepBatch) -> Ints | None:
    """How often a step counts in statistics over tokens (S,): ``tokens``; None, once, in a batch without them."""
    return batch.tokens if "tokens" in batch.given else None


def two_levels(
    batch: StepBatch, episode: Floats, step: Floats, compared: Ints, returns: Floats | None = None
) -> Credit:
    """``episode + step - penalty``, the terms with their weights (S,); ``compared``: the groups of the second."""
    return Credit.of_parts(
        {"episode_level": episode, "step_level": step},
        batch.penalty,
        None if returns is None else returns - batch.penalty,
        metrics={"credit/groups": float(batch.n_groups)},
        groups={"episode_level": batch.group, "step_level": compared},
    )
