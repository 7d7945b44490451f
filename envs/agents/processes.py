"""Processes of agents: started under a guard, their output bounded."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from verl_turnkey.envs import process_tree
from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle
from verl_turnkey.envs.process_tree import Limits
from verl_turnkey.envs.variables import without_proxy

NO_LIMITS = Limits()
_END_SECONDS = 15.0  # more than the guard takes at most
_numbers = itertools.count()


def model_variables(agent: AgentHandle) -> dict[str, str]:
    """Where clients of OpenAI and Anthropic find the gateway; ``TURNKEY_URL``: where rewards and states are posted."""
    root = agent.base_url.rstrip("/").removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": agent.base_url,
        "OPENAI_API_KEY": agent.key,
        "OPENAI_MODEL": agent.model,
        "ANTHROPIC_BASE_URL": root,  # its clients add /v1 themselves
        "ANTHROPIC_API_KEY": agent.key,
        "ANTHROPIC_AUTH_TOKEN": agent.key,
        "ANTHROPIC_MODEL": agent.model,
        "TURNKEY_URL": root,
        **without_proxy(urlsplit(root).hostname or ""),
    }


@functools.cache
def _owner() -> str:
    """The mark of what the reaper of this process kills; Ray kills the children of a worker that ends, so the guards.

    The reaper waits because a guard that lives also kills processes that have changed their environment variables.
    """
    return process_tree.start_reaper(seconds=_END_SECONDS)


class AgentProcess:
    """A command under a guard. Use it as ``async with AgentProcess.start(...)``: afterwards nothing of it runs."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._mark = process, mark
        self._stdout, self._stderr = (
            process_tree.OutputEnd(os.dup(pipe.fileno())) for pipe in (process.stdout, process.stderr)
        )
        process.stdout.close()
        process.stderr.close()
        self._ended = asyncio.Event()
        self._handle = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._handle, self._ended.set)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        limits: Limits = NO_LIMITS,
        folders: Sequence[Path] = (),
    ) -> AgentProcess:
        """Start ``command``. ``folders``: those of the episode, whose growth ``limits.disk`` bounds.

        Raises:
            AgentFailure: there are no descriptors or processes left, or ``cwd`` is not a folder.
        """
        try:
            mark = f"{_owner()}.{next(_numbers)}."
            process = subprocess.Popen(
                process_tree.script("guard", *limits, "\n".join(map(str, folders)), *command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**env, process_tree.MARK: mark},
                cwd=cwd,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # the latter: a null byte in an argument or a variable
            raise AgentFailure(f"the agent's process could not be started: {error}") from None
        return cls(process, mark)

    async def wait(self, timeout: float | None) -> int | None:
        """Wait until the command ends. Its exit status, as a shell gives it; None: it ran longer than ``timeout``."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return None
        status = self._process.wait()  # it has ended: this does not block
        self._stdout.collect(1 << 10)
        self._stderr.collect(1 << 10)
        return status if status >= 0 else 128 - status

    @property
    def output(self) -> str:
        """The end of its standard output."""
        return self._stdout.text

    @property
    def errors(self) -> str:
        """The end of its standard error."""
        return self._stderr.text

    def last_line(self) -> str:
        """The last line of its standard error, or of its standard output, that is not empty."""
        for text in (self.errors, self.output):
            if lines := [line for line in text.splitlines() if line.strip()]:
                return lines[-1].strip()
        return ""

    async def __aenter__(self) -> AgentProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def end(self) -> None:
        """Kill what still runs of it; a second call does nothing."""
        if self._handle < 0:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # the guard kills everything below it, whoever cancels this coroutine
        try:
            if await self.wait(_END_SECONDS) is None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._ended.wait()
            if self._process.wait() < 0:  # the guard itself was killed, by the agent or from outside
                await asyncio.get_running_loop().run_in_executor(None, process_tree.sweep, self._mark)
        finally:
            self._stdout.close()
            self._stderr.close()
            handle, self._handle = self._handle, -1
            asyncio.get_running_loop().remove_reader(handle)
            os.close(handle)
