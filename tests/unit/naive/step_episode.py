from naive.common import (
    less_penalties,
    mean,
    one_row_per_trajectory,
    own_scores,
    peers,
    same,
    standardise,
    std,
    unpenalised,
)


def step_episode(rows, alpha=1.0, estimator="rloo", baseline="all_steps"):
    def counted(members, once):
        return one_row_per_trajectory(rows, members) if once else members

    def level(values, once):
        against = [[values[j] for j in counted(peers(rows, i), once)] for i in range(len(rows))]
        if estimator == "grpo":
            return [standardise(v, group, "mean_std", 1e-6) for v, group in zip(values, against, strict=True)]
        if estimator == "rloo":
            return [
                len(group) / (len(group) - 1) * standardise(v, group, "mean", 0.0) if len(group) > 1 else 0.0
                for v, group in zip(values, against, strict=True)
            ]
        centred = [
            standardise(v, group, "mean", 0.0) if len(group) > 1 else 0.0
            for v, group in zip(values, against, strict=True)
        ]
        whole = [centred[j] for j in counted(range(len(rows)), once)]
        if len(whole) < 2 or all(same(v, whole[0]) for v in whole):
            return [0.0] * len(rows)
        assert abs(mean(whole)) < 1e-6 * max(1.0, max(map(abs, whole)))
        return [v / (std(whole) + 1e-6) for v in centred]

    episode = level(own_scores(unpenalised(rows, "outcomes")), True)
    step = level([row["turn_score"] for row in rows], baseline == "one_per_trajectory")
    return less_penalties([e + alpha * s for e, s in zip(episode, step, strict=True)], rows)
