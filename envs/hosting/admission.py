"""Who may open an episode in a host: first come, first served, as far as its room goes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

from verl_turnkey.envs.hosting import capacity
from verl_turnkey.envs.hosting.restart_budget import Losses
from verl_turnkey.envs.hosting.runner import Declared


class Admission:
    """The room of a host, in episodes or in MB of memory, and the queue for it.

    Args:
        places: open episodes at most; ``auto``: as many as fit into the host's part of the free memory.
        sharers: hosts that share this machine's memory, this one included.
        losses: of the host, which lets nobody in while they are too many.
    """

    def __init__(self, places: int | Literal["auto"], sharers: int, losses: Losses) -> None:
        if places != "auto" and places < 1:
            raise ValueError(f"places must be auto or positive, not {places}")
        self._counting = places != "auto"
        self._room = capacity.memory_for_a_host_mb(sharers) if places == "auto" else places
        self._losses = losses
        self._taken = 0  # by open episodes; idle environments take of what is left
        self._waiting: deque[tuple[str, asyncio.Future[int]]] = deque()
        self._asked: set[str] = set()  # ids of which an episode is about to find out what the class declares
        self.declared: dict[str, Declared] = {}

    @property
    def waiting(self) -> int:
        """Number of episodes that wait for a place."""
        return sum(not place.done() for _, place in self._waiting)

    async def admit(self, env_id: str) -> int:
        """Wait for room for one more environment. Returns what it takes.

        Raises:
            EnvironmentFailure: of kind ``restarts``: too much was lost, before or while this one waited.
        """
        self._losses.check()
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((env_id, place))
        self._let_in()
        try:
            cost = await place
            self._losses.check()
        except BaseException:
            if place.done() and not place.cancelled():  # let in, and cancelled at the same moment
                self.leave(env_id, place.result())
            self._let_in()  # whom this one kept waiting
            raise
        return cost

    def take(self, env_id: str) -> int:
        """Take room at once, also when there is none left."""
        cost = self._cost(env_id)
        self._taken += cost
        return cost

    def settle(self, env_id: str, cost: int) -> int:
        """What an environment takes now that its class has been asked; lets in those who waited for that."""
        settled = self._cost(env_id)
        self.leave(env_id, cost - settled)
        return settled

    def leave(self, env_id: str, cost: int) -> None:
        """Give room back; who was about to find out what the class declares has done so, or never will."""
        self._taken -= cost
        self._asked.discard(env_id)
        self._let_in()

    def is_exceeded_by(self, idle: int) -> bool:
        """Whether there is not enough room for the open episodes and ``idle`` more."""
        return self._taken + idle > self._room

    def _let_in(self) -> None:
        while self._waiting:
            env_id, place = self._waiting[0]
            if not place.cancelled():
                unknown = not self._counting and env_id not in self.declared
                if unknown and env_id in self._asked:  # the first one finds out what the class declares
                    return
                cost = self._cost(env_id)
                if self._taken and self._taken + cost > self._room:  # alone, an environment may be larger than the room
                    return
                self._taken += cost
                if unknown:
                    self._asked.add(env_id)
                place.set_result(cost)
            self._waiting.popleft()

    def _cost(self, env_id: str) -> int:
        return 1 if self._counting else self.declared.get(env_id, Declared()).memory_mb
