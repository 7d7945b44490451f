"""Terms that many methods share: the outcome in its group, or among the solved, and a term of the step with it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import EPSILON, Bools, Floats, GroupStats, Ints, Norm
from verl_turnkey.advantage.params import ConfigError

Scope = Literal["trajectories", "steps", "outcomes"]
Singleton = Literal["zero", "score"]


def penalties(batch: StepBatch, scope: Scope) -> tuple[Floats, Floats]:
    """Penalty of each step that is subtracted from its returns and score, and the one subtracted from its advantage.

    -> two arrays of (S,). The released codes subtract the penalty before the statistics, where it changes mean and std
    of the whole group: in a group of equal outcomes only the penalties differ, and nearly all valid steps can get more
    than a standard deviation. ``scope="outcomes"`` computes the statistics from rewards alone, at every level, and
    subtracts the penalty from the penalised step's advantage, in its unit.
    """
    nothing = np.zeros(len(batch))
    return (nothing, batch.penalty) if scope == "outcomes" else (batch.penalty, nothing)


def episode_level(
    batch: StepBatch,
    norm: Norm = "mean_std",
    scope: Scope = "outcomes",
    singleton: Singleton = "zero",
    epsilon: float = EPSILON,
) -> Floats:
    """``A_E(i) = (R_i - mean_g) / F_g`` for every step row -> (S,); ``F`` is the sample std plus epsilon, or 1.

    With ``scope="outcomes"`` a row's own value is its score, and each trajectory counts once; the caller subtracts the
    penalty (:func:`penalties`). With the others the value is ``score - penalty``. ``"trajectories"``: each trajectory
    counts once, by the value of its earliest step (verl-agent's ``compute_mean_std_cross_steps=False``), so a penalty
    on that step changes mean and std, and one on a later step only its own row. ``"steps"``: every row enters the
    statistics of its group, so a trajectory counts as often as it has steps (verl-agent's trainer).

    A group of one value gives 0, or the row's own value with ``singleton="score"``. A group whose counted values are
    all equal gives 0 (with ``norm="mean"`` minus the penalty, for a penalised row that is not counted).
    """
    outcome, stats = outcomes(batch, scope)
    advantage = ops.normalize(outcome, batch.group, stats, norm, epsilon)
    return of_singletons(outcome, batch, stats, singleton, advantage)


def outcomes(batch: StepBatch, scope: Scope) -> tuple[Floats, GroupStats]:
    """The value of every row (S,), and the statistics of its group over the values that ``scope`` counts."""
    outcome = batch.score - penalties(batch, scope)[0]
    counted = np.arange(len(batch)) if scope == "steps" else batch.first_rows
    return outcome, ops.group_stats(outcome[counted], batch.group[counted], batch.n_groups)


def refuse_outcomes(batch: StepBatch, outcome: Floats, bad: Bools, expected: str, mend: str) -> None:
    """Refuse the first of the rows (S,) whose outcome is ``bad``: what was ``expected``, what came, what to change.

    Raises:
        ConfigError: there is one; ``expected`` opens the message with the name of the method.
    """
    if bad.any():
        row = int(bad.argmax())
        trajectory = batch.ids["trajectory"][batch.trajectory[row]]
        raise ConfigError(f"{expected}, got {outcome[row]:g} for trajectory {trajectory!r}: {mend}")


def of_singletons(
    outcome: Floats, batch: StepBatch, stats: GroupStats, singleton: Singleton, advantage: Floats
) -> Floats:
    """``advantage`` (S,), but in groups of one counted value 0, or the row's ``outcome`` value."""
    return np.where(stats.size[batch.group] == 1, outcome if singleton == "score" else 0.0, advantage)


def outcome_credit(batch: StepBatch, episode: Floats, penalty: Floats, **metrics: float) -> Credit:
    """``episode - penalty`` (S,), of a method that compares nothing but outcomes; ``metrics`` without ``credit/``."""
    return Credit.of_parts(
        {"episode_level": episode},
        penalty,
        metrics={"credit/groups": float(batch.n_groups), **{f"credit/{key}": value for key, value in metrics.items()}},
        groups={"episode_level": batch.group},
    )


def leave_one_out(batch: StepBatch, scope: Scope = "outcomes", singleton: Singleton = "zero") -> Floats:
    """``A(i) = n/(n-1) (R_i - mean_g)`` -> (S,): the value against the mean of the other n - 1 counted ones.

    ``scope`` and ``singleton`` as in :func:`episode_level`; n counts what enters the statistics.
    """
    outcome, stats = outcomes(batch, scope)
    return of_singletons(outcome, batch, stats, singleton, ops.against_others(outcome, batch.group, stats))


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


def solved_trajectories(batch: StepBatch, above: float | None = None) -> Bools:
    """Whether each trajectory (n_trajectories,) has a step with ``success``.

    With ``above``, and by ``above=0`` where the batch has no column ``success``: whether its ``env_return`` is larger.
    """
    if above is not None or "success" not in batch.given:
        outcome, least = batch.env_return[batch.first_rows], above or 0.0
        return (outcome > least) & ~ops.equal(outcome, least)
    return np.bincount(batch.trajectory, weights=batch.success, minlength=batch.n_trajectories) > 0


def among_solved(batch: StepBatch, values: Floats, counted: Bools, epsilon: float) -> Floats:
    """``(value - mean) / (std + epsilon)`` over the ``counted`` trajectories of each group -> (n_trajectories,).

    0 for the others, and in a group that counts fewer than two, or whose values are equal.
    """
    rows = np.flatnonzero(counted)
    group = batch.group[batch.first_rows][rows]
    result = np.zeros(batch.n_trajectories)
    result[rows] = ops.compared(values[rows], group, batch.n_groups, "mean_std", epsilon)
    return result
