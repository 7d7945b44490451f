"""One host: the environments of many episodes, in threads or in processes of their own, within the host's means."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_turnkey.envs.answers import Info
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.admission import Admission
from verl_turnkey.envs.hosting.restart_budget import Losses
from verl_turnkey.envs.hosting.seats import Seat, Seats
from verl_turnkey.envs.hosting.threads import Threaded


@dataclass(eq=False)
class _Episode:
    """An open episode and how it went, which is what a replay needs."""

    seat: Seat
    kwargs: dict[str, Any]
    seed: int | None
    actions: list[str]
    marks: list[str]  # of the states: after the reset, and after each action
    open: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvHost:
    """Runs environments for many episodes. A plain asyncio class; ``HostPool`` puts it into Ray actors.

    An environment whose class declares ``metadata["thread_safe"] = True`` lives in a thread of this process, any other
    one in a process of its own. What a class declares is found out in a process, where its import can do no harm.

    Args:
        modules: user modules to import first (see ``import_modules``).
        places: open episodes at most; ``auto``: as many as fit into this host's part of the free memory, counted by
            what the classes declare (``metadata["memory_mb"]``). Further ``start`` calls wait, as long as it takes.
        sharers: hosts that share this machine's CPUs and memory, this one included.
        restarts: threads and processes that may be lost (killed at a deadline, or dead) within ten minutes beyond the
            number of episodes that went well; while they are more, every ``start`` fails with kind ``restarts``.
        calls: environment calls that may run at the same time; ``auto``: by the number of CPUs.

    Episodes are named by the caller; a name must never come again. ``timeout`` (seconds) counts from the moment the
    environment's code starts running: waiting for a place, for another call or for an interpreter is not held against
    an episode. All failures are ``EnvironmentFailure``.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        places: int | Literal["auto"] = "auto",
        sharers: int = 1,
        restarts: int = 100,
        calls: int | Literal["auto"] = "auto",
    ) -> None:
        self._losses = Losses(restarts)
        self._admission = Admission(places, sharers, self._losses)
        self._seats = Seats(modules, sharers, calls, self._admission, self._losses)
        self._opening: dict[str, asyncio.Task[Any]] = {}
        self._open: dict[str, _Episode] = {}

    async def start(
        self, name: str, env_id: str, kwargs: Mapping[str, Any] | None, seed: int | None, timeout: float
    ) -> tuple[str, Info]:
        """Open the episode ``name``. Returns the first observation and the info."""
        with self._announced(name):
            cost = await self._admission.admit(env_id)
            episode, observation, info = await self._begin(env_id, dict(kwargs or {}), seed, timeout, cost)
            self._open[name] = episode
            return observation, info

    async def step(self, name: str, action: str, timeout: float) -> tuple[str, float, bool, bool, Info]:
        """Take one step. The episode closes itself when it ends, and when it fails."""
        episode = self._episode(name)
        async with episode.lock:
            if not episode.open:
                raise over(name)
            try:
                result = await self._step(episode, action, timeout)
            except BaseException:
                self._drop(name)
                raise
            if result[2] or result[3]:
                self._rest(name)
            return result

    async def clone(self, name: str, original: str, reset_timeout: float, step_timeout: float) -> None:
        """Open the episode ``name`` in the state that ``original`` is in; both go on independently.

        By the class's own ``clone()`` or, where allowed, ``copy.deepcopy`` when it is thread-safe; else by playing the
        same actions after the same reset in another instance, which must show the same states on the way. A clone
        does not wait for a place: what it waits for might be its own original.
        """
        source = self._episode(original)
        with self._announced(name):
            async with source.lock:
                if not source.open:
                    raise over(original)
                actions, marks = list(source.actions), list(source.marks)
                twin = await self._twin(original, source, reset_timeout)
            if twin is None:
                twin = await self._replay(source, actions, marks, reset_timeout, step_timeout)
            self._open[name] = twin

    async def close(self, name: str) -> None:
        """Give up an episode, also one that is still waiting or starting. Again, or after its end: does nothing."""
        if name in self._opening:
            self._opening[name].cancel()
            await asyncio.wait({self._opening[name]})
        if name in self._open:  # also when it got there in spite of being cancelled
            episode = self._open[name]
            async with episode.lock:
                if episode.open:
                    self._rest(name)

    async def load(self) -> dict[str, int]:
        """Numbers of open episodes, of idle environments, of episodes that wait for a place, and of the process."""
        numbers = {"open": len(self._open), "idle": len(self._seats.idle), "waiting": self._admission.waiting}
        return {**numbers, "process": os.getpid()}

    async def shutdown(self) -> None:
        """End everything that runs here; nothing may be started after it."""
        for task in list(self._opening.values()):
            task.cancel()
        for name in list(self._open):
            self._drop(name)
        await self._seats.shutdown()

    async def _begin(
        self, env_id: str, kwargs: dict[str, Any], seed: int | None, timeout: float, cost: int
    ) -> tuple[_Episode, str, Info]:
        """Start an episode, on an idle environment or a new one. ``cost`` is taken already; a failure gives it back."""
        seat = None
        try:
            seat = await self._seats.take(env_id, repr((env_id, sorted(kwargs.items()))), timeout)
            cost = seat.cost = self._admission.settle(env_id, cost)
            what = f"reset of {_named(env_id, kwargs)}"
            observation, info = await self._seats.call(seat.place, "start", (env_id, kwargs, seed), timeout, what)
        except BaseException:
            if seat is not None:
                seat.place.kill()
            self._admission.leave(env_id, cost)
            raise
        return _Episode(seat, kwargs, seed, [], [_mark(observation, info)]), observation, info

    @contextlib.contextmanager
    def _announced(self, name: str) -> Iterator[None]:
        """For as long as an episode is being opened, ``close`` cancels that."""
        if name in self._opening or name in self._open:
            raise ValueError(f"there is an episode {name} already")
        task = asyncio.current_task()
        assert task is not None
        self._opening[name] = task
        try:
            yield
        finally:
            del self._opening[name]

    def _episode(self, name: str) -> _Episode:
        if name not in self._open:
            raise over(name)
        return self._open[name]

    async def _step(self, episode: _Episode, action: str, timeout: float) -> tuple[str, float, bool, bool, Info]:
        what = f"step of {_named(episode.seat.env_id, episode.kwargs)}"
        result = await self._seats.call(episode.seat.place, "step", (action,), timeout, what)
        episode.actions.append(action)
        episode.marks.append(_mark(result[0], result[4]))
        return result

    def _drop(self, name: str) -> None:
        """End an episode and forget its environment: nobody knows what state that is in."""
        if episode := self._ended(name):
            episode.seat.place.kill()

    def _rest(self, name: str) -> None:
        """End an episode and keep its environment for another one."""
        if episode := self._ended(name):
            self._seats.rest(episode.seat)
            if episode.actions:
                self._losses.gained()

    def _ended(self, name: str) -> _Episode | None:
        episode = self._open.pop(name, None)  # none: the host is being shut down
        if episode is not None:
            episode.open = False
            self._admission.leave(episode.seat.env_id, episode.seat.cost)
        return episode

    async def _twin(self, name: str, original: _Episode, timeout: float) -> _Episode | None:
        """A copy within this process, or None when that is not possible."""
        seat = original.seat
        if not isinstance(seat.place, Threaded):
            return None
        try:
            player = await self._seats.call(seat.place, "twin", (), timeout, f"clone of {seat.env_id}")
        except BaseException as error:
            if not isinstance(error, EnvironmentFailure) or error.kind == "timeout":
                self._drop(name)  # a thread is still busy with it
            raise
        if player is None:
            return None
        twin = self._seats.twin(seat, player)
        return _Episode(twin, original.kwargs, original.seed, list(original.actions), list(original.marks))

    async def _replay(
        self, original: _Episode, actions: list[str], marks: list[str], reset_timeout: float, step_timeout: float
    ) -> _Episode:
        env_id = original.seat.env_id
        if original.seed is None:
            raise EnvironmentFailure("clone", "an episode that was started without a seed cannot be replayed")
        cost = self._admission.take(env_id)
        twin, _, _ = await self._begin(env_id, original.kwargs, original.seed, reset_timeout, cost)
        try:
            for n in range(len(marks)):
                if twin.marks[n] != marks[n]:
                    where = f"after {n} of {len(actions)} actions" if n else "after its reset"
                    raise EnvironmentFailure(
                        "clone",
                        f"{_named(env_id, original.kwargs)} with seed {original.seed} came to another state {where} "
                        "when it was played again: it does not draw all its chance from the seed of its reset",
                    )
                if n < len(actions):
                    _, _, terminated, truncated, _ = await self._step(twin, actions[n], step_timeout)
                    if terminated or truncated:
                        raise EnvironmentFailure(
                            "clone", f"{_named(env_id, original.kwargs)} ended earlier when it was played again"
                        )
        except BaseException:
            twin.seat.place.kill()
            self._admission.leave(env_id, twin.seat.cost)
            raise
        return twin


def over(name: str) -> EnvironmentFailure:
    """The failure of a call on an episode that is not open."""
    return EnvironmentFailure("closed", f"episode {name} is over: it ended, failed, timed out or was closed")


def _named(env_id: str, kwargs: Mapping[str, Any]) -> str:
    return f"{env_id} {kwargs}" if kwargs else env_id


def _mark(observation: str, info: Info) -> str:
    """What two episodes in the same state have in common: the state's key, else the observation."""
    key = info["state_key"]
    return hashlib.sha1(repr(observation if key is None else ("key", key)).encode()).hexdigest()
