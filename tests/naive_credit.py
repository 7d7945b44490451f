"""The estimators once more, as plain loops straight from the formulas: slow, obvious, without code of the package.

Rows are dicts with group, trajectory, step, reward, penalty, anchor (hashable or None) and optionally score.
"""

from __future__ import annotations

import math


def step_returns(rows, gamma):
    """R(t) = r(t) + gamma R(t+1) inside each trajectory."""
    result = []
    for row in rows:
        later = [r for r in rows if r["trajectory"] == row["trajectory"] and r["step"] >= row["step"]]
        total = 0.0
        for r in sorted(later, key=lambda r: r["step"], reverse=True):
            total = r["reward"] + gamma * total
        result.append(total)
    return result


def mean(values):
    return math.fsum(values) / len(values)


def same(a, b):
    """Equal up to the rounding of a sum."""
    return abs(a - b) <= 1e-12 * max(1.0, abs(a), abs(b))


def standardise(value, values, norm, epsilon):
    """value against the values of its group; a group without spread gives no standardised credit."""
    if same(min(values), max(values)):
        if norm == "mean":
            return 0.0 if same(value, values[0]) else value - values[0]
        return 0.0
    centred = value - mean(values)
    if norm == "mean":
        return centred
    std = math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))
    return centred / (std + epsilon)


def grpo_steps(rows, norm="mean_std", scope="trajectories", singleton="zero", epsilon=1e-6):
    own = []
    for row in rows:
        score = row.get("score")
        if score is None:
            score = math.fsum(r["reward"] for r in rows if r["trajectory"] == row["trajectory"])
        own.append(score - row["penalty"])
    result = []
    for row, value in zip(rows, own, strict=True):
        members = [i for i, r in enumerate(rows) if r["group"] == row["group"]]
        if scope == "trajectories":
            earliest = {}
            for i in members:
                t = rows[i]["trajectory"]
                if t not in earliest or rows[i]["step"] < rows[earliest[t]]["step"]:
                    earliest[t] = i
            members = list(earliest.values())
        if len(members) == 1:
            result.append(value if singleton == "score" else 0.0)
        else:
            result.append(standardise(value, [own[i] for i in members], norm, epsilon))
    return result


def gigpo_step_level(rows, gamma=0.95, norm="mean_std", epsilon=1e-6):
    returns = [total - row["penalty"] for total, row in zip(step_returns(rows, gamma), rows, strict=True)]
    result = []
    for i, row in enumerate(rows):
        same_state = [
            returns[j]
            for j, r in enumerate(rows)
            if j == i or (r["group"] == row["group"] and row["anchor"] is not None and r["anchor"] == row["anchor"])
        ]
        result.append(standardise(returns[i], same_state, norm, epsilon))
    return result


def gigpo(
    rows, gamma=0.95, step_advantage_w=1.0, norm="mean_std", scope="trajectories", singleton="zero", epsilon=1e-6
):
    episode = grpo_steps(rows, norm, scope, singleton, epsilon)
    step = gigpo_step_level(rows, gamma, norm, epsilon)
    return [e + step_advantage_w * s for e, s in zip(episode, step, strict=True)]
