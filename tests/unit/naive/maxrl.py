from naive.common import less_penalties, mean, one_row_per_trajectory, own_scores, peers, same, unpenalised


def maxrl(rows, epsilon=0.0, singleton="zero"):
    own = own_scores(unpenalised(rows, "outcomes"))
    result = []
    for i, value in enumerate(own):
        values = [own[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        if len(values) == 1:
            result.append(value if singleton == "score" else 0.0)
        elif any(v < 0 and not same(v, 0) for v in values) or same(mean(values), 0) or same(value, mean(values)):
            result.append(0.0)
        else:
            result.append((value - mean(values)) / (mean(values) + epsilon))
    return less_penalties(result, rows)
