"""What the branches of an episode may cost, and how many those of a group may be."""

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

    How many branches begin at a state is settled before the first of them: as many as fit if each costs the most that
    it can. What they leave of that counts for later states. If their number depended on what the first ones cost, the
    value measured on them would be biased, since short rollouts would be counted more often than long ones.

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
        """How many of ``branches`` may begin at a state, each of which costs at most ``most``; that is set aside.

        Waits while measured branches of earlier states run that may leave enough for all. These always end, for they
        do not fork; trained ones, which do, are not waited for: they may wait themselves.
        """
        while (number := self._fitting(most, branches)) < branches and self._measuring:
            await self._one_returns()
        self._taken += most * number
        return number

    async def begin(self) -> None:
        """Begin a measured branch; waits while as many run as may run at once."""
        while self._measuring >= self._at_once:
            await self._one_returns()
        self._measuring += 1

    async def _one_returns(self) -> None:
        self._returned.clear()
        await self._returned.wait()

    def give_back(self, most: Cost, spent: Cost, measured: bool) -> None:
        """A branch for which ``most`` was taken ended, and cost ``spent``."""
        self._taken -= most - spent
        self._measuring -= measured
        self._returned.set()

    def _fitting(self, most: Cost, branches: int) -> int:
        left = ((self._tokens, self._taken.tokens, most.tokens), (self._steps, self._taken.steps, most.steps))
        room = [(limit - taken) // each for limit, taken, each in left if limit is not None and each > 0]
        return max(0, min([branches, *room]))


class Allowance:
    """Trained branches that all rollouts of a group may begin together: the first ones that ask.

    Args:
        branches: how many; None: any number.
    """

    def __init__(self, branches: int | None = None) -> None:
        self._left = math.inf if branches is None else branches

    def take(self, branches: int) -> int:
        """Take ``branches``, or as many as are left; returns their number."""
        taken = int(min(branches, self._left))
        self._left -= taken
        return taken

    def give_back(self, taken: int) -> None:
        """Branches that did not begin after all."""
        self._left += taken
