"""Runs an agent that is a command, in a sandbox or without one.

The command is a list of arguments and never goes through a shell. ``{instruction}``, ``{base_url}``, ``{key}``,
``{model}``, ``{workspace}``, ``{task}`` (JSON) and each field of the task in braces are replaced in it; ``{{name}}``
stays as ``{name}``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.agents.base import (
    AgentFailure,
    AgentHandle,
    AgentResult,
    Runner,
    cut,
    ran_too_long,
    without_secret,
)
from verl_turnkey.envs.agents.folders import episode_folder
from verl_turnkey.envs.agents.processes import NO_LIMITS, AgentProcess, model_variables
from verl_turnkey.envs.agents.sandboxes import APP, Bubblewrap, Job, NoSandbox, Sandbox
from verl_turnkey.envs.process_tree import Limits

OUTPUT_CHARS = 4000
"""of the end of the command's standard output in ``AgentResult.extra``"""

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
_CLEANUP_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: int | None
    """exit status, as a shell gives it; None: it ran out of time"""
    output: str
    last_line: str
    """of its standard error, or of its standard output"""
    seconds: float


async def run_job(sandbox: Sandbox, job: Job, timeout: float) -> Ended:
    """Run ``job`` to its end, at most ``timeout`` seconds; nothing of it runs afterwards. Raises AgentFailure."""
    launch = sandbox.launch(job)
    began = time.monotonic()
    try:
        process = AgentProcess.start(
            launch.command, env=launch.env, cwd=launch.cwd, limits=launch.limits, folders=job.folders
        )
        async with process:
            status = await process.wait(timeout)
        return Ended(status, process.output, process.last_line(), time.monotonic() - began)
    finally:
        if launch.cleanup is not None:
            async with AgentProcess.start(launch.cleanup, env=launch.env) as process:
                await process.wait(_CLEANUP_SECONDS)


class CommandRunner(Runner):
    """Runs a command for each episode.

    Args:
        command: program and arguments, with placeholders.
        timeout: seconds that an episode may take; then all of its processes are killed.
        sandbox: what the command can see and reach.
        env: further environment variables, with placeholders in their values.
        files: file in the agent's HOME -> its text, with placeholders: some agents read their model's address there.
        reward: ``result``: the agent reports it; ``exit_code``: 1 for exit status 0, else 0.
        limits: what the processes of an episode may use.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        sandbox: Sandbox | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        reward: Literal["result", "exit_code"] = "result",
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.command, self.timeout, self.sandbox = list(command), timeout, sandbox or NoSandbox()
        self.env, self.files, self._reward = dict(env or {}), dict(files or {}), reward
        self.limits = limits

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> AgentResult:
        """As ``Runner.run``."""
        async with episode_folder() as folder:
            workspace = agent.workspace or folder / "app"
            job = self.job(task, agent, folder, workspace)
            ended = await run_job(self.sandbox, job, self.timeout)
        return self.outcome(ended, agent.key)

    def job(self, task: Mapping[str, Any], agent: AgentHandle, folder: Path, workspace: Path, cwd: str = APP) -> Job:
        """The command for ``task``. ``cwd``: where a sandbox shows ``workspace``.

        Raises:
            AgentFailure: a placeholder has no value.
        """
        seen = self.sandbox.inside(replace(agent, workspace=workspace), cwd)
        fields = {
            **{name: value if isinstance(value, str) else json.dumps(value) for name, value in task.items()},
            "task": json.dumps(dict(task)),
            "base_url": seen.base_url,
            "key": seen.key,
            "model": seen.model,
            "workspace": str(seen.workspace),
        }
        for name, text in self.files.items():
            path = folder / "home" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(filled(text, fields), encoding="utf-8")
        env = model_variables(seen) | {name: filled(value, fields) for name, value in self.env.items()}
        command = [filled(argument, fields) for argument in self.command]
        return Job(command, folder, workspace, env, socket=agent.socket, cwd=cwd, limits=self.limits)

    def outcome(self, ended: Ended, secret: str) -> AgentResult:
        """What the end of the command says about the episode, without its ``secret``."""
        extra: dict[str, Any] = {"output": without_secret(ended.output, secret)[-OUTPUT_CHARS:]}
        if ended.status is None:
            reward = 0.0 if self._reward == "exit_code" else None
            return AgentResult(reward, extra=extra, truncated=True, reason=ran_too_long(self.timeout))
        extra["exit_code"] = ended.status
        reason = ""
        if ended.status != 0:
            last_line = without_secret(ended.last_line, secret)
            hidden = isinstance(self.sandbox, Bubblewrap) and "No such file or directory" in last_line
            hint = "; of this machine's files the sandbox shows those in turnkey.agent.readable" if hidden else ""
            reason = cut(f"the agent ended with exit status {ended.status}: {last_line}{hint}")
        if self._reward == "result":
            return AgentResult(extra=extra, reason=reason)
        return AgentResult(float(ended.status == 0), ended.status == 0, extra=extra, reason=reason)


def filled(text: str, fields: Mapping[str, str]) -> str:
    """``text`` with ``{name}`` replaced by ``fields[name]``. Raises AgentFailure: there is no such field."""

    def value(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        if name not in fields:
            raise AgentFailure(
                f"turnkey.agent.run: the task has no field {name!r} for {{{name}}}{did_you_mean(name, fields) or '.'} "
                f"Write {{{{{name}}}}} for the text itself"
            )
        return fields[name]

    return _PLACEHOLDER.sub(value, text)
