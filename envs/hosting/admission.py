"""Which episodes a host may open: first come, first served, as long as there is room."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

from verl_turnkey.envs.hosting import capacity
from verl_turnkey.envs.hosting.restart_budget import RestartBudget
from verl_turnkey.envs.hosting.runner import Declared


class Admission:
    """The capacity of a host, in episodes or in MB of memory, and the queue for it.

    Args:
        places: open episodes at most; ``auto``: as many as fit into the host's part of the free memory.
        sharers: hosts that share this machine's memory, this one included.
        budget: the host's restart budget; nothing is admitted while it is exceeded.
        clones: the most clones that one episode has open at the same time; ``auto`` leaves room for them.
    """

    def __init__(self, places: int | Literal["auto"], sharers: int, budget: RestartBudget, clones: int = 0) -> None:
        if places != "auto" and places < 1:
            raise ValueError(f"places must be auto or positive, not {places}")
        self._counting = places != "auto"
        self._room = capacity.memory_for_a_host_mb(sharers) // (1 + clones) if places == "auto" else places
        self._counted = not self._counting and clones > 0  # clones, with the episode that they are of
        self._budget = budget
        self._taken = 0  # by open episodes; idle environments use what is left
        self._waiting: deque[tuple[str, asyncio.Future[int]]] = deque()
        self._asking: set[str] = set()  # ids whose first episode is reading what the class declares
        self.declared: dict[str, Declared] = {}

    @property
    def waiting(self) -> int:
        """Number of episodes in the queue."""
        return sum(not grant.done() for _, grant in self._waiting)

    async def admit(self, env_id: str) -> int:
        """Wait for room for one more environment. Returns the room it takes, its cost.

        Raises:
            EnvironmentFailure: of kind ``restarts``: the restart budget was exceeded before or while this one waited.
        """
        self._budget.check()
        grant: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((env_id, grant))
        self._admit_waiting()
        try:
            cost = await grant
            self._budget.check()
        except BaseException:
            if grant.done() and not grant.cancelled():  # admitted and cancelled at the same moment
                self.leave(env_id, grant.result())
            self._admit_waiting()  # those behind this one
            raise
        return cost

    def take(self, env_id: str) -> int:
        """Take room for a clone without waiting, even when there is none left. Returns the cost."""
        cost = 0 if self._counted else self._cost(env_id)
        self._taken += cost
        return cost

    def settle(self, env_id: str, cost: int) -> int:
        """The cost of an environment now that its declaration is known; admits episodes that waited for it."""
        settled = self._cost(env_id) if cost else 0
        self.leave(env_id, cost - settled)
        return settled

    def leave(self, env_id: str, cost: int) -> None:
        """Give room back. If this episode was reading what the class declares, the next one may do so."""
        self._taken -= cost
        self._asking.discard(env_id)
        self._admit_waiting()

    def is_exceeded_by(self, idle: int) -> bool:
        """Whether there is not enough room for the open episodes and ``idle`` more."""
        return self._taken + idle > self._room

    def _admit_waiting(self) -> None:
        while self._waiting:
            env_id, grant = self._waiting[0]
            if not grant.cancelled():
                unknown = not self._counting and env_id not in self.declared
                if unknown and env_id in self._asking:  # the first episode reads the declaration, the others wait
                    return
                cost = self._cost(env_id)
                if self._taken and self._taken + cost > self._room:  # a single environment may exceed the room
                    return
                self._taken += cost
                if unknown:
                    self._asking.add(env_id)
                grant.set_result(cost)
            self._waiting.popleft()

    def _cost(self, env_id: str) -> int:
        return 1 if self._counting else self.declared.get(env_id, Declared()).memory_mb
