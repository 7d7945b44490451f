from naive.common import constant, episode_level, less_penalties, mean, one_row_per_trajectory, same, std


def seeupo(rows, clamp=3.0, singleton="score"):
    centred = episode_level(rows, "mean", "outcomes", singleton, 1.0)
    batch = [centred[i] for i in one_row_per_trajectory(rows, range(len(rows)))]
    centre = batch[0] if constant(batch) else mean(batch)
    spread = 0.0 if constant(batch) else std(batch)
    result = []
    for value in centred:
        value = 0.0 if same(value, centre) else value - centre
        if spread > 1e-6:
            value /= spread
        result.append(max(-clamp, min(clamp, value)))
    return less_penalties(result, rows)
