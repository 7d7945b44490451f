"""The environments that a host has made: who calls them, and who gets which one next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting import capacity
from verl_turnkey.envs.hosting.admission import Admission
from verl_turnkey.envs.hosting.process import Child
from verl_turnkey.envs.hosting.restart_budget import Losses
from verl_turnkey.envs.hosting.runner import Declared, Player
from verl_turnkey.envs.hosting.threads import Threaded

CLOSE_SECONDS = 5.0  # an environment that is not needed any more has these to close itself
RESET_KEY, STEP_KEY = "turnkey.env.reset_timeout", "turnkey.env.step_timeout"


@dataclass(eq=False)
class Seat:
    """An environment that exists, and what it may be reused for."""

    place: Threaded | Child
    env_id: str
    made_for: str
    cost: int


class Seats:
    """Makes environments, keeps those that rest as long as there is room, and calls them in turn.

    Args:
        modules, sharers, calls: see ``EnvHost``.
        admission: the room, and where what a class declares is written down.
        losses: counts the threads and processes that a call, or a start, costs.
    """

    def __init__(
        self,
        modules: Sequence[str],
        sharers: int,
        calls: int | Literal["auto"],
        admission: Admission,
        losses: Losses,
    ) -> None:
        self._modules = tuple(modules)
        self._admission = admission
        self._losses = losses
        self._calls = asyncio.Semaphore(capacity.calls_at_once(sharers) if calls == "auto" else calls)
        self._starts = asyncio.Semaphore(capacity.starts_at_once(sharers))
        self._lanes: list[Any] = []
        self._background: set[asyncio.Task[None]] = set()
        self.idle: list[Seat] = []  # least recently used first

    async def take(self, env_id: str, made_for: str, timeout: float) -> Seat:
        """An idle environment that was made for the same, else one to be made. Raises ``EnvironmentFailure``."""
        seat = self._reuse(env_id, made_for) or Seat(await self._new_place(env_id, timeout), env_id, made_for, 0)
        seat.made_for = made_for
        return seat

    def rest(self, seat: Seat) -> None:
        """Keep an environment for another episode."""
        self.idle.append(seat)

    def twin(self, seat: Seat, player: Player) -> Seat:
        """A seat for a copy of a thread-safe environment; its room is taken."""
        cost = self._admission.take(seat.env_id)
        return Seat(Threaded(self._lanes, player), seat.env_id, seat.made_for, cost)

    async def call(self, place: Threaded | Child, method: str, args: tuple[Any, ...], timeout: float, what: str) -> Any:
        """Run environment code, when it is its turn; a thread or process that it costs is counted."""
        key = STEP_KEY if method == "step" else RESET_KEY
        async with self._calls:
            try:
                return await place.call(method, args, timeout, what, key)
            except EnvironmentFailure as failure:
                if failure.kind in ("timeout", "process"):
                    self._losses.lost(str(failure))
                raise

    async def shutdown(self) -> None:
        """Close the idle ones, and wait for all that are being closed."""
        while self.idle:
            self._retire(self.idle.pop().place)
        while self._background:
            await asyncio.wait(self._background)

    def _reuse(self, env_id: str, made_for: str) -> Seat | None:
        """An idle environment for these arguments; else None, with room made for a new one."""
        for position in reversed(range(len(self.idle))):
            if self.idle[position].made_for == made_for:
                return self.idle.pop(position)
        if self._is_full():
            for position, seat in enumerate(self.idle):
                if seat.env_id == env_id:  # it makes the new one: its class is imported already
                    return self.idle.pop(position)
        while self._is_full():
            self._retire(self.idle.pop(0).place)
        return None

    def _is_full(self) -> bool:
        return bool(self.idle) and self._admission.is_exceeded_by(sum(seat.cost for seat in self.idle))

    def _retire(self, place: Threaded | Child) -> None:
        task = asyncio.create_task(place.retire(CLOSE_SECONDS))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _new_place(self, env_id: str, timeout: float) -> Threaded | Child:
        if not self._is_thread_safe(env_id):
            async with self._starts:
                if not self._is_thread_safe(env_id):  # nobody has found out while this one waited
                    try:
                        child = await Child.spawn(self._modules)
                    except EnvironmentFailure as failure:
                        self._losses.lost(str(failure))
                        raise
                    try:
                        declared = await self.call(child, "load", (env_id,), timeout, f"import of {env_id}")
                    except BaseException:
                        child.kill()
                        raise
                    if declared is not None:
                        self._admission.declared[env_id] = declared
                    if not self._is_thread_safe(env_id):
                        return child
                    self._retire(child)
        return Threaded(self._lanes, Player(self._modules))

    def _is_thread_safe(self, env_id: str) -> bool:
        return self._admission.declared.get(env_id, Declared()).thread_safe
