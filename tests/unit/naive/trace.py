import math

from naive.common import trajectories


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
