import math

from naive.common import mean, std, trajectories


def agent_opsd(rows, base, lam=0.5, bound=0.2, granularity="turn", prior="success_rate"):
    """The credit of each step; with ``granularity="token"`` that of each of its tokens."""
    result = [None] * len(rows)
    for members in trajectories(rows):
        belief = _prior(rows, rows[members[0]]["group"], prior)
        if granularity == "turn":
            changes = _changes([sum(rows[i]["gaps"]) for i in members], belief)
            spread = std(changes, "population") + 1e-6
            for i, change in zip(members, changes, strict=True):
                result[i] = _scaled(base[i], (change - mean(changes)) / spread, lam, bound)
            continue
        for i in members:
            changes = _changes(rows[i]["gaps"], belief)
            spread = math.sqrt(std(changes, "population") ** 2 + 1e-6) + 1e-6 if changes else 1.0
            result[i] = [_scaled(base[i], (change - mean(changes)) / spread, lam, bound) for change in changes]
    return result


def _prior(rows, group, prior):
    outcomes = []
    for members in trajectories(rows):
        if rows[members[0]]["group"] == group:
            solved = any(rows[i]["success"] for i in members)
            outcomes.append(float(solved) if prior == "success_rate" else rows[members[0]]["score"])
    return min(max(mean(outcomes), 1e-4), 1 - 1e-4)


def _changes(gaps, prior):
    logit, before, result = math.log(prior / (1 - prior)), prior, []
    for gap in gaps:
        logit += gap
        belief = min(max(1 / (1 + math.exp(-logit)), 1e-6), 1 - 1e-6)
        result.append(belief - before)
        before = belief
    return result


def _scaled(advantage, z, lam, bound):
    sign = (advantage > 0) - (advantage < 0)
    factor = min(max(1 + bound * sign * z, 1 - bound), 1 + bound)
    return advantage * ((1 - lam) + lam * factor)
