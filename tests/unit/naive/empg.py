import math

from naive.common import mean, trajectories


def empg(rows, base, k=1.0, k_next=1.0, zeta=0.1):
    known = [row["entropy"] for row in rows if row["entropy"] is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    h = [None if row["entropy"] is None else (row["entropy"] - low) / (high - low + 1e-8) for row in rows]
    average = mean([math.exp(-k * x) for x in h if x is not None]) if known else 1.0
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        for i, after in zip(members, [*members[1:], None], strict=True):
            gain = 1.0 if h[i] is None else math.exp(-k * h[i]) / (average + 1e-8)
            bonus = 0.0 if after is None or h[after] is None else zeta * math.exp(-k_next * h[after])
            result[i] = base[i] * gain + bonus
    centre = mean(result)
    return [value - centre for value in result]
