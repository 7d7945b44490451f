"""Methods with rewards of turns."""

import math

from naive.common import (
    constant,
    episode_level,
    less_penalties,
    mean,
    one_row_per_trajectory,
    own_scores,
    peers,
    same,
    standardise,
    std,
    step_returns,
    trajectories,
    unpenalised,
)


def dual_granularity(rows, beta=0.3, weight="tokens"):
    outcome = episode_level(rows, "mean_std", "outcomes", "zero", 1e-6)
    result = []
    for i, row in enumerate(rows):
        scores = []
        for j in peers(rows, i):
            scores += [rows[j]["turn_score"]] * (rows[j].get("tokens", 1) if weight == "tokens" else 1)
        step = standardise(row["turn_score"], scores, "mean_std", 1e-6, "population") if scores else 0.0
        result.append(outcome[i] + beta * step)
    return less_penalties(result, rows)


def dual_level(rows, gamma=0.9, trajectory_w=1.0, turn_w=1.0, singleton="zero"):
    returns = step_returns(rows, gamma)
    episode = episode_level(rows, "mean_std", "outcomes", singleton, 1e-6)
    ordinal = {i: k for members in trajectories(rows) for k, i in enumerate(members)}
    result = []
    for i in range(len(rows)):
        same = [returns[j] for j in peers(rows, i) if ordinal[j] == ordinal[i]]
        if len(same) == 1:
            turn = returns[i] if singleton == "score" else 0.0
        else:
            turn = standardise(returns[i], same, "mean_std", 1e-6)
        result.append(trajectory_w * episode[i] + turn_w * turn)
    return less_penalties(result, rows)


def step_episode(rows, alpha=1.0, estimator="rloo", baseline="all_steps"):
    def counted(members, once):
        return one_row_per_trajectory(rows, members) if once else members

    def level(values, once):
        against = [[values[j] for j in counted(peers(rows, i), once)] for i in range(len(rows))]
        if estimator == "grpo":
            return [standardise(v, group, "mean_std", 1e-6) for v, group in zip(values, against, strict=True)]
        if estimator == "rloo":
            return [
                len(group) / (len(group) - 1) * standardise(v, group, "mean", 0.0) if len(group) > 1 else 0.0
                for v, group in zip(values, against, strict=True)
            ]
        centred = [
            standardise(v, group, "mean", 0.0) if len(group) > 1 else 0.0
            for v, group in zip(values, against, strict=True)
        ]
        whole = [centred[j] for j in counted(range(len(rows)), once)]
        if len(whole) < 2 or all(same(v, whole[0]) for v in whole):
            return [0.0] * len(rows)
        assert abs(mean(whole)) < 1e-6 * max(1.0, max(map(abs, whole)))
        return [v / (std(whole) + 1e-6) for v in centred]

    episode = level(own_scores(unpenalised(rows, "outcomes")), True)
    step = level([row["turn_score"] for row in rows], baseline == "one_per_trajectory")
    return less_penalties([e + alpha * s for e, s in zip(episode, step, strict=True)], rows)


def step_potential(rows, alpha=0.5, xi=0.5, saturation=0.9):
    n = len(rows)
    change, factor = [0.0] * n, [1.0] * n
    for members in trajectories(rows):
        before, saturated = 0.0, 0
        for i in members:
            idle = not rows[i].get("valid", True) and rows[i]["potential"] == 0
            phi = before if idle else rows[i]["potential"]
            factor[i] = 1 - alpha * (1 - math.exp(-saturated))
            saturated += phi > saturation
            change[i] = phi - before
            before = phi
    low, high = min(change), max(change)
    gain = [math.exp(0.0 if constant(change) else (d - low) / (high - low)) for d in change]
    outcome = episode_level(rows, "mean", "outcomes", "zero", 1e-6)
    middle = mean(gain)
    shaped = [
        f * o + xi * (0.0 if constant(gain) else g - middle) for f, o, g in zip(factor, outcome, gain, strict=True)
    ]
    tokens = [a for row, a in zip(rows, shaped, strict=True) for _ in range(row.get("tokens", 1))]
    return less_penalties([standardise(a, tokens, "mean_std", 1e-6) if tokens else 0.0 for a in shaped], rows)


def turn_norm(rows, rule="gtpo", gamma=0.9, over="group", turn_w=1.0):
    if rule == "gtpo":
        returns = step_returns(rows, gamma)
        among = [peers(rows, i) if over == "group" else range(len(rows)) for i in range(len(rows))]
        result = [
            standardise(value, [returns[j] for j in members], "mean_std", 1e-6)
            for value, members in zip(returns, among, strict=True)
        ]
        return less_penalties(result, rows)

    def z(values, i):
        members = one_row_per_trajectory(rows, peers(rows, i))
        return standardise(values[i], [values[j] for j in members], "mean_std", 1e-4)

    outcome, turn, result = own_scores(unpenalised(rows, "outcomes")), [0.0] * len(rows), [0.0] * len(rows)
    for members in trajectories(rows):
        for i in members:
            turn[i] = math.fsum(rows[j]["turn_score"] for j in members)
    both = [t + o for t, o in zip(turn, outcome, strict=True)]
    for members in trajectories(rows):
        for place, i in enumerate(members):
            result[i] = z(both, i) if len(members) == 1 else z(outcome, i) + (turn_w * z(turn, i) if place == 0 else 0)
    return less_penalties(result, rows)


def information_gain(rows, gamma=1.0, gain="probability", pool="separate"):
    scores, n = own_scores(unpenalised(rows, "outcomes")), len(rows)
    reward, last = [0.0] * n, [False] * n
    for members in trajectories(rows):
        value = [rows[i]["gold_probability"] for i in members]
        if gain == "log_probability":
            value = [math.log(v) if v else 0.0 for v in value]  # 0 only before an only turn
        for t, i in enumerate(members):
            last[i] = t + 1 == len(members)
            reward[i] = scores[i] if last[i] else value[t + 1] - value[t]
    z = []
    for i in range(n):
        values = [reward[j] for j in peers(rows, i) if pool == "joint" or last[j] == last[i]]
        if constant(values):
            z.append(0.0)
        else:
            z.append((reward[i] - mean(values)) / (math.sqrt(std(values, "population") ** 2 + 1e-8) + 1e-6))
    result = [0.0] * n
    for members in trajectories(rows):
        total = 0.0
        for i in reversed(members):
            total = z[i] + gamma * total
            result[i] = 0.0 if same(total, 0.0) else total
    return less_penalties(result, rows)


def rebn(rows, gamma=0.9, std="sample", epsilon=1e-9):
    returns = step_returns(rows, gamma)
    return less_penalties([standardise(value, returns, "mean_std", epsilon, std) for value in returns], rows)
