"""Environment hosts: processes in which environments live, and the client that agent loops talk to.

An environment's code may block, hang, raise or be unsafe in threads. It therefore runs in a thread of a process of its
own, with a deadline per call, and whatever goes wrong ends one episode with an ``EnvironmentFailure``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.modules import import_modules
from verl_turnkey.envs.registry import make

Info = dict[str, Any]
_TRACEBACK_CHARS = 1500
LIVENESS_SECONDS = 60.0  # how long a host may be silent before it is asked whether it lives, and to answer that


class _Lane:
    """A thread that runs calls one after another. Left behind, not waited for, when a call hangs."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="turnkey-env", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def abandon(self) -> None:
        """Let the thread end as soon as its running call returns, if ever."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


@dataclass(eq=False)
class _Instance:
    """An open episode and the environment that it runs in; ``made_for`` tells which episodes may reuse it."""

    env: gymnasium.Env[str, str]
    made_for: str
    open: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvHost:
    """Runs environments for many episodes. A plain asyncio class; ``HostPool`` puts it into Ray actors.

    Args:
        max_instances: open episodes at most. Further ``start`` calls wait for their turn, as long as it takes.
        modules: user modules to import first (see ``import_modules``).
        threads: environment calls that may run at the same time. One, unless every environment here is thread-safe.

    ``timeout`` (seconds) counts from the moment the environment's code starts running: neither waiting for admission
    nor waiting for another episode's call is held against an episode.
    """

    def __init__(self, max_instances: int = 64, modules: Sequence[str] = (), threads: int = 1) -> None:
        if max_instances < 1 or threads < 1:
            raise ValueError(f"max_instances and threads must be positive: {max_instances} and {threads} came")
        self._max_instances = max_instances
        self._modules = tuple(modules)
        self._admission = asyncio.Semaphore(max_instances)
        self._admitted = 0
        self._lanes: asyncio.Queue[_Lane] = asyncio.Queue()
        for _ in range(threads):
            self._lanes.put_nowait(_Lane())
        # Ids never come back, not even when Ray restarts the process: a stale episode cannot step another one's.
        self._ids = itertools.count(time.time_ns())
        self._open: dict[int, _Instance] = {}
        self._idle: list[_Instance] = []  # least recently used first; open and idle ones together stay within the limit

    async def start(
        self, env_id: str, kwargs: Mapping[str, Any] | None, seed: int | None, timeout: float
    ) -> tuple[int, str, Info]:
        """Open an episode. Returns its id, the first observation and the info."""
        await self._admission.acquire()
        self._admitted += 1
        try:
            made_for = repr((env_id, sorted((kwargs or {}).items())))
            reused, evicted = self._claim(made_for)

            def reset() -> tuple[gymnasium.Env[str, str], str, Info]:
                if evicted is not None:
                    with contextlib.suppress(Exception):  # not this episode's environment
                        evicted.env.close()
                import_modules(self._modules)
                env = reused.env if reused is not None else make(env_id, kwargs)
                answer = env.reset(seed=seed)
                if not (isinstance(answer, tuple) and len(answer) == 2):
                    raise TypeError(f"reset must return (observation, info), not {_shown(answer)}")
                return env, _observation(answer[0]), _info(answer[1])

            env, observation, info = await self._call(reset, timeout, "reset", env_id)
        except BaseException:
            self._leave()
            raise
        episode = next(self._ids)
        self._open[episode] = _Instance(env, made_for)
        return episode, observation, info

    async def step(self, episode: int, action: str, timeout: float) -> tuple[str, float, bool, bool, Info]:
        """Take one step. The episode closes itself when it ends, and when it fails."""
        instance = self._open.get(episode)
        if instance is None:
            raise _over(episode)
        async with instance.lock:
            if not instance.open:
                raise _over(episode)

            def act() -> tuple[str, float, bool, bool, Info]:
                answer = instance.env.step(action)
                if not (isinstance(answer, tuple) and len(answer) == 5):
                    raise TypeError(
                        f"step must return (observation, reward, terminated, truncated, info), not {_shown(answer)}"
                    )
                observation, reward, terminated, truncated, info = answer
                return _observation(observation), _reward(reward), bool(terminated), bool(truncated), _info(info)

            try:
                result = await self._call(act, timeout, "step", instance.made_for)
            except BaseException:
                self._finish(episode)  # and forget the environment: nobody knows what state it is in
                raise
            if result[2] or result[3]:
                self._idle.append(self._finish(episode))
            return result

    async def close(self, episode: int) -> None:
        """Give up an episode. Closing twice, or after its end, does nothing."""
        instance = self._open.get(episode)
        if instance is None:
            return
        async with instance.lock:
            if instance.open:
                self._idle.append(self._finish(episode))

    async def load(self) -> dict[str, int]:
        """Open episodes, idle environments and the limit of both together."""
        return {"open": len(self._open), "idle": len(self._idle), "max_instances": self._max_instances}

    def _claim(self, made_for: str) -> tuple[_Instance | None, _Instance | None]:
        """An idle environment for these arguments, or one to close when there is no room for a new one."""
        for position, instance in enumerate(self._idle):
            if instance.made_for == made_for:
                return self._idle.pop(position), None
        full = self._admitted + len(self._idle) > self._max_instances
        return None, self._idle.pop(0) if full and self._idle else None

    def _finish(self, episode: int) -> _Instance:
        instance = self._open.pop(episode)
        instance.open = False
        self._leave()
        return _Instance(instance.env, instance.made_for)

    def _leave(self) -> None:
        self._admitted -= 1
        self._admission.release()

    async def _call(self, call: Callable[[], Any], timeout: float, kind: str, what: str) -> Any:
        """Run environment code in a lane, within ``timeout`` from its start."""
        lane = await self._lanes.get()
        future = lane.submit(lambda: _guarded(call, kind))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except (asyncio.TimeoutError, TimeoutError):  # two classes before Python 3.11
            key = "turnkey.env.reset_timeout" if kind == "reset" else "turnkey.env.step_timeout"
            raise EnvironmentFailure(
                "timeout", f"{kind} of {what} took longer than {timeout:g} s; raise {key} if that is normal"
            ) from None
        finally:
            if not future.done():  # out of time, or the caller went away: the thread is lost to this call
                lane.abandon()
                lane = _Lane()
            self._lanes.put_nowait(lane)


def _guarded(call: Callable[[], Any], kind: str) -> Any:
    """Any exception of an environment, ``SystemExit`` included, as text: its class may not exist elsewhere."""
    try:
        return call()
    except EnvironmentFailure:
        raise
    except BaseException as error:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-_TRACEBACK_CHARS:]
        raise EnvironmentFailure(kind, f"{type(error).__name__}: {error}\n{trace}") from None


def _over(episode: int) -> EnvironmentFailure:
    return EnvironmentFailure("closed", f"episode {episode} is over: it ended, failed, timed out or was closed")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:100]}"


def _observation(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"an observation must be text, not {_shown(value)}")
    return value


def _reward(value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        reward = float(value)
    except (TypeError, ValueError):
        raise EnvironmentFailure("reward", f"a reward must be a number, not {_shown(value)}") from None
    if not math.isfinite(reward):
        raise EnvironmentFailure("reward", f"a reward must be finite, not {reward}")
    return reward


def _info(info: Any) -> Info:
    """The keys that credit assignment reads, in plain types; nothing else has to survive the way between processes."""
    if not isinstance(info, Mapping):
        raise TypeError(f"info must be a dict, not {_shown(info)}")
    key, admissible, won = info.get("state_key"), info.get("admissible"), info.get("won")
    return {
        "state_key": key if key is None or type(key) in (int, str) else str(key),
        "admissible": None if admissible is None else [str(action) for action in admissible],
        "won": None if won is None else bool(won),
        "invalid": bool(info.get("invalid", False)),
        "task": str(info.get("task") or ""),
    }


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

    def __init__(self, pool: HostPool, host: int, id: int, observation: str, info: Info) -> None:
        self._pool, self._host, self._id = pool, host, id
        self._open = True
        self.observation = observation
        self.info = info

    async def step(self, action: str) -> Step:
        """One step, one remote call. Raises ``EnvironmentFailure``, after which the episode is over."""
        if not self._open:
            raise _over(self._id)
        try:
            step = Step(*await self._pool.call(self._host, "step", self._id, action, self._pool.step_timeout))
        except EnvironmentFailure:
            self._end()
            raise
        if step.terminated or step.truncated:
            self._end()
        return step

    def close(self) -> None:
        """Give the episode up without waiting for the host. Closing twice, or after its end, does nothing."""
        if self._open:
            self._pool.tell_close(self._host, self._id)
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._pool.release(self._host)


class HostPool:
    """The client: finds the named hosts, or creates them, and opens each episode where the fewest are open.

    Every process that names the same ``namespace_tag`` shares the same ``hosts`` processes. To be used inside one
    asyncio loop of a process that is connected to Ray.

    Args:
        hosts: number of host processes (Ray actors that reserve no CPU).
        namespace_tag: distinguishes runs that share a Ray cluster.
        max_instances: open episodes per host.
        step_timeout, reset_timeout: seconds; ``reset_timeout`` includes making the environment.
        modules: user modules that the hosts import.
        threads: environment calls at the same time per host (see ``EnvHost``).
    """

    def __init__(
        self,
        hosts: int,
        namespace_tag: str,
        max_instances: int = 64,
        step_timeout: float = 30.0,
        reset_timeout: float = 120.0,
        modules: Sequence[str] = (),
        threads: int = 1,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if hosts < 1:
            raise ValueError(f"turnkey.env.hosts must be at least 1, not {hosts}")
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
                max_restarts=-1,  # a lost process costs its open episodes, not the run
                max_concurrency=10_000,  # starts that wait for admission must not keep out the steps they wait for
            ).remote(max_instances, tuple(modules), threads)
            for i in range(hosts)
        ]
        self._loads = [0] * hosts
        self._turn = os.getpid()  # ties go round, and not every process begins with the same host
        self._admission = asyncio.Semaphore(hosts * max_instances)

    async def start(self, env_id: str, kwargs: Mapping[str, Any] | None, seed: int | None) -> Episode:
        """Open an episode; waits for a free place. Raises ``EnvironmentFailure``."""
        await self._admission.acquire()
        n = len(self._loads)
        self._turn += 1
        host = min(range(n), key=lambda i: (self._loads[i], (i - self._turn) % n))
        self._loads[host] += 1
        try:
            id, observation, info = await self.call(host, "start", env_id, dict(kwargs or {}), seed, self.reset_timeout)
        except BaseException:
            self.release(host)
            raise
        return Episode(self, host, id, observation, info)

    async def call(self, host: int, method: str, *args: Any) -> Any:
        """Call a method of a host; a host that is gone is a failure of kind ``host``."""
        import ray

        answer = asyncio.wrap_future(getattr(self._hosts[host], method).remote(*args).future())
        try:
            while not (await asyncio.wait({answer}, timeout=LIVENESS_SECONDS))[0]:
                await self._check_alive(host)  # the answer may rightly take long: its deadline runs in the host
            return answer.result()
        except EnvironmentFailure as error:  # Ray's own subclass of it, with a remote traceback: keep the plain words
            raise EnvironmentFailure(error.kind, error.message) from None
        except ray.exceptions.RayActorError as error:
            raise EnvironmentFailure("host", f"environment host {host} died: {error}") from error

    async def _check_alive(self, host: int) -> None:
        """A host that cannot even say how busy it is (an environment that blocks its whole process) is a lost one."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._hosts[host].load.remote().future()), LIVENESS_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            raise EnvironmentFailure(
                "host", f"environment host {host} has not answered for {LIVENESS_SECONDS:g} s: its process is blocked"
            ) from None

    def tell_close(self, host: int, episode: int) -> None:
        """Ask a host to close an episode, without waiting."""
        self._hosts[host].close.remote(episode)

    def release(self, host: int) -> None:
        """Note that an episode on ``host`` is over."""
        self._loads[host] -= 1
        self._admission.release()
