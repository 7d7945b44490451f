"""What the tests of several environments share."""

import gymnasium


def play(env: gymnasium.Env[str, str], seed: int, actions: list[str]) -> list[tuple]:
    """What is seen of an episode, state keys, rewards and flags included, up to its end."""
    observation, info = env.reset(seed=seed)
    seen: list[tuple] = [(observation, info["state_key"])]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        seen.append((observation, info["state_key"], reward, terminated, truncated))
        if terminated or truncated:
            break
    return seen
