"""What the tests of several environments share."""

from collections.abc import Callable
from typing import Any

import gymnasium


def wander(env: gymnasium.Env[str, str], seed: int, choose: Callable[[Any, Any], str], steps: int) -> list[Any]:
    """What a reset answers, and then each step, up to the end; ``choose`` makes an action of observation and info."""
    seen: list[Any] = [env.reset(seed=seed)]
    for _ in range(steps):
        seen.append(env.step(choose(seen[-1][0], seen[-1][-1])))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


def play(env: gymnasium.Env[str, str], seed: int, actions: list[str]) -> list[Any]:
    """As :func:`wander`, with these actions."""
    following = iter(actions)
    return wander(env, seed, lambda *_: next(following), len(actions))
