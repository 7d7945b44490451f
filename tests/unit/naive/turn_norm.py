import math

from naive.common import (
    less_penalties,
    one_row_per_trajectory,
    own_scores,
    peers,
    standardise,
    step_returns,
    trajectories,
    unpenalised,
)


def turn_norm(rows, rule="gtpo", gamma=0.9, over="group", turn_w=1.0):
    if rule == "gtpo":
        returns = step_returns(rows, gamma)
        among = [peers(rows, i) if over == "group" else range(len(rows)) for i in range(len(rows))]
        result = [
            standardise(value, [returns[j] for j in members], "mean_std", 1e-6)
            for value, members in zip(returns, among, strict=True)
        ]
        return less_penalties(result, rows)

    def z(values, i):
        members = one_row_per_trajectory(rows, peers(rows, i))
        return standardise(values[i], [values[j] for j in members], "mean_std", 1e-4)

    outcome, turn, result = own_scores(unpenalised(rows, "outcomes")), [0.0] * len(rows), [0.0] * len(rows)
    for members in trajectories(rows):
        for i in members:
            turn[i] = math.fsum(rows[j]["turn_score"] for j in members)
    both = [t + o for t, o in zip(turn, outcome, strict=True)]
    for members in trajectories(rows):
        for place, i in enumerate(members):
            result[i] = z(both, i) if len(members) == 1 else z(outcome, i) + (turn_w * z(turn, i) if place == 0 else 0)
    return less_penalties(result, rows)
