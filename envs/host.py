"""One host: the environments of many episodes, in threads or in processes of their own, within the host's means."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_turnkey.envs import sizing
from verl_turnkey.envs.budget import Losses
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.lanes import Threaded
from verl_turnkey.envs.player import Declared, Info, Player
from verl_turnkey.envs.processes import Child

CLOSE_SECONDS = 5.0  # an environment that is not needed any more has these to close itself
RESET_KEY, STEP_KEY = "turnkey.env.reset_timeout", "turnkey.env.step_timeout"


@dataclass(eq=False)
class _Seat:
    """An environment that exists, and what it may be reused for."""

    place: Threaded | Child
    env_id: str
    made_for: str
    cost: int


@dataclass(eq=False)
class _Episode:
    """An open episode and how it went, which is what a replay needs."""

    seat: _Seat
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
        restarts: threads and processes that may be lost (killed at a deadline, or dead) beyond the number of episodes
            that went well; one more and the host takes no more episodes.
        calls: environment calls that may run at the same time; None: by the number of CPUs.

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
        calls: int | None = None,
    ) -> None:
        if places != "auto" and places < 1:
            raise ValueError(f"places must be auto or positive, not {places}")
        self._modules = tuple(modules)
        self._counting = places != "auto"
        self._room = sizing.memory_for_a_host_mb(sharers) if places == "auto" else places
        self._taken = 0  # of the room, by open episodes; idle environments take of what is left
        self._waiting: deque[tuple[str, asyncio.Future[int]]] = deque()
        self._calls = asyncio.Semaphore(calls or sizing.calls_at_once(sharers))
        self._starts = asyncio.Semaphore(sizing.starts_at_once(sharers))
        self._losses = Losses("environment processes or threads", restarts)
        self._declared: dict[str, Declared] = {}
        self._asked: set[str] = set()  # ids of which an episode is about to find out
        self._lanes: list[Any] = []
        self._opening: dict[str, asyncio.Task[Any]] = {}
        self._open: dict[str, _Episode] = {}
        self._idle: list[_Seat] = []  # least recently used first
        self._background: set[asyncio.Task[None]] = set()

    async def start(
        self, name: str, env_id: str, kwargs: Mapping[str, Any] | None, seed: int | None, timeout: float
    ) -> tuple[str, Info]:
        """Open the episode ``name``. Returns the first observation and the info."""
        self._losses.check()
        with self._announced(name):
            cost = await self._admit(env_id)
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
        waiting = sum(not place.done() for _, place in self._waiting)
        return {"open": len(self._open), "idle": len(self._idle), "waiting": waiting, "process": os.getpid()}

    async def shutdown(self) -> None:
        """End everything that runs here; nothing may be started after it."""
        for task in list(self._opening.values()):
            task.cancel()
        for name in list(self._open):
            self._drop(name)
        self._retire_idle(lambda: bool(self._idle))
        while self._background:
            await asyncio.wait(self._background)

    # --- places -----------------------------------------------------------------------------------------------------

    async def _admit(self, env_id: str) -> int:
        """Wait, first come first served, for room for one more environment. Returns what it takes."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((env_id, place))
        self._let_in()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # let in and cancelled at the same moment
                self._taken -= place.result()
                self._asked.discard(env_id)
            self._let_in()  # whom this one kept waiting
            raise

    def _let_in(self) -> None:
        while self._waiting:
            env_id, place = self._waiting[0]
            if not place.cancelled():
                unknown = not self._counting and env_id not in self._declared
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
        return 1 if self._counting else self._declared.get(env_id, Declared()).memory_mb

    def _leave(self, cost: int) -> None:
        self._taken -= cost
        self._let_in()

    # --- environments -----------------------------------------------------------------------------------------------

    async def _begin(
        self, env_id: str, kwargs: dict[str, Any], seed: int | None, timeout: float, cost: int
    ) -> tuple[_Episode, str, Info]:
        """Start an episode, on an idle environment or a new one. ``cost`` is taken already; a failure gives it back."""
        seat = None
        try:
            made_for = repr((env_id, sorted(kwargs.items())))
            seat = self._reuse(env_id, made_for)
            if seat is None:
                seat = _Seat(await self._new_place(env_id, timeout), env_id, made_for, cost)
            seat.made_for = made_for
            seat.cost = self._cost(env_id)  # known by now
            self._taken += seat.cost - cost
            cost = seat.cost
            self._asked.discard(env_id)
            self._let_in()  # those who waited for what the class declares
            what = f"reset of {_named(env_id, kwargs)}"
            observation, info = await self._call(seat.place, "start", (env_id, kwargs, seed), timeout, what)
        except BaseException:
            if seat is not None:
                seat.place.kill()
            self._asked.discard(env_id)
            self._leave(cost)
            raise
        return _Episode(seat, kwargs, seed, [], [_mark(observation, info)]), observation, info

    def _reuse(self, env_id: str, made_for: str) -> _Seat | None:
        """An idle environment for these arguments; else None, with room made for a new one."""
        for position in reversed(range(len(self._idle))):
            if self._idle[position].made_for == made_for:
                return self._idle.pop(position)
        if self._is_full():
            for position, seat in enumerate(self._idle):
                if seat.env_id == env_id:  # it makes the new one: its class is imported already
                    return self._idle.pop(position)
        self._retire_idle(self._is_full)
        return None

    def _is_full(self) -> bool:
        return bool(self._idle) and self._taken + sum(seat.cost for seat in self._idle) > self._room

    def _retire_idle(self, condition: Callable[[], bool]) -> None:
        while condition():
            self._retire(self._idle.pop(0).place)

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
                        declared = await self._call(child, "load", (env_id,), timeout, f"import of {env_id}")
                    except BaseException:
                        child.kill()
                        raise
                    if declared is not None:
                        self._declared[env_id] = declared
                    if not self._is_thread_safe(env_id):
                        return child
                    self._retire(child)
        return Threaded(self._lanes, Player(self._modules))

    def _is_thread_safe(self, env_id: str) -> bool:
        return self._declared.get(env_id, Declared()).thread_safe

    async def _call(
        self, place: Threaded | Child, method: str, args: tuple[Any, ...], timeout: float, what: str
    ) -> Any:
        """Run environment code, when it is its turn; a thread or process that it costs is counted."""
        key = STEP_KEY if method == "step" else RESET_KEY
        async with self._calls:
            try:
                return await place.call(method, args, timeout, what, key)
            except EnvironmentFailure as failure:
                if failure.kind in ("timeout", "process"):
                    self._losses.lost(str(failure))
                raise

    # --- episodes ---------------------------------------------------------------------------------------------------

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
        result = await self._call(episode.seat.place, "step", (action,), timeout, what)
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
            self._idle.append(episode.seat)
            if episode.actions:
                self._losses.gained()

    def _ended(self, name: str) -> _Episode | None:
        episode = self._open.pop(name, None)  # none: the host is being shut down
        if episode is not None:
            episode.open = False
            self._leave(episode.seat.cost)
        return episode

    async def _twin(self, name: str, original: _Episode, timeout: float) -> _Episode | None:
        """A copy within this process, or None when that is not possible."""
        seat = original.seat
        if not isinstance(seat.place, Threaded):
            return None
        try:
            player = await self._call(seat.place, "twin", (), timeout, f"clone of {seat.env_id}")
        except BaseException as error:
            if not isinstance(error, EnvironmentFailure) or error.kind == "timeout":
                self._drop(name)  # a thread is still busy with it
            raise
        if player is None:
            return None
        self._taken += seat.cost
        place = Threaded(self._lanes, player)
        return _Episode(
            _Seat(place, seat.env_id, seat.made_for, seat.cost),
            original.kwargs,
            original.seed,
            list(original.actions),
            list(original.marks),
        )

    async def _replay(
        self, original: _Episode, actions: list[str], marks: list[str], reset_timeout: float, step_timeout: float
    ) -> _Episode:
        env_id = original.seat.env_id
        if original.seed is None:
            raise EnvironmentFailure("clone", "an episode that was started without a seed cannot be replayed")
        cost = self._cost(env_id)
        self._taken += cost
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
            self._leave(twin.seat.cost)
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
