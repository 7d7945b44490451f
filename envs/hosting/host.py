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
from verl_turnkey.envs.hosting import capacity
from verl_turnkey.envs.hosting.batches import Answer, BatchServer, Call
from verl_turnkey.envs.hosting.capacity import Admission, Measures, RestartBudget
from verl_turnkey.envs.hosting.processes import Templates
from verl_turnkey.envs.hosting.runner import Declared, EnvRunner
from verl_turnkey.envs.hosting.workers import ProcessWorker, ThreadWorker

CLOSE_SECONDS = 5.0  # for the ``close`` of an environment that is no longer needed
IDLE_SECONDS = 3600.0  # longest time that an environment is kept for another episode: more than an update takes
LOOK_SECONDS = 60.0  # between two looks at what is idle
GROWTH = 2.0  # a process that has grown by this factor since its first episode is not kept
RESET_KEY, STEP_KEY = "turnkey.env.reset_timeout", "turnkey.env.step_timeout"


Worker = ThreadWorker | ProcessWorker


@dataclass(eq=False)
class Instance:
    """An environment, where it runs, and for which id and arguments it was made."""

    worker: Worker
    env_id: str
    made_for: str
    cost: int
    first_mb: float = 0.0
    """memory of its process after its first episode"""
    released: float = 0.0
    """when its last episode ended; 0: it had none"""


class InstancePool:
    """Makes environments, keeps idle ones as long as there is room, and limits how many are called at once.

    Args:
        modules, sharers, calls: see ``EnvHost``.
        admission: the host's capacity, and what the classes declare.
        budget: spent on the threads and processes that are lost.
    """

    def __init__(
        self,
        modules: Sequence[str],
        sharers: int,
        calls: int | Literal["auto"],
        admission: Admission,
        budget: RestartBudget,
    ) -> None:
        self._modules = tuple(modules)
        self._templates = Templates(self._modules)
        self._admission = admission
        self._budget = budget
        self._sharers = sharers
        self._calls = asyncio.Semaphore(capacity.calls_at_once(sharers) if calls == "auto" else calls)
        self._starts = asyncio.Semaphore(capacity.starts_at_once(sharers))
        self._idle_threads: list[Any] = []
        self._background: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self.idle: list[Instance] = []  # least recently used first
        self.measures = Measures()

    async def acquire(self, env_id: str, made_for: str, timeout: float, used: bool = True) -> Instance:
        """An idle environment that was made for the same arguments, else a new one. Raises ``EnvironmentFailure``.

        ``used``: False for a new one in the place of one that is lost.
        """
        instance = self._reuse(env_id, made_for) if used else None
        if instance is None:
            return Instance(await self._new_worker(env_id, timeout), env_id, made_for, 0)
        instance.made_for = made_for
        return instance

    def release(self, instance: Instance) -> None:
        """Keep an environment, idle, for another episode, unless its process has grown."""
        if isinstance(instance.worker, ProcessWorker):
            memory = instance.worker.resident_mb()
            instance.first_mb = instance.first_mb or memory
            declared = self._admission.declared.get(instance.env_id, Declared()).memory_mb
            if memory > GROWTH * max(declared, instance.first_mb):
                self._retire(instance.worker)
                return
        instance.released = time.monotonic()
        self.idle.append(instance)
        if self._sweep is None:
            self._sweep_in(LOOK_SECONDS)

    def clone(self, instance: Instance, runner: EnvRunner) -> Instance:
        """An instance for the copy of a thread-safe environment, which ``runner`` holds; its room is taken."""
        cost = self._admission.take(instance.env_id)
        return Instance(ThreadWorker(self._idle_threads, runner), instance.env_id, instance.made_for, cost)

    async def call(self, worker: Worker, method: str, args: tuple[Any, ...], timeout: float, what: str) -> Any:
        """Run environment code within the limit on calls. A lost thread or process is spent from the budget."""
        key = STEP_KEY if method == "step" else RESET_KEY
        async with self._calls:
            try:
                with self.measures.timed("reset" if method == "start" else method):
                    return await worker.call(method, args, timeout, what, key)
            except EnvironmentFailure as failure:
                if failure.kind in ("timeout", "process"):
                    self.measures.lost += 1
                    self._budget.spend(str(failure))
                raise

    async def shutdown(self) -> None:
        """Close the idle instances, and wait until all are closed."""
        if self._sweep is not None:
            self._sweep.cancel()
        while self.idle:
            self._retire(self.idle.pop().worker)
        while self._background:
            await asyncio.wait(self._background)
        await self._templates.close()

    def _sweep_in(self, seconds: float) -> None:
        self._sweep = asyncio.get_running_loop().call_later(seconds, self._retire_old)

    def _retire_old(self) -> None:
        """Close what has been idle for too long, and while memory is scarce what has been idle longest."""
        self._sweep, now = None, time.monotonic()
        while self.idle and self.idle[0].released + IDLE_SECONDS <= now:
            self._retire(self.idle.pop(0).worker)
        lack = capacity.lacking_memory_mb() / self._sharers if self.idle else 0.0
        while self.idle and lack > 0:
            lack -= self._memory_mb(self.idle[0])
            self._retire(self.idle.pop(0).worker)
        if self.idle:
            self._sweep_in(LOOK_SECONDS)

    def _memory_mb(self, instance: Instance) -> float:
        """Memory that its end frees; less for a copy, which shares some. The next look frees what is still missing."""
        if isinstance(instance.worker, ProcessWorker):
            return instance.worker.resident_mb()
        return self._admission.declared.get(instance.env_id, Declared()).memory_mb

    def _reuse(self, env_id: str, made_for: str) -> Instance | None:
        """An idle environment for these arguments; else None, with room made for a new one."""
        for position in reversed(range(len(self.idle))):
            if self.idle[position].made_for == made_for:
                return self.idle.pop(position)
        if self._is_full():
            for position, instance in enumerate(self.idle):
                if instance.env_id == env_id:  # its process has imported the class
                    return self.idle.pop(position)
        while self._is_full():
            self._retire(self.idle.pop(0).worker)
        return None

    def _is_full(self) -> bool:
        return bool(self.idle) and self._admission.is_exceeded_by(sum(instance.cost for instance in self.idle))

    def _retire(self, worker: Worker) -> None:
        task = asyncio.create_task(worker.retire(CLOSE_SECONDS))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _new_worker(self, env_id: str, timeout: float) -> Worker:
        if not self._is_thread_safe(env_id):
            async with self._starts:
                if not self._is_thread_safe(env_id):  # nor found thread-safe by another start meanwhile
                    # Of a class that turns out to be thread-safe there is one process only, which needs no template.
                    templates = self._templates if env_id in self._admission.declared else None
                    try:
                        worker = await ProcessWorker.spawn(self._modules, templates)
                    except EnvironmentFailure as failure:
                        self._budget.spend(str(failure))
                        raise
                    try:
                        declared = await self.call(worker, "load", (env_id,), timeout, f"import of {env_id}")
                    except BaseException:
                        worker.kill()
                        raise
                    if declared is not None:
                        self._admission.declared[env_id] = declared
                    if not self._is_thread_safe(env_id):
                        return worker
                    self._retire(worker)
        return ThreadWorker(self._idle_threads, EnvRunner(self._modules))

    def _is_thread_safe(self, env_id: str) -> bool:
        return self._admission.declared.get(env_id, Declared()).thread_safe


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
