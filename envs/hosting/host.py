"""One host: runs the environments of many episodes, in threads or in processes, within its share of the machine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_turnkey.envs.answers import Answer as EnvOutput
from verl_turnkey.envs.answers import Info
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.admission import Admission
from verl_turnkey.envs.hosting.batches import Answer, BatchServer, Call
from verl_turnkey.envs.hosting.instances import Instance, InstancePool
from verl_turnkey.envs.hosting.restart_budget import RestartBudget
from verl_turnkey.envs.hosting.threads import ThreadWorker


@dataclass(eq=False)
class _Episode:
    """An open episode and its history, which a replay needs."""

    instance: Instance
    kwargs: dict[str, Any]
    seed: int | None
    actions: list[str]
    states: list[str]  # fingerprints: after the reset, and after each action
    open: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvHost:
    """Runs environments for many episodes. A plain asyncio class; ``HostPool`` puts it into Ray actors.

    An environment whose class declares ``metadata["thread_safe"] = True`` lives in a thread of this process, any other
    one in a process of its own. To read what it declares, the class is first imported in such a process, where the
    import can do no harm.

    Args:
        modules: user modules to import first (see ``import_modules``).
        places: open episodes at most; ``auto``: as many as fit into this host's part of the free memory, counted by
            what the classes declare (``metadata["memory_mb"]``). Further ``start`` calls wait, without a deadline.
        sharers: hosts that share this machine's CPUs and memory, this one included.
        restarts: threads and processes that may be lost (killed at a deadline, or dead) within ten minutes, beyond the
            number of episodes that ended without failure; while more are lost, every ``start`` fails (``restarts``).
        calls: environment calls that may run at the same time; ``auto``: by the number of CPUs.
        clones: of an episode that are open at the same time at most, for which ``places="auto"`` leaves room.

    The caller names the episodes, each name once. ``timeout`` (seconds) counts from the moment the environment's code
    starts: waiting for room, for another call or for an interpreter does not count. All failures are
    ``EnvironmentFailure``.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        places: int | Literal["auto"] = "auto",
        sharers: int = 1,
        restarts: int = 100,
        calls: int | Literal["auto"] = "auto",
        clones: int = 0,
    ) -> None:
        self._budget = RestartBudget(restarts)
        self._admission = Admission(places, sharers, self._budget, clones)
        self._instances = InstancePool(modules, sharers, calls, self._admission, self._budget)
        self._opening: dict[str, asyncio.Task[Any]] = {}
        self._open: dict[str, _Episode] = {}
        self._batches = BatchServer(self)

    async def exchange(self, caller: str, window: float, batch: Sequence[Call]) -> list[Answer]:
        """Many calls of the methods below in one; see :class:`BatchServer`."""
        return await self._batches.exchange(caller, window, batch)

    async def start(
        self, name: str, env_id: str, kwargs: Mapping[str, Any] | None, seed: int | None, timeout: float
    ) -> tuple[str, Info, float]:
        """Open the episode ``name``. Returns the first observation, the info, and the seconds waited for room."""
        with self._cancellable(name):
            started = time.monotonic()
            cost = await self._admission.admit(env_id)
            waited = time.monotonic() - started
            episode, observation, info = await self._begin(env_id, dict(kwargs or {}), seed, timeout, cost)
            self._open[name] = episode
            return observation, info, waited

    async def step(self, name: str, action: str, timeout: float) -> tuple[str, float, bool, bool, Info]:
        """Take one step. The episode closes itself when it ends, and when it fails."""
        episode = self._episode(name)
        async with episode.lock:
            if not episode.open:
                raise not_open(name)
            try:
                result = await self._step(episode, action, timeout)
            except BaseException:
                self._drop(name)
                raise
            if result[2] or result[3]:
                self._release(name)
            return result

    async def clone(self, name: str, original: str, reset_timeout: float, step_timeout: float) -> None:
        """Open the episode ``name`` in the state that ``original`` is in; both go on independently.

        A thread-safe environment is copied by its ``clone()``, or by ``copy.deepcopy`` where its metadata allows that.
        Any other one plays the same actions after the same reset in another instance, and must show the same states. A
        clone does not wait for room, which its own original may occupy.
        """
        source = self._episode(original)
        with self._cancellable(name):
            async with source.lock:
                if not source.open:
                    raise not_open(original)
                actions, states = list(source.actions), list(source.states)
                clone = await self._clone_in_process(original, source, reset_timeout)
            if clone is None:
                clone = await self._replay(source, actions, states, reset_timeout, step_timeout)
            self._open[name] = clone

    async def close(self, name: str) -> None:
        """Close an episode, even one that is waiting or starting; does nothing after its end."""
        if name in self._opening:
            self._opening[name].cancel()
            await asyncio.wait({self._opening[name]})
        if name in self._open:  # perhaps opened before the cancellation took effect
            episode = self._open[name]
            async with episode.lock:
                if episode.open:
                    self._release(name)

    async def load(self) -> dict[str, int]:
        """Numbers of open episodes, idle environments and waiting episodes, and the process id."""
        numbers = {"open": len(self._open), "idle": len(self._instances.idle), "waiting": self._admission.waiting}
        return {**numbers, "process": os.getpid()}

    async def measure(self) -> dict[str, Any]:
        """``load``, and what the instances measured since the last call of this method (:class:`Measures`)."""
        return {**await self.load(), **self._instances.measures.take()}

    async def shutdown(self) -> None:
        """End all episodes and environments; no episode may be started afterwards."""
        for task in list(self._opening.values()):
            task.cancel()
        for name in list(self._open):
            self._drop(name)
        await self._instances.shutdown()

    async def _begin(
        self, env_id: str, kwargs: dict[str, Any], seed: int | None, timeout: float, cost: int
    ) -> tuple[_Episode, str, Info]:
        """Start an episode in an idle or a new environment. ``cost``: the room already taken; a failure frees it.

        A reset that fails in a used one is tried in a new one: what earlier episodes left behind may be the cause. Not
        after a missed deadline: a stall of the whole machine would exceed it again.
        """
        made_for, start = repr((env_id, sorted(kwargs.items()))), (env_id, kwargs, seed)
        what, used = f"reset of {_named(env_id, kwargs)}", True
        while True:
            instance = None
            try:
                instance = await self._instances.acquire(env_id, made_for, timeout, used)
                cost = instance.cost = self._admission.settle(env_id, cost)
                observation, info = await self._instances.call(instance.worker, "start", start, timeout, what)
            except BaseException as error:
                if instance is not None:
                    instance.worker.kill()
                    if instance.released and isinstance(error, EnvironmentFailure) and error.kind != "timeout":
                        used = False
                        continue
                self._admission.leave(env_id, cost)
                raise
            return _Episode(instance, kwargs, seed, [], [fingerprint(observation, info)]), observation, info

    @contextlib.contextmanager
    def _cancellable(self, name: str) -> Iterator[None]:
        """While the episode is being opened, ``close`` can cancel that."""
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
            raise not_open(name)
        return self._open[name]

    async def _step(self, episode: _Episode, action: str, timeout: float) -> tuple[str, float, bool, bool, Info]:
        what = f"step of {_named(episode.instance.env_id, episode.kwargs)}"
        result = await self._instances.call(episode.instance.worker, "step", (action,), timeout, what)
        episode.actions.append(action)
        episode.states.append(fingerprint(result[0], result[4]))
        return result

    def _drop(self, name: str) -> None:
        """End an episode and discard its environment, whose state is unknown."""
        if episode := self._remove(name):
            episode.instance.worker.kill()

    def _release(self, name: str) -> None:
        """End an episode and keep its environment for another one."""
        if episode := self._remove(name):
            self._instances.release(episode.instance)
            if episode.actions:
                self._budget.refund()

    def _remove(self, name: str) -> _Episode | None:
        episode = self._open.pop(name, None)  # None: the host is being shut down
        if episode is not None:
            episode.open = False
            self._admission.leave(episode.instance.env_id, episode.instance.cost)
        return episode

    async def _clone_in_process(self, name: str, original: _Episode, timeout: float) -> _Episode | None:
        """A clone by the class's own ``clone()`` or a deep copy; None without either, or in another process."""
        instance = original.instance
        if not isinstance(instance.worker, ThreadWorker):
            return None
        try:
            runner = await self._instances.call(instance.worker, "clone", (), timeout, f"clone of {instance.env_id}")
        except BaseException as error:
            if not isinstance(error, EnvironmentFailure) or error.kind == "timeout":
                self._drop(name)  # an abandoned thread may still be busy with it
            raise
        if runner is None:
            return None
        clone = self._instances.clone(instance, runner)
        return _Episode(clone, original.kwargs, original.seed, list(original.actions), list(original.states))

    async def _replay(
        self, original: _Episode, actions: list[str], states: list[str], reset_timeout: float, step_timeout: float
    ) -> _Episode:
        env_id = original.instance.env_id
        if original.seed is None:
            raise EnvironmentFailure("clone", "an episode that was started without a seed cannot be replayed")
        cost = self._admission.take(env_id)
        clone, _, _ = await self._begin(env_id, original.kwargs, original.seed, reset_timeout, cost)
        try:
            for n in range(len(states)):
                if clone.states[n] != states[n]:
                    where = f"after {n} of {len(actions)} actions" if n else "after its reset"
                    raise EnvironmentFailure(
                        "clone",
                        f"{_named(env_id, original.kwargs)} with seed {original.seed} came to another state {where} "
                        "when it was replayed: not all of its randomness comes from the seed of its reset",
                    )
                if n < len(actions):
                    _, _, terminated, truncated, _ = await self._step(clone, actions[n], step_timeout)
                    if terminated or truncated:
                        raise EnvironmentFailure(
                            "clone", f"{_named(env_id, original.kwargs)} ended earlier when it was replayed"
                        )
        except BaseException:
            clone.instance.worker.kill()
            self._admission.leave(env_id, clone.instance.cost)
            raise
        return clone


def not_open(name: str) -> EnvironmentFailure:
    """The failure of a call on an episode that is not open."""
    return EnvironmentFailure("closed", f"episode {name} is over: it ended, failed, timed out or was closed")


def _named(env_id: str, kwargs: Mapping[str, Any]) -> str:
    return f"{env_id} {kwargs}" if kwargs else env_id


def fingerprint(observation: str, info: Info) -> str:
    """Equal for two episodes in the same state: a hash of the state's key, or of text and images without one."""
    answer = EnvOutput(observation, info)
    key = answer.observation_key if answer.state_key is None else ("key", answer.state_key)
    return hashlib.sha1(repr(key).encode()).hexdigest()
