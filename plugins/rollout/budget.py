"""Limits on the cost of an episode's branches, and on the number of a group's branches."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Tokens that the model writes, and steps of the environment."""

    tokens: int = 0
    steps: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.steps + other.steps)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.tokens * times, self.steps * times)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.tokens - other.tokens, self.steps - other.steps)


class Budget:
    """The cost of all branches of an episode: never above its limits, and no branch is cut to stay below.

    The number of branches at a state is fixed before the first one begins: as many as fit at their maximum cost. What
    they do not use is free for later states. If their number depended on the cost of the first ones, the measured
    value would be biased, since short rollouts would count more often than long ones.

    Args:
        tokens, steps: the limits; None: none.
        at_once: measured branches that run at the same time.
    """

    def __init__(self, tokens: int | None, steps: int | None, at_once: int) -> None:
        self._tokens, self._steps, self._at_once = tokens, steps, at_once
        self._taken = Cost()  # spent, and reserved
        self._measuring = 0
        self._returned = asyncio.Event()

    async def reserve(self, most: Cost, branches: int) -> int:
        """Reserve up to ``branches`` times ``most``, the maximum cost of a branch; returns how many may begin.

        Waits while measured branches of earlier states run that may leave enough for all. These always end, since they
        do not fork; trained ones fork and may wait themselves, so they are not waited for.
        """
        while (number := self._fitting(most, branches)) < branches and self._measuring:
            await self._one_returns()
        self._taken += most * number
        return number

    async def begin(self) -> None:
        """Begin a measured branch; waits while ``at_once`` of them run."""
        while self._measuring >= self._at_once:
            await self._one_returns()
        self._measuring += 1

    async def _one_returns(self) -> None:
        self._returned.clear()
        await self._returned.wait()

    def give_back(self, most: Cost, spent: Cost, measured: bool) -> None:
        """A branch ended for which ``most`` was reserved, and which cost ``spent``."""
        self._taken -= most - spent
        self._measuring -= measured
        self._returned.set()

    def _fitting(self, most: Cost, branches: int) -> int:
        limits = ((self._tokens, self._taken.tokens, most.tokens), (self._steps, self._taken.steps, most.steps))
        room = [
            (limit - reserved) // per_branch
            for limit, reserved, per_branch in limits
            if limit is not None and per_branch > 0
        ]
        return max(0, min([branches, *room]))


class Allowance:
    """The trained branches that all rollouts of a group may begin together: first come, first served.

    Args:
        branches: how many; None: any number.
    """

    def __init__(self, branches: int | None = None) -> None:
        self._left = math.inf if branches is None else branches

    def take(self, branches: int) -> int:
        """Take ``branches``, or as many as remain; returns their number."""
        number = int(min(branches, self._left))
        self._left -= number
        return number

    def give_back(self, taken: int) -> None:
        """Return branches that did not begin after all."""
        self._left += taken
