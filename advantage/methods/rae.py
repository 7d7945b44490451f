"""RAE: each role's outcome against a moving average of its own earlier ones; no groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, discounted_returns, equal, group_stats, sort_runs
from verl_turnkey.advantage.methods._step_columns import Roles, episode_outcomes, read_roles, role_metrics
from verl_turnkey.advantage.params import ConfigError, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class RaeParams(Ranged):
    """Parameters of ``rae``; the defaults are the paper's."""

    decay: Unit = 0.95  # of a role's moving average, for each of its episodes
    gamma: Unit = 1.0  # the advantage falls by it for each step to the end of the role's episode


@register_estimator(
    "rae",
    params=RaeParams,
    needs=("extra.role",),
    before=("extra.role", "extra.order"),
    stateful=True,
    paper="SPIRAL, arXiv:2506.24119",
    summary="compares each role's outcome with a moving average of that role's earlier ones; no groups, self-play",
)
def rae(batch: StepBatch, params: RaeParams, state: Mapping[str, float]) -> Credit:
    """Role-conditioned advantage estimation.

    ::

        A(e)   = R(e) - b_p                    for the episodes e of role p, one after the other
        b_p    = decay b_p + (1 - decay) R(e)  after each
        A(e,t) = gamma^(steps to the end) A(e) - penalty(t)

    ``b_p`` begins at 0 and goes on from batch to batch: ``state`` holds it by the role's text, ``Credit.state`` what
    the next batch begins with. An episode is what one role did in a trajectory; R is its score when given, else the sum
    of the role's own rewards. Needs ``extra.role``; steps without a role share one. Constant outcomes do not give 0 but
    decay to it, with the distance of ``b_p`` from them.

    With ``extra.order``, a number per step that says which episode came first (equal on the steps of an episode), the
    recursion is taken in that order. Without it no order is preferred: each episode gets the expectation over all
    orders of the batch, in closed form, and so does ``b_p``. With n episodes of the role::

        A(e) = R(e) - (c b_p + (1 - c) mean of the other R)        c = (1 - decay^n) / (n (1 - decay))
        b_p  = decay^n b_p + (1 - decay^n) mean of R

    Source: SPIRAL, arXiv:2506.24119, authors' code and prime-rl: the baseline is updated after use, in the order of
    trajectories; the former keys it by player, the latter by environment and agent (write both into the role for that).
    The expectation over orders is our reading: the rows of a batch have no order.
    """
    roles = read_roles(batch)
    outcome = episode_outcomes(batch, roles)
    role = roles.role[roles.first]
    before = np.array([state.get(key, 0.0) for key in roles.ids])
    ordered = _in_order if "extra.order" in batch.given else _over_all_orders
    baseline, after = ordered(outcome, before, role, roles, params.decay, batch)
    advantage = np.where(equal(outcome, baseline), 0.0, outcome - baseline)
    left = discounted_returns(np.ones(len(batch)), roles.runs, 1.0) - 1.0  # steps to the end
    credit = params.gamma**left * advantage[roles.episode]
    now = {**state, **{key: float(value) for key, value in zip(roles.ids, after, strict=True)}}
    return Credit.of_parts(
        {"role_level": credit},
        batch.penalty,
        metrics=role_metrics("baseline", after[role], role, roles),
        state=now,
        levels={"role_advantage": advantage[roles.episode], "role_baseline": baseline[roles.episode]},
        groups={"role_level": roles.role},
    )


def _over_all_orders(
    outcome: Floats, before: Floats, role: np.ndarray, roles: Roles, decay: float, batch: StepBatch
) -> tuple[Floats, Floats]:
    """Expected baseline of each episode (E,), and expected average of each role afterwards (P,)."""
    stats = group_stats(outcome, role, len(before))
    n = np.maximum(stats.size, 1)
    kept = decay**n
    weight = np.ones(len(before)) if decay == 1 else (1 - kept) / (n * (1 - decay))
    others = (stats.mean * n)[role] - outcome
    others = np.where(equal(stats.mean[role], outcome), stats.mean[role], others / np.maximum(n[role] - 1, 1))
    baseline = weight[role] * before[role] + (1 - weight[role]) * others
    return np.where(n[role] == 1, before[role], baseline), kept * before + (1 - kept) * stats.mean


def _in_order(
    outcome: Floats, before: Floats, role: np.ndarray, roles: Roles, decay: float, batch: StepBatch
) -> tuple[Floats, Floats]:
    """Baseline of each episode when it was used (E,), and average of each role at the end (P,)."""
    order = np.asarray(batch.extra["order"][roles.first])
    if order.dtype == object or not np.isfinite(order).all():
        raise ConfigError("rae: extra.order must be finite numbers, one per episode of a role")
    rank = np.unique(order, return_inverse=True)[1].reshape(-1)
    if len(np.unique(np.stack([role, rank]), axis=1).T) < len(rank):
        raise ConfigError("rae: extra.order: two episodes of one role have the same number: expected different ones")
    latest_first = sort_runs(role, rank.max(initial=0) - rank)
    used = discounted_returns(np.ones(len(rank)), latest_first, 1.0)  # episodes of the role up to this one
    average = discounted_returns((1 - decay) * outcome, latest_first, decay) + decay**used * before[role]
    earlier = np.full(len(rank), -1)
    earlier[latest_first.order[:-1]] = latest_first.order[1:]
    first = latest_first.last
    baseline = average[earlier]
    baseline[first] = before[role[first]]
    return baseline, average[latest_first.order[latest_first.starts]]
