import math

from naive.common import (
    episode_level,
    less_penalties,
    mean,
    one_row_per_trajectory,
    own_scores,
    peers,
    same,
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
