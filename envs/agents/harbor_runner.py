"""Runs an agent on Harbor tasks: the agent in one sandbox, then the task's tests in another one."""

from __future__ import annotations

import asyncio
import codecs
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, Outcome, cut
from verl_turnkey.envs.agents.bubblewrap import Bubblewrap
from verl_turnkey.envs.agents.command import CommandRunner, run_job
from verl_turnkey.envs.agents.docker import Docker
from verl_turnkey.envs.agents.folders import episode_folder
from verl_turnkey.envs.agents.harbor import ENV_ID, HarborTask, read_reward
from verl_turnkey.envs.agents.jobs import Job, Mount, NoSandbox, Sandbox
from verl_turnkey.envs.errors import TaskFormatError

NOBODY = AgentHandle("http://127.0.0.1:1/none/v1", "none", "none")
"""the handle of a run without an agent"""


class HarborRunner(CommandRunner):
    """A command runner that also knows Harbor tasks: after the agent it runs the task's verifier.

    Tasks of other kinds (``env_id`` is not ``harbor``) are run as a command runner does.

    Args:
        command, further: as of ``CommandRunner``; the sandbox is the verifier's too.
        reward_key: the reward in a ``reward.json`` with several numbers.
        inherit: variables of this process that tasks may name, besides harmless ones.
    """

    def __init__(
        self, command: Sequence[str], *, reward_key: str = "reward", inherit: Collection[str] = (), **further: Any
    ) -> None:
        super().__init__(command, **further)
        self._reward_key, self._inherit = reward_key, inherit

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> Outcome:
        """As ``Runner.run``."""
        if task.get("env_id") != ENV_ID:
            return await super().run(task, agent)
        try:
            harbor = HarborTask.load(**task.get("kwargs") or {}).filled(self._inherit)
            return await self.play(harbor, task, agent)
        except (TaskFormatError, TypeError) as error:  # the latter: other arguments
            raise AgentFailure(str(error)) from None

    def scoring_seconds(self, task: Mapping[str, Any]) -> float:
        """How long the verifier of ``task`` may run once the agent has ended."""
        if task.get("env_id") != ENV_ID:
            return 0.0
        try:
            return HarborTask.load(**task.get("kwargs") or {}).verifier_seconds
        except (TaskFormatError, TypeError):  # which ``run`` reports
            return 0.0

    async def play(
        self, task: HarborTask, row: Mapping[str, Any], agent: AgentHandle, *, solution: bool = False
    ) -> Outcome:
        """One episode of ``task``. ``solution``: the reference solution runs in the agent's place.

        Raises:
            TaskFormatError: the sandbox does not have the task's image.
            AgentFailure: a sandbox could not be started, or the verifier left no reward.
        """
        sandbox = sandbox_for(task, self.sandbox)
        runner = CommandRunner(
            self.command,
            timeout=min(task.agent_seconds, self.timeout),
            sandbox=sandbox,
            env={**task.env, **(task.solution_env if solution else {}), **self.env},
            files=self.files,
        )
        # Fresh folders for all but the working folder: what the agent left in HOME or as a reward is not there.
        async with episode_folder() as folder, episode_folder() as fresh:
            workspace = agent.workspace or folder / "app"
            await asyncio.to_thread(task.fill, workspace, getattr(sandbox, "rootfs", None))
            logs = _log_folders(folder)
            job = runner.job({**row, "instruction": task.instruction}, agent, folder, workspace, task.workdir)
            mounts = [Mount(logs / name, f"/logs/{name}", True) for name in ("agent", "artifacts", "verifier")]
            if solution:
                mounts.append(Mount(task.folder / "solution", "/solution"))
                command, own = _script(task.folder / "solution/solve.sh", "/solution/solve.sh", folder)
                job, mounts = replace(job, command=command), [*mounts, *own]
            ended = await run_job(sandbox, replace(job, mounts=mounts), runner.timeout)
            outcome = runner.outcome(ended, agent.key)
            return await self._verify(task, sandbox, fresh, workspace, logs, outcome)

    async def _verify(
        self, task: HarborTask, sandbox: Sandbox, folder: Path, workspace: Path, logs: Path, outcome: Outcome
    ) -> Outcome:
        own = _log_folders(folder)
        command, mounts = _script(task.folder / "tests/test.sh", "/tests/test.sh", folder)
        mounts += [
            Mount(task.folder / "tests", "/tests"),
            *(Mount(logs / name, f"/logs/{name}", True) for name in ("agent", "artifacts")),
            Mount(own / "verifier", "/logs/verifier", True),
        ]
        env = {**task.env, **task.verifier_env}
        job = Job(command, folder, workspace, env, mounts, cwd=task.workdir)
        ended = await run_job(sandbox, job, task.verifier_seconds)
        if ended.status is None:
            raise AgentFailure(f"the verifier of {task.folder.name} ran longer than {task.verifier_seconds:g} s")
        try:
            reward, rewards = await asyncio.to_thread(read_reward, own / "verifier", self._reward_key)
        except ValueError as error:
            how = f"exit status {ended.status}: {ended.last_line}"
            raise AgentFailure(cut(f"the verifier of {task.folder.name}: {error} ({how})")) from None
        extra = {**outcome.extra, **({"rewards": rewards} if rewards else {})}
        return replace(outcome, reward=reward, success=reward >= 1.0, extra=extra, verified=True)


