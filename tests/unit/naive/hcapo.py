import math

from naive.common import mean, peers, solved, standardise, trajectories


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
