"""The client of the environment hosts: batched calls to the Ray actors in which the environments live.

An environment's code may block, hang, crash or be unsafe in threads. It therefore runs in other processes than the
agent loops (see ``EnvHost``), with a deadline per call. A failure ends one episode with an ``EnvironmentFailure``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from verl_turnkey.envs.answers import Answer, Info
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting import capacity
from verl_turnkey.envs.hosting.batches import BatchedCalls
from verl_turnkey.envs.hosting.host import EnvHost, not_open

LIVENESS_SECONDS = 60.0  # without an answer before a host is probed, and for the answer to the probe
PAUSE_SECONDS = 30.0  # least time from a host's creation, or its exceeding the restart budget, to its successor
TRIES = 3  # hosts that one start may lose: an environment that kills its host at the start must not kill them all
logger = logging.getLogger(__name__)


class Episode:
    """An open episode in a host. ``observation`` and ``info`` are those of its start; ``step`` until it ends.

    ``waited``: seconds that its start waited for a host and for room in it.
    """

    def __init__(
        self, pool: HostPool, host: _Host, name: str, observation: str, info: Info, waited: float = 0.0
    ) -> None:
        self._pool, self._host, self._name = pool, host, name
        self._open = True
        self._latest = (observation, info)
        self.observation = observation
        self.info = info
        self.waited = waited

    async def step(self, action: str) -> Answer:
        """One step. Raises ``EnvironmentFailure``, after which the episode is over."""
        if not self._open:
            raise not_open(self._name)
        try:
            result = await self._pool.call(self._host, "step", self._name, action, self._pool.step_timeout)
        except EnvironmentFailure:
            self._end()
            raise
        observation, reward, terminated, truncated, info = result
        self._latest = (observation, info)
        if terminated or truncated:
            self._end()
        return Answer(observation, info, reward, terminated, truncated)

    async def clone(self) -> Episode:
        """Another open episode in the same state: its ``observation`` and ``info`` are the latest of this one.

        Thread-safe environments copy themselves (a method ``clone()``, or ``metadata["deepcopy"] = True``); all others
        replay this episode's actions after a reset with the same seed. A clone is admitted at once, even when the host
        is full.

        Raises:
            EnvironmentFailure: of kind ``clone`` when the replay shows other states than this episode did, or the
                class's own clone fails; of another kind when the environment fails. This episode goes on, except
                when the class's own clone exceeds its deadline.
        """
        if not self._open:
            raise not_open(self._name)
        return await self._pool.clone(self, *self._latest)

    def close(self) -> None:
        """Close the episode without waiting for the host. Closing it twice, or after its end, does nothing."""
        if self._open:
            self._host.tell_close(self._name)
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._pool.leave(self._host)


@dataclass(eq=False)
class _Host:
    """One Ray actor. Its successor is another ``_Host``, so that an episode keeps the actor that opened it."""

    number: int
    generation: int
    actor: Any
    created: float
    load: int = 0  # episodes that are open or being opened
    successor_due: float | None = None  # None: it takes episodes; else the time of its replacement
    _calls: BatchedCalls | None = None

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """The future answer of a method of the actor."""
        if self._calls is None or self._calls.loop is not asyncio.get_running_loop():
            remote = self.actor.exchange.remote
            self._calls = BatchedCalls(lambda *batch: remote(*batch).future(), lambda: self.load)
        return self._calls.call(method, *args)

    def tell_close(self, name: str) -> None:
        """Ask the actor to close an episode, without waiting."""
        assert self._calls is not None  # it opened the episode
        self._calls.tell("close", name)


class HostPool:
    """Finds the named hosts, or creates them, and opens each episode where the fewest are open.

    A host that dies costs the episodes open in it. Another one replaces it, and a start that was under way is tried
    again. A host that exceeds its restart budget gets no more episodes and is replaced after a pause; those open in it
    go on to their end.

    Processes with the same ``namespace_tag`` share the hosts. To be used in one asyncio loop of a process that is
    connected to Ray.

    Args:
        hosts: number of host processes (Ray actors that reserve no CPU); ``auto``: by this machine's CPUs.
        namespace_tag: distinguishes runs that share a Ray cluster.
        places: open episodes per host; ``auto``: by free memory and what the environments declare.
        sharers: pools on this machine, which share its CPUs and memory.
        restarts, calls, clones: see ``EnvHost``.
        step_timeout, reset_timeout: seconds; ``reset_timeout`` includes importing and making the environment.
        modules: user modules that the hosts import.
    """

    def __init__(
        self,
        hosts: int | Literal["auto"],
        namespace_tag: str,
        places: int | Literal["auto"] = "auto",
        sharers: int = 1,
        restarts: int = 100,
        step_timeout: float = 30.0,
        reset_timeout: float = 120.0,
        modules: Sequence[str] = (),
        calls: int | Literal["auto"] = "auto",
        clones: int = 0,
    ) -> None:
        count = capacity.hosts(sharers) if hosts == "auto" else hosts
        if count < 1:
            raise ValueError(f"turnkey.env.hosts must be auto or at least 1, not {hosts}")
        self.step_timeout = step_timeout
        self.reset_timeout = reset_timeout
        self._tag = namespace_tag
        self._arguments = (tuple(modules), places, sharers * count, restarts, calls, clones)
        self._hosts = [self._new(number, 0) for number in range(count)]
        self._turn = os.getpid()  # breaks ties in turn, in each process from another host on

    def _new(self, number: int, generation: int) -> _Host:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        host = ray.remote(EnvHost).options(
            # On the node of its agent loop. Not soft: Ray deals actors that reserve nothing at random then.
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            name=f"turnkey_env_host_{self._tag}_{number}_{generation}",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=10_000,  # waiting starts must not block the steps of other episodes
        )
        return _Host(number, generation, host.remote(*self._arguments), time.monotonic())

    async def start(self, env_id: str, kwargs: Mapping[str, Any] | None, seed: int | None) -> Episode:
        """Open an episode; waits for a host and for room in it. Raises ``EnvironmentFailure``."""
        lost, picking = 0, 0.0
        while True:
            started = time.monotonic()
            host, name = await self._pick(), uuid4().hex
            picking += time.monotonic() - started
            try:
                arguments = (name, env_id, dict(kwargs or {}), seed, self.reset_timeout)
                observation, info, waited = await self._open(host, "start", *arguments)
                return Episode(self, host, name, observation, info, picking + waited)
            except EnvironmentFailure as failure:
                lost += failure.kind == "host"
                if failure.kind not in ("host", "restarts") or lost == TRIES:
                    raise

    async def clone(self, original: Episode, observation: str, info: Info) -> Episode:
        """See ``Episode.clone``."""
        host, name = original._host, uuid4().hex
        await self._open(host, "clone", name, original._name, self.reset_timeout, self.step_timeout)
        return Episode(self, host, name, observation, {**info, "task": original.info["task"]})

    async def _pick(self) -> _Host:
        """The host with the fewest episodes among those that take any; waits until there is one."""
        while True:
            now = time.monotonic()
            for host in list(self._hosts):
                if host.successor_due is not None and host.successor_due <= now:
                    self._hosts[host.number] = self._new(host.number, host.generation + 1)
                    self._end_unless_used(host)
            available = [host for host in self._hosts if host.successor_due is None]
            if available:
                self._turn += 1
                return min(available, key=lambda host: (host.load, (host.number - self._turn) % len(self._hosts)))
            await asyncio.sleep(min(host.successor_due or now for host in self._hosts) - now)

    async def _open(self, host: _Host, method: str, name: str, *args: Any) -> Any:
        host.load += 1
        try:
            return await self.call(host, method, name, *args)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                host.tell_close(name)  # the caller is gone
            self.leave(host)
            raise

    async def call(self, host: _Host, method: str, *args: Any) -> Any:
        """Call a method of a host; a host that is gone is a failure of kind ``host``."""
        import ray
        from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

        answer = host.call(method, *args)
        try:
            while not (await asyncio.wait({answer}, timeout=LIVENESS_SECONDS))[0]:
                await self._check_alive(host)  # a slow answer is not a failure: the host keeps its deadline
            return answer.result()
        except EnvironmentFailure as error:
            if error.kind == "host":
                self._replace(host, host.created, error.message)
            elif error.kind == "restarts":
                self._replace(host, time.monotonic(), error.message)
            raise EnvironmentFailure(error.kind, error.message) from None
        except (RayActorError, OutOfMemoryError) as error:  # the second: Ray killed it where memory ran out
            if isinstance(error, ActorUnavailableError):  # it may be alive, with episodes that would stay open
                ray.kill(host.actor)
            message = f"environment host {host.number} died: {error}"
            self._replace(host, host.created, message)
            raise EnvironmentFailure("host", message) from error
        finally:
            answer.cancel()  # nobody waits for it any more

    async def _check_alive(self, host: _Host) -> None:
        """Kill a host that does not answer ``load`` either: an environment is blocking its whole process."""
        import ray

        try:
            await asyncio.wait_for(asyncio.wrap_future(host.actor.load.remote().future()), LIVENESS_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            ray.kill(host.actor)
            message = (
                f"environment host {host.number} has not answered for {LIVENESS_SECONDS:g} s: its process is blocked"
            )
            raise EnvironmentFailure("host", message) from None

    def _replace(self, host: _Host, since: float, reason: str) -> None:
        """Give a host no more episodes, and replace it ``PAUSE_SECONDS`` after ``since``; the first call counts."""
        if host.successor_due is None:
            host.successor_due = since + PAUSE_SECONDS
            wait = max(0.0, host.successor_due - time.monotonic())
            logger.warning("environment host %d is replaced in %.0f s: %s", host.number, wait, reason)

    def leave(self, host: _Host) -> None:
        """Count an episode on ``host`` as ended."""
        host.load -= 1
        self._end_unless_used(host)

    def _end_unless_used(self, host: _Host) -> None:
        """End a host that has been replaced, as soon as no episode is open in it."""
        import ray

        if host.load == 0 and self._hosts[host.number] is not host:
            ray.kill(host.actor)

    def measure(self) -> list[Any]:
        """References to ``EnvHost.measure`` of each host."""
        return [host.actor.measure.remote() for host in self._hosts]
