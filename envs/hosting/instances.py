"""The environment instances of a host: making, reusing and calling them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting import capacity
from verl_turnkey.envs.hosting.admission import Admission
from verl_turnkey.envs.hosting.measures import Measures
from verl_turnkey.envs.hosting.process import ProcessWorker
from verl_turnkey.envs.hosting.restart_budget import RestartBudget
from verl_turnkey.envs.hosting.runner import Declared, EnvRunner
from verl_turnkey.envs.hosting.template import Templates
from verl_turnkey.envs.hosting.threads import ThreadWorker

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
