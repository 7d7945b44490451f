import math
from collections import Counter

from naive.common import (
    episode_level,
    less_penalties,
    mean,
    one_row_per_trajectory,
    own_scores,
    peers,
    standardise,
    trajectories,
    unpenalised,
)


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
