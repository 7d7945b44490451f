from naive.common import less_penalties, trajectories


def before(rows, name, members):
    """The column along a trajectory; an idle turn (invalid, and 0) has the next known value, else the last known."""
    known = [None if not rows[i].get("valid", True) and rows[i][name] == 0 else rows[i][name] for i in members]
    result = []
    for t in range(len(known)):
        around = [*known[t:], *reversed(known[:t])]
        result.append(next((v for v in around if v is not None), 0.0))
    return result


def progress(rows, alpha=3.0, prover="given", k=4):
    result = [0.0] * len(rows)
    for members in trajectories(rows):
        value = before(rows, "turn_value", members)
        other = before(rows, "prover_value", members) if "prover_value" in rows[0] and prover == "given" else value
        if prover == "best_of_k":
            other = [1 - (1 - v) ** k for v in value]
        for t, i in enumerate(members):
            last = t + 1 == len(members)
            own = rows[i]["reward"] + (0.0 if last else value[t + 1]) - value[t]
            gain = rows[i]["reward"] + (0.0 if last else other[t + 1]) - other[t]
            result[i] = own + alpha * gain
    return less_penalties(result, rows)
