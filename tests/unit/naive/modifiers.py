"""Modifiers of steps; those that are methods, too, take ``base=None``."""

import math
from collections import Counter

from naive.common import (
    episode_level,
    less_penalties,
    mean,
    one_row_per_trajectory,
    own_scores,
    peers,
    same,
    standardise,
    trajectories,
    unpenalised,
)


def a_grae(rows, base=None, alpha=1.0):
    own = own_scores(unpenalised(rows, "outcomes"))
    if base is None:
        base = episode_level(rows, "mean_std", "outcomes", "zero", 1e-6)
    w = mean([own[i] for i in one_row_per_trajectory(rows, range(len(rows)))])
    result = []
    for i, value in enumerate(base):
        group = [own[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        p, least = mean(group), 1 / max(len(group), 2)
        if not (same(p, 0) or same(p, 1)):
            p = min(max(p, least), 1 - least)
            value = w / 2 * value / math.sqrt(p) + (1 - w) / 2 * value / math.sqrt(1 - p)
        result.append(value * min(1, w / alpha) if value > 0 else value)
    return less_penalties(result, rows)


def copo(rows, base=None, gamma=20.0, rho=1.5):
    own = own_scores(unpenalised(rows, "outcomes"))
    if base is None:
        base = episode_level(rows, "mean_std", "outcomes", "zero", 1e-6)
    answers = {}
    for members in trajectories(rows):
        reported = [rows[i]["answer"] for i in members if rows[i]["answer"] is not None]
        answers[rows[members[0]]["trajectory"]] = reported[-1] if reported else "nothing was told"
    means, weights = {}, {}
    for i, row in enumerate(rows):
        members = one_row_per_trajectory(rows, peers(rows, i))
        means[row["group"]] = mean([own[j] for j in members])
        counts = Counter(answers[rows[j]["trajectory"]] for j in members)
        entropy = -sum(n / len(members) * math.log(n / len(members)) for n in counts.values())
        weights[row["group"]] = 1 / (1 + math.exp(-gamma * (entropy - rho)))
    result = []
    for row, value in zip(rows, base, strict=True):
        w, every = weights[row["group"]], list(means.values())
        between = standardise(means[row["group"]], every, "mean_std", 1e-6) if len(every) > 1 else 0.0
        result.append(w * value + (1 - w) * between)
    return less_penalties(result, rows)


def dynamo_modulation(rows, base=None, a=0.2, floor=0.6, steepness=50.0, threshold=0.99):
    if base is None:
        base = episode_level(rows, "mean_std", "outcomes", "zero", 1e-6)
    known = [row["entropy"] for row in rows if row["entropy"] is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    change = [0.0] * len(rows)
    for whole in trajectories(rows):
        members = [i for i in whole if rows[i]["entropy"] is not None]
        log_p = {i: rows[i]["log_prob"] / max(1, rows[i]["tokens"]) for i in members}
        pull = {i: math.exp(log_p[i]) * (log_p[i] + rows[i]["entropy"]) for i in members}
        for i in members:
            away = pull[i] - mean(list(pull.values()))
            change[i] = abs(base[i] * away) if abs(away) > 1e-12 else 0.0
    result = []
    for i, value in enumerate(base):
        entropy, gain = rows[i]["entropy"], 1.0
        if value > 0 and high > low and entropy is not None:
            gain = 1 + a * (high - entropy) / (high - low)
        x = change[i] / max(change) if max(change) > 0 else 0.0
        result.append(value * gain * (floor + (1 - floor) / (1 + math.exp(steepness * (x - threshold)))))
    return less_penalties(result, rows)


def shrinkage(rows, base=None, low=0.0, high=1.0, prior="given", known=()):
    """``known``: the moving averages by task, with ``prior="running"``."""
    own = own_scores(unpenalised(rows, "outcomes"))
    if base is None:
        base = episode_level(rows, "mean", "outcomes", "zero", 1e-6)
    result = []
    for i, value in enumerate(base):
        members = one_row_per_trajectory(rows, peers(rows, i))
        m = mean([own[j] for j in members])
        if prior == "given":
            rated = [j for j in peers(rows, i) if rows[j].get("valid", True) or rows[j]["prior"] != 0]
            first = one_row_per_trajectory(rows, rated)
            v = mean([rows[j]["prior"] for j in first]) if first else m
        else:
            v = dict(known).get(rows[members[0]]["task"], m)
        s = ((high - low) / 2) ** 2 / len(members)
        d2 = max(0.0, (m - v) ** 2 - s)
        w = d2 / (d2 + s)
        result.append(value + m - (w * m + (1 - w) * v))
    return less_penalties(result, rows)


def unlikely(rows, beta=0.25):
    """The rows with the rewards and scores of the method."""
    likely = {}
    for members in trajectories(rows):
        tokens = max(1, sum(rows[i]["tokens"] for i in members))
        likely[rows[members[0]]["trajectory"]] = sum(rows[i]["log_prob"] for i in members) / tokens
    own, result = own_scores(unpenalised(rows, "outcomes")), []
    for row, score in zip(rows, own, strict=True):
        others = [likely[t] for t in {r["trajectory"] for r in rows if r["group"] == row["group"]}]
        value = likely[row["trajectory"]]
        alike = [math.isclose(o, value, rel_tol=1e-12, abs_tol=1e-12) for o in others]
        rank = sum(o < value and not same for o, same in zip(others, alike, strict=True)) + (sum(alike) - 1) / 2
        factor = 1 - beta * rank / len(others)
        result.append({**row, "reward": row["reward"] * factor, "score": score * factor})
    return result


def unlikeliness(rows, beta=0.25):
    free = unlikely([{**row, "penalty": 0.0} for row in rows], beta)
    return less_penalties(episode_level(free, "mean_std", "outcomes", "zero", 1e-6), rows)


def empg(rows, base, k=1.0, k_next=1.0, zeta=0.1):
    known = [row["entropy"] for row in rows if row["entropy"] is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    h = [None if row["entropy"] is None else (row["entropy"] - low) / (high - low + 1e-8) for row in rows]
    average = mean([math.exp(-k * x) for x in h if x is not None]) if known else 1.0
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        for i, after in zip(members, [*members[1:], None], strict=True):
            gain = 1.0 if h[i] is None else math.exp(-k * h[i]) / (average + 1e-8)
            bonus = 0.0 if after is None or h[after] is None else zeta * math.exp(-k_next * h[after])
            result[i] = base[i] * gain + bonus
    centre = mean(result)
    return [value - centre for value in result]


def length_gate(rows, base, weight=0.1):
    def length(row):
        return sum(r["tokens"] for r in rows if r["trajectory"] == row["trajectory"])

    def solved(row):
        return any(r["success"] for r in rows if r["trajectory"] == row["trajectory"])

    result = []
    for i, value in enumerate(base):
        group = [rows[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        if len(group) > 1 and all(map(solved, group)):
            value -= weight * standardise(length(rows[i]), [length(row) for row in group], "mean_std", 1e-6)
        result.append(value)
    return result


def tool_gate(rows, base, weight=0.15, average="rated"):
    def calls(row):
        return sum(r["tool_calls"] for r in rows if r["trajectory"] == row["trajectory"])

    def solved(row):
        return any(r["success"] for r in rows if r["trajectory"] == row["trajectory"])

    tool = []
    for i, row in enumerate(rows):
        rated = [rows[j] for j in one_row_per_trajectory(rows, peers(rows, i)) if solved(rows[j])]
        values = [1 / (calls(r) + 1) for r in rated]
        tool.append(
            standardise(1 / (calls(row) + 1), values, "mean_std", 1e-6) if solved(row) and len(rated) > 1 else 0
        )
    tokens = sum(row["tokens"] for row, value in zip(rows, tool, strict=True) if value != 0)
    factor = sum(row["tokens"] for row in rows) / tokens if average == "rated" and tokens else 1.0
    return [value + weight * factor * t for value, t in zip(base, tool, strict=True)]


def trace(rows, base, weight=0.2, horizon=3, gamma=0.8, outcome=2.0, offset=0.1):
    result = list(base)
    for members in trajectories(rows):
        n = len(members) - 1
        d = [offset - math.log(rows[i]["gold_probability"]) for i in members]
        delta = [math.log(d[k] / d[k + 1]) for k in range(n)]
        for k in range(n):
            seen = [j for j in range(horizon) if k + j < n]
            c = sum(gamma**j * delta[k + j] for j in seen) / sum(gamma**j for j in seen)
            if k + horizon >= n:
                c += outcome * gamma ** (n - k) * base[members[n]]
            result[members[k]] += weight * c
    return result


NAMES = ("rank", "rank_velocity", "rank_acceleration")


def phi(numbers, mu, gain=2.0, weight=1.0):
    """The shaping term of one response: ``numbers`` and ``mu`` are (ER, ERV, ERA)."""

    def dev(x, u):
        return min(5.0, max(-5.0, (x - u) / (abs(u) + 1e-8)))

    er, erv, era = (dev(x, u) for x, u in zip(numbers, mu, strict=True))
    b = 1 / (1 + math.exp(-gain * era))
    return weight * (b * math.tanh(er) + (1 - b) * math.tanh(erv))


def rank_shaping(rows, base, state, gain=2.0, weight=1.0, kappa=2.0, rate=0.3):
    """The advantages and the running means after them."""
    numbers = [tuple(row[name] for name in NAMES) for row in rows]
    mu = [state[name] for name in NAMES] if state else None
    terms = [phi(row, mu, gain, weight) if mu else 0.0 for row in numbers]
    advantages = [a + min(max(0.0, term), abs(a) / kappa) for a, term in zip(base, terms, strict=True)]
    means = [mean([row[i] for row in numbers]) for i in range(3)]
    after = [(1 - rate) * u + rate * m for u, m in zip(mu, means, strict=True)] if mu else means
    return advantages, dict(zip(NAMES, after, strict=True))