def sandbox_for(task: HarborTask, sandbox: Sandbox) -> Sandbox:
    """``sandbox`` with the image of ``task``.

    Raises:
        TaskFormatError: there is no sandbox, or the task needs an image that it does not have.
    """
    if isinstance(sandbox, NoSandbox):
        raise TaskFormatError("Harbor tasks need a sandbox: set turnkey.agent.sandbox=bwrap or docker")
    if isinstance(sandbox, Docker):
        image = task.docker_image or sandbox.image
        if not image:
            raise TaskFormatError(
                f"Harbor task {task.folder}: Dockerfiles are not built here: set environment.docker_image"
            )
        return replace(sandbox, image=image)
    if task.needs_image and not (isinstance(sandbox, Bubblewrap) and sandbox.rootfs):
        raise TaskFormatError(
            f"Harbor task {task.folder}: its image is not built. Run it with docker_image and "
            "turnkey.agent.sandbox=docker, or with turnkey.agent.rootfs=FOLDER (the unpacked image), or write its row "
            "with --ignore-dockerfile to run it on this machine's programs"
        )
    return sandbox


async def check_task(task: HarborTask, sandbox: Sandbox) -> list[str]:
    """What is wrong with ``task``: the oracle must get 1, doing nothing less, and a reward that was planted nothing."""
    problems = []
    if not (task.folder / "solution/solve.sh").exists():
        problems.append("there is no solution/solve.sh, so nothing shows that the task can be solved")
    else:
        oracle = await _reward_of(task, sandbox, [], solution=True)
        if oracle != 1.0:
            problems.append(f"the reference solution must get reward 1, not {oracle}")
    nothing = await _reward_of(task, sandbox, ["true"])
    if not isinstance(nothing, float) or nothing >= 1.0:
        problems.append(f"doing nothing must get a reward below 1, not {nothing}")
    plant = "echo 1 | tee /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    planted = await _reward_of(task, sandbox, ["bash", "-c", plant])
    if planted != nothing:
        problems.append(f"a planted reward must be ignored: it got {planted} instead of {nothing}")
    return problems


async def _reward_of(
    task: HarborTask, sandbox: Sandbox, command: list[str], *, solution: bool = False
) -> float | str | None:
    runner = HarborRunner(command, timeout=task.agent_seconds, sandbox=sandbox)
    try:
        outcome = await runner.play(task, {}, NOBODY, solution=solution)
    except AgentFailure as failure:
        return f"a failure: {failure.reason}"
    return outcome.reward


def _script(path: Path, target: str, folder: Path) -> tuple[list[str], list[Mount]]:
    """The command that runs a task's script, seen at ``target``, with the program of its first line, else with bash.

    A script with a byte order mark or Windows' line ends is mounted as a copy in ``folder`` without them.
    """
    text, mounts = path.read_bytes(), []
    if (clean := text.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")) != text:
        copy = folder / path.name
        copy.write_bytes(clean)
        mounts.append(Mount(copy, target))
    first = os.fsdecode(clean.partition(b"\n")[0])
    program = first[2:].strip().split(maxsplit=1) if first.startswith("#!") else []
    return [*(program or ["bash"]), target], mounts


def _log_folders(folder: Path) -> Path:
    """Folders for ``/logs``, each mounted by itself: an agent cannot put a link in its place."""
    for name in ("agent", "artifacts", "verifier"):
        (folder / "logs" / name).mkdir(parents=True)
    return folder / "logs"
