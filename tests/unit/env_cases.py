"""What the tests of several environments share."""

from typing import Any

import gymnasium


def play(env: gymnasium.Env[str, str], seed: int, actions: list[str]) -> list[Any]:
    """What a reset answers, and then each step, up to the end."""
    seen: list[Any] = [env.reset(seed=seed)]
    for action in actions:
        seen.append(env.step(action))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen
