"""The client of the environment hosts: one call per step to a Ray actor in which the environments live.

An environment's code may block, hang, crash or be unsafe in threads. It therefore runs in other processes than the
agent loops (see ``EnvHost``), with a deadline per call, and whatever goes wrong ends one episode with an
``EnvironmentFailure``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from verl_turnkey.envs import sizing
from verl_turnkey.envs.budget import Losses
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.host import EnvHost, over
from verl_turnkey.envs.player import Info

LIVENESS_SECONDS = 60.0  # how long a host may be silent before it is asked whether it lives, and to answer that
RESTART_SECONDS = 60.0  # how long Ray may take to restart a host


@dataclass(frozen=True)
class Step:
    """What the environment answered to one action."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Info


class Episode:
    """An open episode in some host: ``observation`` and ``info`` of its start, then ``step`` until it ends."""

    def __init__(self, pool: HostPool, host: int, name: str, observation: str, info: Info) -> None:
        self._pool, self._host, self._name = pool, host, name
        self._life = pool.life(host)
        self._open = True
        self._latest = (observation, info)
        self.observation = observation
        self.info = info

    async def step(self, action: str) -> Step:
        """One step, one remote call. Raises ``EnvironmentFailure``, after which the episode is over."""
        if not self._open:
            raise over(self._name)
        try:
            timeout = self._pool.step_timeout
            step = Step(*await self._pool.call(self._host, self._life, "step", self._name, action, timeout))
        except EnvironmentFailure:
            self._end()
            raise
        self._latest = (step.observation, step.info)
        if step.terminated or step.truncated:
            self._pool.gained()
            self._end()
        return step

    async def clone(self) -> Episode:
        """Another open episode in the same state: its ``observation`` and ``info`` are the latest of this one.

        Thread-safe environments copy themselves (a method ``clone()``, or ``metadata["deepcopy"] = True``); all others
        play this episode's actions again, after a reset with the same seed. A clone is let in at once, also when all
        places are taken.

        Raises:
            EnvironmentFailure: of kind ``clone`` when the replay shows other states than this episode did, or the
                class's own way fails; of another kind when the environment fails. This episode goes on, except when
                the class's own way exceeds its deadline.
        """
        if not self._open:
            raise over(self._name)
        return await self._pool.clone(self, *self._latest)

    def close(self) -> None:
        """Give the episode up without waiting for the host. Closing twice, or after its end, does nothing."""
        if self._open:
            self._pool.tell_close(self._host, self._name)
            self._pool.gained()
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._pool.release(self._host)


class HostPool:
    """Finds the named hosts, or creates them, and opens each episode where the fewest are open.

    Every process that names the same ``namespace_tag`` shares the same hosts. To be used inside one asyncio loop of a
    process that is connected to Ray.

    Args:
        hosts: number of host processes (Ray actors that reserve no CPU); ``auto``: by this machine's CPUs.
        namespace_tag: distinguishes runs that share a Ray cluster.
        places: open episodes per host; ``auto``: by free memory and what the environments declare.
        sharers: pools on this machine, which share its CPUs and memory.
        restarts: see ``EnvHost``; also the hosts themselves that may be lost beyond the episodes that went well.
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
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        count = sizing.hosts(sharers) if hosts == "auto" else hosts
        if count < 1:
            raise ValueError(f"turnkey.env.hosts must be auto or at least 1, not {hosts}")
        self.step_timeout = step_timeout
        self.reset_timeout = reset_timeout
        actor_class = ray.remote(EnvHost)
        self._hosts = [
            actor_class.options(
                # Beside its episodes' agent loop, not on a node that somebody keeps free of work.
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
                name=f"turnkey_env_host_{namespace_tag}_{i}",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,  # a lost host costs its open episodes, not the run
                max_concurrency=10_000,  # starts that wait for a place must not keep out the steps they wait for
            ).remote(tuple(modules), places, sharers * count, restarts)
            for i in range(count)
        ]
        self._loads = [0] * count
        self._lives = [0] * count  # how often each host was lost; a loss that ends many calls is counted once
        self._restarting: set[int] = set()
        self._losses = Losses("environment hosts", restarts)
        self._turn = os.getpid()  # ties go round, and not every process begins with the same host

    async def start(self, env_id: str, kwargs: Mapping[str, Any] | None, seed: int | None) -> Episode:
        """Open an episode; waits for a free place. Raises ``EnvironmentFailure``."""
        self._losses.check()
        n = len(self._loads)
        self._turn += 1
        host = min(range(n), key=lambda i: (i in self._restarting, self._loads[i], (i - self._turn) % n))
        name = uuid4().hex
        observation, info = await self._open(host, "start", name, env_id, dict(kwargs or {}), seed, self.reset_timeout)
        return Episode(self, host, name, observation, info)

    async def clone(self, original: Episode, observation: str, info: Info) -> Episode:
        """See ``Episode.clone``."""
        host, name = original._host, uuid4().hex
        await self._open(host, "clone", name, original._name, self.reset_timeout, self.step_timeout)
        return Episode(self, host, name, observation, {**info, "task": original.info["task"]})

    async def _open(self, host: int, method: str, name: str, *args: Any) -> Any:
        self._loads[host] += 1
        try:
            if host in self._restarting:
                await self._wait_for(host)
            return await self.call(host, self._lives[host], method, name, *args)
        except asyncio.CancelledError:
            self.tell_close(host, name)  # nobody is left who could
            self.release(host)
            raise
        except BaseException:
            self.release(host)
            raise

    def life(self, host: int) -> int:
        """How often a host was lost: what was opened in an earlier life is gone."""
        return self._lives[host]

    async def call(self, host: int, life: int, method: str, *args: Any) -> Any:
        """Call a method of a host in its ``life``; a host that is gone is a failure of kind ``host``."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayActorError

        if life != self._lives[host]:
            raise EnvironmentFailure("host", f"environment host {host} died, and the episode with it")
        answer = asyncio.wrap_future(getattr(self._hosts[host], method).remote(*args).future())
        try:
            while not (await asyncio.wait({answer}, timeout=LIVENESS_SECONDS))[0]:
                await self._check_alive(host)  # the answer may rightly take long: its deadline runs in the host
            return answer.result()
        except EnvironmentFailure as error:  # Ray's own subclass of it, with a remote traceback: keep the plain words
            if error.kind == "host":
                self._note_death(host, life, error.message)
            raise EnvironmentFailure(error.kind, error.message) from None
        except RayActorError as error:
            # It may live, with episodes that nobody would close any more.
            if isinstance(error, ActorUnavailableError) and life == self._lives[host]:
                ray.kill(self._hosts[host], no_restart=False)
            message = f"environment host {host} died: {error}"
            self._note_death(host, life, message)
            raise EnvironmentFailure("host", message) from error

    async def _check_alive(self, host: int) -> None:
        """A host that cannot even say how busy it is (an environment that blocks its whole process) is a lost one."""
        import ray

        try:
            await asyncio.wait_for(asyncio.wrap_future(self._hosts[host].load.remote().future()), LIVENESS_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            ray.kill(self._hosts[host], no_restart=False)
            raise EnvironmentFailure(
                "host", f"environment host {host} has not answered for {LIVENESS_SECONDS:g} s: its process is blocked"
            ) from None

    def _note_death(self, host: int, life: int, message: str) -> None:
        """Count it once, however many calls it ended."""
        if self._lives[host] == life:
            self._lives[host] += 1
            self._restarting.add(host)
            self._losses.lost(message)

    async def _wait_for(self, host: int) -> None:
        """Wait until Ray has restarted a host: until then it refuses every call.

        The same process has to answer twice: killing takes its time, and may hit the one that was just restarted.
        """
        from ray.exceptions import ActorUnavailableError, RayActorError

        before = None
        for _ in range(round(RESTART_SECONDS / 0.5)):
            try:
                process = (await asyncio.wrap_future(self._hosts[host].load.remote().future()))["process"]
            except ActorUnavailableError:
                process = None
            except RayActorError:
                break  # for good
            if process is not None and process == before:
                self._restarting.discard(host)
                return
            before = process
            await asyncio.sleep(0.5)
        raise EnvironmentFailure("host", f"environment host {host} died and has not come back")

    def tell_close(self, host: int, name: str) -> None:
        """Ask a host to close an episode, without waiting."""
        self._hosts[host].close.remote(name)

    def release(self, host: int) -> None:
        """Note that an episode on ``host`` is over."""
        self._loads[host] -= 1

    def gained(self) -> None:
        """Note that an episode ended without a failure."""
        self._losses.gained()
