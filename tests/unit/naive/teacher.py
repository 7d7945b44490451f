"""Modifiers with a teacher's prompt."""

import math

from naive.common import mean, peers, solved, standardise, std, trajectories


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


def grsd(rows, base, lam=0.5, eta=0.0, bound=0.2, success=None):
    def term(j):
        gaps = rows[j]["gaps"]
        sign = (base[j] > 0) - (base[j] < 0)
        return math.exp(min(max(sign * sum(gaps) / len(gaps), -20.0), 20.0)) - 1

    result = []
    for i, advantage in enumerate(base):
        group = peers(rows, i)
        valid = [j for j in group if rows[j]["gaps"] and rows[j]["has_text"]]
        wins = {solved(rows, j, success) for j in group}
        if i not in valid or len(wins) < 2:
            result.append(advantage)
            continue
        n = term(i) / (mean([abs(term(j)) for j in valid]) + 1e-6)
        n = n if abs(n) > eta else 0.0
        result.append(advantage * max(0.1, 1 + lam * min(max(n, -bound), bound)))
    return result


def hcapo(rows, base, weight=1.0, gamma=0.95, temperature=5.0, clip=0.2, smooth=False, success=None):
    values = [0.0] * len(rows)
    for members in trajectories(rows):
        likely = {i: math.exp(log_prob / temperature) for i in members if (log_prob := _log_prob(rows[i])) is not None}
        score = rows[members[0]]["score"]
        for place, i in enumerate(members):
            ratio = likely[i] / mean(list(likely.values())) if i in likely else 1.0
            values[i] = min(max(ratio, 1 - clip), 1 + clip) * gamma ** (len(members) - 1 - place) * score
        if smooth:
            after = [values[i] for i in members[1:]] + [values[members[-1]]]
            for i, value in zip(members, after, strict=True):
                values[i] = 0.5 * values[i] + 0.5 * value
    result = []
    for i, advantage in enumerate(base):
        term = standardise(values[i], [values[j] for j in peers(rows, i)], "mean_std", 1e-6)
        result.append(advantage + weight * (max(term, 0.0) if solved(rows, i, success) else term))
    return result


def _log_prob(row):
    return mean(row["teacher"]) if row["teacher"] and row["has_text"] else None


def opid(rows, base, weight=0.001):
    return [[advantage + weight * gap for gap in row["gaps"]] for row, advantage in zip(rows, base, strict=True)]


def rlsd(rows, base, training_step=1, lam=0.5, clip=0.2, decay_steps=100):
    """The advantages of each step's tokens; ``gaps`` of a row: those of its tokens."""
    share = lam if decay_steps is None else lam * max(0.0, 1 - training_step / decay_steps)
    result = []
    for row, advantage in zip(rows, base, strict=True):
        sign = (advantage > 0) - (advantage < 0)
        factors = [min(max(math.exp(sign * gap), 1 - clip), 1 + clip) for gap in row["gaps"]]
        result.append([advantage * ((1 - share) + share * factor) for factor in factors])
    return result


def trial(rows, base, coefficient=0.1):
    result = [[] for _ in rows]
    for members in trajectories(rows):
        gaps = {i: rows[i]["gaps"] for i in members}
        score = {i: sum(map(abs, gap)) / len(gap) if gap else 0.0 for i, gap in gaps.items()}
        weighted = sum(len(gaps[i]) * score[i] for i in members)
        for i in members:
            weight = score[i] * sum(map(len, gaps.values())) / weighted if weighted else 0.0
            bound = abs(base[i])
            result[i] = [base[i] + coefficient * min(max(weight * gap, -bound), bound) for gap in gaps[i]]
    return result
