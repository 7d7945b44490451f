"""Fork an episode of a real host in the middle, as training does, and play both ways on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from verl_turnkey.envs.hosting.host import EnvHost

BEFORE, AFTER, SECONDS = 3, 5, 120
NUMBERS = tuple(map(str, range(1, 21)))


def forks_alike(env_id: str, kwargs: Mapping[str, Any], seed: int = 1, words: Sequence[str] = NUMBERS) -> int:
    """Assert that a clone goes on as its original does, and that another one that goes astray disturbs neither.

    ``words``: the actions where the environment lists none. Returns the number of steps that both took.
    """
    return asyncio.run(_fork(env_id, kwargs, seed, words))


async def _fork(env_id: str, kwargs: Mapping[str, Any], seed: int, words: Sequence[str]) -> int:
    host, rng = EnvHost(places=1, clones=2), random.Random(seed)

    def action(info: Mapping[str, Any]) -> str:
        return rng.choice(info["admissible"] or words)

    async def alike(*names: str, action: str) -> tuple[Any, ...]:
        first, *others = await asyncio.gather(*(host.step(name, action, SECONDS) for name in names))
        for other in others:
            for value, other_value in zip(first[:4], other[:4], strict=True):
                assert value == other_value, (action, value, other_value)
            for key in ("state_key", "admissible", "invalid", "success"):
                assert first[4][key] == other[4][key], (action, key)
        return first

    try:
        _, info, _ = await host.start("original", env_id, kwargs, seed, SECONDS)
        for _ in range(BEFORE):
            *_, terminated, truncated, info = await host.step("original", action(info), SECONDS)
            assert (terminated, truncated) == (False, False), "it is over before the fork"
        for name in ("astray", "clone"):
            await host.clone(name, "original", SECONDS, SECONDS)
        for _ in range(AFTER):
            *_, terminated, truncated, _ = await host.step("astray", "look", SECONDS)
            if terminated or truncated:
                break
        both = 0
        while both < AFTER:
            *_, terminated, truncated, info = await alike("original", "clone", action=action(info))
            both += 1
            if terminated or truncated:
                break
        return both
    finally:
        await host.shutdown()
