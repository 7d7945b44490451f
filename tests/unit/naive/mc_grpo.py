from statistics import median

from naive.common import constant, less_penalties, one_row_per_trajectory, own_scores, peers, same, std, unpenalised


def mc_grpo(rows, floor=0.6745, epsilon=1e-3):
    own = own_scores(unpenalised(rows, "outcomes"))
    result = []
    for i, value in enumerate(own):
        values = [own[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        middle = median(values)
        if constant(values) or same(value, middle):
            result.append(0.0)
            continue
        scale = max(median([abs(v - middle) for v in values]), floor * std(values)) + epsilon
        other = [v for v in values if not same(v, middle)]
        result.append((value - middle) / scale * len(values) / max(len(other), 1))
    return less_penalties(result, rows)
