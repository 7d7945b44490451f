import math

from naive.common import mean

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
