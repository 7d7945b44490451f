import math

from naive.common import constant, episode_level, less_penalties, mean, standardise, trajectories


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
