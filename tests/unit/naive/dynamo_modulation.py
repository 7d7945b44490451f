import math

from naive.common import episode_level, less_penalties, mean, trajectories


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
