"""Methods of several roles."""

import math

from naive.common import constant, less_penalties, mean, same, standardise


def role_turns(rows):
    """The row numbers of each role's part of a trajectory, in step order."""
    members = {}
    for i in sorted(range(len(rows)), key=lambda i: rows[i]["step"]):
        members.setdefault((rows[i]["trajectory"], rows[i]["role"]), []).append(i)
    return list(members.values())


def of_role(rows, values, i):
    return [v for v, row in zip(values, rows, strict=True) if row["role"] == rows[i]["role"]]


def tokens(rows, values, alone=False):
    """The value of every response token: that of its turn, or (alone) on one token of the turn and 0 on the others."""
    advantages = []
    for value, row in zip(values, rows, strict=True):
        n = row.get("tokens", 1)
        advantages += [value] + [0.0] * (n - 1) if alone and n else [value] * n
    return advantages


def deviation(values):
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1) + 1e-8)


def marshal(rows, gamma=1.0, reward_norm="none", whiten_rewards=False, advantage_norm="mean", whiten_advantages=False):
    def against(values, norm):
        if norm == "none":
            return values
        return [standardise(v, of_role(rows, values, i), norm, 1e-6) for i, v in enumerate(values)]

    reward = against([row["reward"] for row in rows], reward_norm)
    if whiten_rewards:
        carried = tokens(rows, reward, alone=True)
        flat = len(carried) < 2 or constant(carried)
        spread = 1.0 if flat else deviation(carried)
        reward = [0.0 if flat else v / spread for v in reward]
    returns = [0.0] * len(rows)
    for members in role_turns(rows):
        total = 0.0
        for i in reversed(members):
            total = returns[i] = reward[i] + gamma * total
    if advantage_norm == "distinct_mean":
        advantage = []
        for i, value in enumerate(returns):
            different = []
            for v in sorted([0.0, *of_role(rows, returns, i)]):
                if not different or not same(different[-1], v):
                    different.append(v)
            advantage.append(value - mean(different))
    else:
        advantage = against(returns, advantage_norm)
    if whiten_advantages:
        every = tokens(rows, advantage)
        flat = len(every) < 2 or constant(every)
        centre, spread = (0.0, 1.0) if flat else (mean(every), deviation(every))
        advantage = [0.0 if flat else (v - centre) / spread for v in advantage]
    return less_penalties(advantage, rows)


def rae(rows, decay=0.95, gamma=1.0, state=None):
    """Every episode in every place of the order, the other ones of its role before it at random."""
    episodes = role_turns(rows)
    role = [rows[members[0]]["role"] for members in episodes]
    outcome = [rows[members[0]].get("score", math.fsum(rows[i]["reward"] for i in members)) for members in episodes]
    result = [0.0] * len(rows)
    for e, members in enumerate(episodes):
        others = [outcome[k] for k in range(len(episodes)) if role[k] == role[e] and k != e]
        b = (state or {}).get(str(role[e]), 0.0)
        places = range(len(others) + 1)
        expected = [decay**k * b + (1 - decay**k) * (sum(others) / len(others) if others else 0.0) for k in places]
        baseline = math.fsum(expected) / len(expected)
        advantage = 0.0 if same(outcome[e], baseline) else outcome[e] - baseline
        for back, i in enumerate(reversed(members)):
            result[i] = gamma**back * advantage
    return less_penalties(result, rows)
