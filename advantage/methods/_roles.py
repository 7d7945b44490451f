"""Who took which step: roles of a batch, and the part of a trajectory that one role played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, Runs, group_stats, joint_codes, run_sums, sort_runs
from verl_turnkey.advantage.methods._step_columns import key_column, refuse_trees
from verl_turnkey.advantage.params import ConfigError


@dataclass(frozen=True)
class Roles:
    """Roles of a batch, P of them, and their episodes, E: the steps of one trajectory that one role took.

    ``role`` (S,): code of each step's role; ``ids`` (P,): the roles as text, by which metrics and states name them.
    ``runs``: the steps of each episode in order; ``episode`` (S,): the episode of each step; ``first`` (E,): its
    earliest step.
    """

    role: Ints
    ids: list[str]
    runs: Runs
    episode: Ints
    first: Ints


def read_roles(batch: StepBatch) -> Roles:
    """Roles from ``extra.role``: texts or numbers; all None are one role.

    Raises:
        ConfigError: two roles have the same text, as 1 and "1" have.
    """
    refuse_trees(batch, "extra.role")
    role, ids = key_column(batch, "role")
    if len(role) and role.max() >= len(ids):
        role, ids = np.minimum(role, len(ids)), [*ids, None]
    episode, _ = joint_codes(batch.trajectory, role)
    runs = sort_runs(episode, batch.step)
    return Roles(role, _texts(ids), runs, episode, runs.order[runs.starts])


def _texts(ids: list[Any]) -> list[str]:
    """The roles as text, a whole number without a point, whatever the type of the column it stands in."""
    roles: dict[str, Any] = {}
    for role in ids:
        whole = isinstance(role, bool) or (isinstance(role, float) and role.is_integer())
        text = str(int(role) if whole else role)
        if text in roles:
            raise ConfigError(
                f"extra.role: expected roles with different texts, got {roles[text]!r} and {role!r}: name one otherwise"
            )
        roles[text] = role
    return list(roles)


def episode_outcomes(batch: StepBatch, roles: Roles) -> Floats:
    """Outcome of each role's episode (E,): the score of its earliest step when given, else the sum of its rewards."""
    return batch.score[roles.first] if "score" in batch.given else run_sums(batch.reward, roles.runs)


def role_metrics(name: str, values: Floats, codes: Ints, roles: Roles) -> dict[str, float]:
    """Number of roles, and the mean of ``values`` per role, as metrics."""
    means = group_stats(values, codes, len(roles.ids)).mean
    return {
        "credit/roles": float(len(roles.ids)),
        **{f"credit/{name}/{role}": float(mean) for role, mean in zip(roles.ids, means, strict=True)},
    }
