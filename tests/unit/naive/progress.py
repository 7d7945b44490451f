from naive.common import less_penalties, trajectories
from naive.turn_gae import whitened


def progress(rows, alpha=3.0, prover="given", k=4, segments=False, whiten="none"):
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        value = [rows[i]["turn_value"] for i in members]
        other = value
        if "prover_value" in rows[0] and prover == "given":
            other = [rows[i]["prover_value"] for i in members]
        if prover == "best_of_k":
            other = [1 - (1 - v) ** k for v in value]
        value, other = [*value, 0.0], [*other, 0.0]
        for t, i in enumerate(members):
            begin, end = t, t + 1
            if segments:
                while begin > 0 and not rows[members[begin]]["value_rollouts"]:
                    begin -= 1
                while end < len(members) and not rows[members[end]]["value_rollouts"]:
                    end += 1
            reward = sum(rows[j]["reward"] for j in members[begin:end])
            result[i] = reward + value[end] - value[begin] + alpha * (reward + other[end] - other[begin])
    return less_penalties(whitened(rows, result) if whiten == "turns" else result, rows)
