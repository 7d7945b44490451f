from naive.common import episode_level


def grpo_steps(rows, norm="mean_std", scope="trajectories", singleton="zero", epsilon=1e-6):
    return episode_level(rows, norm, scope, singleton, epsilon)
