"""Decision density: at how many turns the choice of the action moves what the episode still earns.

Decision density of arXiv:2606.22164 is the share of turns whose action changes the distribution of the return. The
paper has it exactly, in one small MDP; from played episodes it can be estimated where a group took different actions in
the same state, which is the estimate of this package.
"""

from __future__ import annotations

import numpy as np

from verl_turnkey.advantage.group_ops import Floats, Ints, joint_codes
from verl_turnkey.plugins.credit.rows import Rows

ERRORS = 2.0
"""standard errors by which two means have to differ"""
LEAST = 2
"""episodes with the turn's action, and with another one, that the state must have been visited by"""


def decision_density(state: Ints, action: Ints, trajectory: Ints, ahead: Floats) -> tuple[float, float]:
    """``(density, covered)`` of N turns; the density is nan where no turn is covered.

    ::

        a turn is covered       where LEAST episodes took its action a in its state s, and LEAST another one
        a turn is a decision    where |mean G(s, a) - mean G(s, other)| > ERRORS sqrt(var(s, a)/n + var(s, other)/m)

    ``covered``: the share of turns that are; ``density``: the share of these that are decisions.

    Args:
        state, action, trajectory: (N,) equal for equal ones, the turns of each episode in order.
        ahead: (N,) what the episode earns from the turn on, G. Of an episode one turn in the state counts for the
            action, and one for all others, the first of each: later ones are not independent of it.
    """
    state = np.unique(state, return_inverse=True)[1]
    choice, n_choices = joint_codes(state, action)
    first = np.sort(np.unique(joint_codes(trajectory, choice)[0], return_index=True)[1])
    visit = joint_codes(trajectory[first], state[first])[0]  # an episode's turns in one state
    opening = np.unique(visit, return_index=True)[1]
    later = np.setdiff1d(np.arange(len(first)), opening)
    second = later[np.unique(visit[later], return_index=True)[1]]  # the first turn with another action than the first
    ahead = ahead - (np.bincount(state, ahead) / np.bincount(state))[state]  # variances by sums lose digits far from 0
    of_choice = np.zeros(n_choices, np.int64)
    of_choice[choice] = state
    chosen = choice[first]
    sums, others = [], []
    for power in (np.ones(len(first)), ahead[first], ahead[first] ** 2):
        sums.append(np.bincount(chosen, power))
        of_state = np.bincount(of_choice[chosen[opening]], power[opening])[of_choice]
        not_other = np.bincount(chosen[opening], power[opening], n_choices)
        instead = np.bincount(chosen[opening][visit[second]], power[second], n_choices)
        others.append(of_state - not_other + instead)
    (n, mean, error), (m, other, further) = (_moments(*totals) for totals in (sums, others))
    covered = (n >= LEAST) & (m >= LEAST)
    decides = covered & (np.abs(mean - other) > ERRORS * np.sqrt(error + further) + 1e-9)
    density = decides[choice].sum() / covered[choice].sum() if covered.any() else np.nan
    return float(density), float(covered[choice].mean())


def _moments(number: Floats, total: Floats, squares: Floats) -> tuple[Floats, Floats, Floats]:
    """Number, mean and squared standard error of the mean."""
    mean = total / np.maximum(number, 1)
    variance = np.maximum(squares - number * mean**2, 0.0) / np.maximum(number - 1, 1)
    return number, mean, variance / np.maximum(number, 1)


def decision_metrics(rows: Rows) -> dict[str, float]:
    """Of the played episodes, without branches; none where the rows do not say states and actions."""
    steps, first = rows.steps, np.flatnonzero(rows.branch == 0)
    if not {"anchor", "action"} <= {*steps.given} or not len(first):
        return {}
    at = first[np.lexsort((steps.step[first], steps.trajectory[first]))]
    trajectory = np.unique(steps.trajectory[at], return_inverse=True)[1]
    ahead = steps.replaced(reward=rows.reward_before_kl).returns(1.0)[at]
    state, _ = joint_codes(steps.group[at], steps.anchor[at])
    density, covered = decision_density(state, steps.action[at], trajectory, ahead)
    metrics = {"episode/decisions/covered": covered}
    return metrics if np.isnan(density) else metrics | {"episode/decisions/density": density}
