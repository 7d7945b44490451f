from naive.common import less_penalties, trajectories


def progress(rows, alpha=3.0, prover="given", k=4):
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        value = [rows[i]["turn_value"] for i in members]
        other = value
        if "prover_value" in rows[0] and prover == "given":
            other = [rows[i]["prover_value"] for i in members]
        if prover == "best_of_k":
            other = [1 - (1 - v) ** k for v in value]
        for t, i in enumerate(members):
            last = t + 1 == len(members)
            own = rows[i]["reward"] + (0.0 if last else value[t + 1]) - value[t]
            gain = rows[i]["reward"] + (0.0 if last else other[t + 1]) - other[t]
            result[i] = own + alpha * gain
    return less_penalties(result, rows)
