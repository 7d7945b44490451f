"""Runs one environment, in a thread or a process, behind plain Python types.

What the environment raises becomes an ``EnvironmentFailure``; what it returns is read by the rules of ``answers`` into
plain types, so that none of its objects has to be pickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from verl_turnkey.envs.answers import Answer, Fault, Info, read_reset, read_step
from verl_turnkey.envs.base import copied, declared_roles, offers_copies, turn_limit
from verl_turnkey.envs.errors import (
    EnvironmentFailure,
    EnvironmentKwargsError,
    MissingPackageError,
    ModuleImportError,
    UnknownEnvironmentError,
)
from verl_turnkey.envs.registry import make
from verl_turnkey.envs.user_modules import import_modules

ENVS = ("envs",)
"""of what installed packages register"""
_MESSAGE_CHARS = 2000
_TRACEBACK_CHARS = 1500


@dataclass(frozen=True)
class Declared:
    """What a class declares in its ``metadata``; the defaults are for what it does not declare."""

    thread_safe: bool = False
    memory_mb: int = 200
    copies: bool = False
    """a host clones an instance by a copy, and not by a replay"""


class EnvRunner:
    """Holds one environment at a time. Not thread-safe: one call at a time.

    Args:
        modules: user modules to import first (see ``import_modules``).
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._env: gymnasium.Env[str, str] | None = None
        self._made_for: tuple[str, Mapping[str, Any]] | None = None
        self._roles: tuple[str, ...] = ()

    def load(self, env_id: str) -> Declared | None:
        """Import the class of ``env_id``; None when that fails, because ``start`` reports the reason better."""
        with _failures("reset"):
            import_modules(self._modules, kinds=ENVS)
            try:
                entry = gymnasium.spec(env_id).entry_point
                creator = load_env_creator(entry) if isinstance(entry, str) else entry
            except Exception:
                return None
            metadata = getattr(creator, "metadata", None) or {}  # a function instead of a class has none
            memory = metadata.get("memory_mb", Declared.memory_mb)
            threads = metadata.get("thread_safe") is True
            return Declared(threads, max(1, math.ceil(memory)), threads and offers_copies(creator))

    def start(self, env_id: str, kwargs: Mapping[str, Any], seed: int | None) -> tuple[str, Info]:
        """Reset; makes the environment first, unless it is here already. Returns the first observation and info."""
        with _failures("reset"):
            import_modules(self._modules, kinds=ENVS)
            if self._env is None or self._made_for != (env_id, kwargs):
                self.close()
                try:
                    self._env = make(env_id, kwargs)
                except (UnknownEnvironmentError, MissingPackageError, EnvironmentKwargsError) as error:
                    raise EnvironmentFailure("make", str(error.args[0])) from None
                self._made_for = (env_id, kwargs)
                self._roles = declared_roles(self._env)
            answer = _accepted(read_reset(self._env.reset(seed=seed), self._roles))
            if self._roles:
                answer.info["roles"] = self._roles
            if (limit := turn_limit(self._env)) is not None:
                answer.info["turn_limit"] = limit
            return answer.observation, answer.info

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """One step: observation, reward, terminated, truncated, info."""
        assert self._env is not None
        with _failures("step"):
            answer = _accepted(read_step(self._env.step(action), self._roles))
            return answer.observation, answer.reward, answer.terminated, answer.truncated, answer.info

    def clone(self) -> EnvRunner | None:
        """A runner with a copy of the environment, in this process; None when its class offers none."""
        assert self._env is not None
        with _failures("clone"):
            env = copied(self._env)
            if env is None:
                return None
            runner = EnvRunner(self._modules)
            runner._env, runner._made_for, runner._roles = env, self._made_for, self._roles
            return runner

    def step_clone(self, action: str) -> tuple[str, Info]:
        """What a step would show, taken in a copy; this environment keeps its state."""
        copied = self.clone()
        assert copied is not None
        observation, _, _, _, info = copied.step(action)
        return observation, info

    def close(self) -> None:
        """Close the environment, if there is one; what it raises is ignored."""
        env, self._env = self._env, None
        if env is not None:
            with contextlib.suppress(BaseException):
                env.close()


@contextlib.contextmanager
def _failures(kind: str) -> Iterator[None]:
    """Turn any exception, ``SystemExit`` included, into text: its class may not be importable in the host."""
    try:
        yield
    except EnvironmentFailure:
        raise
    except ModuleImportError as error:  # says all; its stack is ours
        raise EnvironmentFailure(kind, str(error)) from None
    except BaseException as error:
        what = "".join(traceback.format_exception_only(type(error), error)).strip()[:_MESSAGE_CHARS]
        trace = "".join(traceback.format_tb(error.__traceback__))[-_TRACEBACK_CHARS:]
        raise EnvironmentFailure(kind, f"{what}\n{trace}") from None


def _accepted(answer: Answer | Fault) -> Answer:
    fault = answer if isinstance(answer, Fault) else next(iter(answer.faults), None)
    if isinstance(answer, Answer) and fault is None:
        return answer
    assert fault is not None
    raise EnvironmentFailure("reward", fault.message) if fault.property == "reward" else TypeError(fault.message)


# It imports neither Ray nor torch, so that it starts about as fast as gymnasium imports.

DUMP_SIGNAL = signal.SIGUSR2
HEADER_BYTES = 8


def frame(message: Any) -> bytes:
    """A message as it goes over the socket: its length, then the pickle."""
    data = pickle.dumps(message)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def main(fd: int, modules: list[str]) -> None:
    """Serve the socket ``fd``. Requests are (method of ``EnvRunner``, arguments), answers (failure or None, result)."""
    os.set_inheritable(fd, False)
    # Processes that the environment forks must neither answer for this one nor keep its connection open.
    own_pid = os.getpid()
    open_fds = [fd]
    os.register_at_fork(after_in_child=lambda: os.close(open_fds.pop()) if open_fds else None)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)  # works in C, so also while an extension module hangs
    runner = EnvRunner(modules)
    _send(fd, (None, None))  # ready
    while True:
        method, args = pickle.loads(_receive(fd, int.from_bytes(_receive(fd, HEADER_BYTES), "big")))
        failure = result = None
        try:
            result = getattr(runner, method)(*args)
        except EnvironmentFailure as error:
            failure = (error.kind, error.message)
        if os.getpid() != own_pid:
            os._exit(0)  # a fork that the environment let return from its method
        _send(fd, (failure, result))
        if method == "close":
            sys.exit()  # not os._exit: exit handlers clean up


def _receive(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            os._exit(0)  # the host is gone
        data += chunk
    return bytes(data)


def _send(fd: int, message: Any) -> None:
    data = memoryview(frame(message))
    while data:
        data = data[os.write(fd, data) :]
