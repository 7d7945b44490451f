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

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.tokens - other.tokens, self.steps - other.steps)


class Budget:
    """The cost of all branches of an episode: never above its limits, and no branch is cut to stay below.

    A branch begins only if the most that it can cost still fits beside the most that the running ones can. Cut branches
    would be the long ones, so that what is measured on the rest would be biased.

    Args:
        tokens, steps: the limits; None: none.
        at_once: measured branches that run at the same time.
    """

    def __init__(self, tokens: int | None, steps: int | None, at_once: int) -> None:
        self._tokens, self._steps, self._at_once = tokens, steps, at_once
        self._taken = Cost()  # spent, and reserved by branches that run
        self._measuring = 0
        self._returned = asyncio.Event()

    async def reserve(self, most: Cost, measured: bool) -> bool:
        """Take ``most`` for a branch, or return False. Waits while measured branches run that may leave enough.

        These always end, for they do not fork; trained ones, which do, are not waited for: they may wait themselves.
        """
        while not self._fits(most, measured):
            if not self._measuring:
                return False
            self._returned.clear()
            await self._returned.wait()
        self._taken += most
        self._measuring += measured
        return True

    def give_back(self, most: Cost, spent: Cost, measured: bool) -> None:
        """A branch for which ``most`` was taken ended, and cost ``spent``."""
        self._taken -= most - spent
        self._measuring -= measured
        self._returned.set()

    def _fits(self, most: Cost, measured: bool) -> bool:
        if measured and self._measuring >= self._at_once:
            return False
        then = self._taken + most
        return all(
            limit is None or value <= limit for value, limit in ((then.tokens, self._tokens), (then.steps, self._steps))
        )


class Allowance:
    """Trained branches that all rollouts of a group may begin together: the first ones that ask.

    Args:
        branches: how many; None: any number.
    """

    def __init__(self, branches: int | None = None) -> None:
        self._left = math.inf if branches is None else branches

    def take(self) -> bool:
        """Take one if there is one left."""
        free = self._left > 0
        self._left -= free
        return free

    def give_back(self, taken: int) -> None:
        """Branches that did not begin after all."""
        self._left += taken
