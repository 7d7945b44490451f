import math

from naive.common import constant, less_penalties, mean, std, trajectories


def gae(rows, gamma, lam, truncated="zero"):
    """A(t) = delta(t) + gamma lam A(t+1), delta(t) = r(t) + gamma V(t+1) - V(t), inside each trajectory."""
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        last = rows[members[-1]]
        next_value = last["value"] if truncated == "value" and last.get("truncated") else 0.0
        carry = 0.0
        for i in reversed(members):
            row = rows[i]
            if row.get("terminated"):
                next_value = carry = 0.0
            carry = row["reward"] + gamma * next_value - row["value"] + gamma * lam * carry
            next_value = row["value"]
            result[i] = carry
    return result


def whitened(rows, advantages):
    """Against all turns of the batch that have tokens; all turns when nobody said how many tokens they have."""
    counted = [a for row, a in zip(rows, advantages, strict=True) if row.get("tokens", 1) > 0]
    if len(counted) < 2 or constant(counted):
        return [0.0] * len(rows)
    return [(a - mean(counted)) / math.sqrt(std(counted) ** 2 + 1e-8) for a in advantages]


def turn_gae_returns(rows, gamma=0.99, lam=0.9, truncated="zero"):
    """The critic's targets."""
    return [a + row["value"] - row["penalty"] for a, row in zip(gae(rows, gamma, lam, truncated), rows, strict=True)]


def turn_gae(rows, gamma=0.99, lam=0.9, whiten="turns", truncated="zero"):
    advantages = gae(rows, gamma, lam, truncated)
    return less_penalties(whitened(rows, advantages) if whiten == "turns" else advantages, rows)
