from naive.common import episode_level, less_penalties, peers, standardise, step_returns, trajectories


def dual_level(rows, gamma=0.9, trajectory_w=1.0, turn_w=1.0, singleton="zero"):
    returns = step_returns(rows, gamma)
    episode = episode_level(rows, "mean_std", "outcomes", singleton, 1e-6)
    ordinal = {i: k for members in trajectories(rows) for k, i in enumerate(members)}
    result = []
    for i in range(len(rows)):
        same = [returns[j] for j in peers(rows, i) if ordinal[j] == ordinal[i]]
        if len(same) == 1:
            turn = returns[i] if singleton == "score" else 0.0
        else:
            turn = standardise(returns[i], same, "mean_std", 1e-6)
        result.append(trajectory_w * episode[i] + turn_w * turn)
    return less_penalties(result, rows)
