from naive.common import less_penalties, one_row_per_trajectory, own_scores, peers, standardise, unpenalised


def ngrpo(rows, r_max=1.0, epsilon=1e-6):
    own = own_scores(unpenalised(rows, "outcomes"))
    result = []
    for i, value in enumerate(own):
        values = [own[j] for j in one_row_per_trajectory(rows, peers(rows, i))]
        result.append(standardise(value, [*values, r_max], "mean_std", epsilon))
    return less_penalties(result, rows)
