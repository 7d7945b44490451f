from naive.common import episode_level, less_penalties


def grpo_steps(rows, norm="mean_std", scope="outcomes", singleton="zero", epsilon=1e-6):
    return less_penalties(episode_level(rows, norm, scope, singleton, epsilon), rows, scope)
