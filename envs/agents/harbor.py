"""Tasks in Harbor's format, folders with ``task.toml``, ``instruction.md``, ``environment/`` and ``tests/``.

Images are not built. The agent and the verifier run in sandboxes of their own, one after the other; they share the
working folder, and nothing that the agent starts or writes elsewhere reaches the verifier. In a task of several steps
they take turns.
"""

from __future__ import annotations

import asyncio
import codecs
import importlib
import json
import math
import os
import posixpath
import re
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, AgentResult, cut
from verl_turnkey.envs.agents.command import CommandRunner, run_job
from verl_turnkey.envs.agents.folders import episode_folder
from verl_turnkey.envs.agents.sandboxes import APP, Bubblewrap, Docker, Job, Mount, NoSandbox, Sandbox
from verl_turnkey.envs.errors import TaskFormatError
from verl_turnkey.envs.variables import HARMLESS, inherited

ENV_ID = "harbor"
"""``env_id`` in the column ``turnkey_task`` of such tasks; ``kwargs`` are the arguments of ``HarborTask.load``"""
REWARD_BYTES = 1 << 16

_BUILD_FILES = ("Dockerfile", ".dockerignore")
_COMPOSE = re.compile(r"(docker-)?compose[\w.-]*\.ya?ml")
# What is read, and what changes nothing here; any other key is refused by its name.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "": (
        *("agent", "verifier", "environment", "solution", "version", "schema_version", "metadata", "task", "source"),
        *("artifacts", "steps", "multi_step_reward_strategy"),
    ),
    "agent": ("timeout_sec",),
    "verifier": ("timeout_sec", "env"),
    "environment": (
        *("workdir", "docker_image", "env", "build_timeout_sec", "cpus", "memory", "memory_mb", "storage"),
        *("storage_mb", "allow_internet", "healthcheck"),
    ),
    "solution": ("env",),
    "steps": ("name", "agent", "verifier", "min_reward", "healthcheck", "artifacts"),
}
_HARMLESS = {
    "os": ("linux",),
    "user": ("root",),
    "environment_mode": ("shared",),
    **{f"{table}.network_mode": ("public", "no-network") for table in ("environment", "agent", "verifier")},
}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class HarborTask:
    """One task folder. Make it with ``load``."""

    folder: Path
    instruction: str
    workdir: str = APP
    docker_image: str | None = None
    agent_seconds: float = 600.0
    verifier_seconds: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)
    """before :meth:`filled` with ``${NAME}`` in it, as the two others"""
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    needs_image: bool = False
    """its files are those of an image: it has a Dockerfile that was not ignored, or names an image"""
    offline: tuple[bool, bool] = (False, False)
    """whether the agent and the verifier must not have a network"""
    healthchecks: tuple[tuple[str, float], ...] = ()
    """commands that must succeed before the agent starts, and their seconds"""
    tests: tuple[Path, ...] = ()
    """folders that make up ``/tests``; files of a later one replace those of others"""
    solution: Path = Path()
    files: Path | None = None
    """what a step adds to the working folder; ``setup.sh`` in it is run"""
    name: str = ""
    """of a step"""
    least: Mapping[str, float] = field(default_factory=dict)
    """minimum rewards of a step; with less, no later step is played"""
    steps: tuple[HarborTask, ...] = ()
    """what is played one after another; empty: the task itself"""
    final: bool = False
    """the reward is that of the last step that was played, and not the mean"""

    @classmethod
    def load(cls, path: str, ignore_dockerfile: bool = False) -> HarborTask:
        """Read the task folder ``path``.

        ``ignore_dockerfile``: run it on this machine's programs, although its Dockerfile or image may bring others.

        Raises:
            TaskFormatError: a file is missing, or the task needs what is not supported; names it.
        """
        folder = Path(path).expanduser().absolute()
        _require(folder, "task.toml", "environment")
        fields = _toml(folder / "task.toml")
        steps, strategy = fields.get("steps") or [], fields.get("multi_step_reward_strategy", "mean")
        steps = steps if isinstance(steps, list) else [steps]
        tables = {name: fields.get(name, {}) for name in ("agent", "verifier", "environment", "solution")}
        refused = [*_refused("", fields), *(key for name in tables for key in _refused(name, tables[name]))]
        for step in steps:
            refused += _refused("steps", step)
            for name in ("agent", "verifier") if isinstance(step, dict) else ():
                refused += [f"steps.{key}" for key in _refused(name, step.get(name, {}))]
        refused += [] if strategy in ("mean", "final") else [f"multi_step_reward_strategy = {strategy!r}"]
        refused += [
            f"environment/{p.name}" for p in sorted((folder / "environment").iterdir()) if _COMPOSE.match(p.name)
        ]
        if refused:
            raise TaskFormatError(f"Harbor task {folder}: not supported: {', '.join(refused)}")
        environment = tables["environment"]
        image, workdir = environment.get("docker_image"), environment.get("workdir", APP)
        if not (isinstance(workdir, str) and workdir.startswith("/") and workdir.strip("/.")):
            raise TaskFormatError(
                f"Harbor task {folder}: environment.workdir must be a path like /app, not {workdir!r}"
            )
        task = cls(
            folder=folder,
            instruction="",
            workdir=posixpath.normpath(f"/{workdir.lstrip('/')}"),
            docker_image=image,
            env=_variables(environment),
            solution_env=_variables(tables["solution"]),
            needs_image=not ignore_dockerfile and (bool(image) or (folder / "environment/Dockerfile").exists()),
            final=strategy == "final",
        )
        if not steps:
            return task._part("", tables, {})
        parts = tuple(task._step(step, tables) for step in steps)
        if len({part.name for part in parts}) < len(parts):
            raise TaskFormatError(f"Harbor task {folder}: each of the steps needs a name of its own")
        return replace(task, steps=parts, instruction="\n\n".join(part.instruction for part in parts))

    def _step(self, step: Mapping[str, Any], tables: Mapping[str, Any]) -> HarborTask:
        name, least = step.get("name"), step.get("min_reward", {})
        least = least if isinstance(least, Mapping) else {"reward": least}
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise TaskFormatError(f"Harbor task {self.folder}: steps.name must be a folder in steps/, not {name!r}")
        if not all(isinstance(value, int | float) for value in least.values()):
            raise TaskFormatError(f"Harbor task {self.folder}: min_reward must be a number, or numbers by name")
        merged = {**tables, **{phase: {**tables[phase], **step.get(phase, {})} for phase in ("agent", "verifier")}}
        files = self.folder / "steps" / name / "workdir"
        part = self._part(f"steps/{name}/", merged, step)
        return replace(part, name=name, least=least, files=files if files.is_dir() else None)

    def _part(self, place: str, tables: Mapping[str, Any], step: Mapping[str, Any]) -> HarborTask:
        """What is played at once: the task, or ``step``, whose folder is ``place``."""
        agent, verifier, environment = tables["agent"], tables["verifier"], tables["environment"]
        tests = [path for path in dict.fromkeys(("tests", f"{place}tests")) if (self.folder / path).is_dir()]
        tested = any((self.folder / path / "test.sh").exists() for path in tests)
        _require(self.folder, f"{place}instruction.md", *([] if tested else [f"{place}tests/test.sh"]))
        files = ("instruction.md", "solution", "solution/solve.sh", *(["workdir"] if step else []))
        for path in ("environment", *(place + name for name in files), *tests, *(f"{path}/test.sh" for path in tests)):
            if not Path(os.path.realpath(self.folder / path)).is_relative_to(self.folder.resolve()):
                raise TaskFormatError(f"Harbor task {self.folder}: {path} is a link out of this folder: copy it there")
        checks = [table["healthcheck"] for table in (environment, step) if table.get("healthcheck")]
        for check in checks:
            if not (isinstance(check, dict) and isinstance(check.get("command"), str)):
                raise TaskFormatError(f"Harbor task {self.folder}: healthcheck needs a command, got {check!r}")
        return replace(
            self,
            instruction=_text(self.folder / place / "instruction.md").strip(),
            agent_seconds=_seconds(self.folder, "agent", agent),
            verifier_seconds=_seconds(self.folder, "verifier", verifier),
            verifier_env=_variables(verifier),
            offline=(_offline(agent, environment), _offline(verifier, environment)),
            healthchecks=tuple(
                (check["command"], _seconds(self.folder, "healthcheck", check, 30.0)) for check in checks
            ),
            tests=tuple(self.folder / path for path in tests),
            solution=self.folder / place / "solution",
        )

    def filled(self, names: Collection[str] = ()) -> HarborTask:
        """With ``${NAME}`` and ``${NAME:-default}`` in its variables replaced by those of this process.

        ``names``: the variables that tasks may read, besides harmless ones: a task may be a stranger's.

        Raises:
            TaskFormatError: it names another one, or one that is not set, without a default.
        """
        values = inherited(names)

        def fill(table: str, variables: Mapping[str, str]) -> dict[str, str]:
            def value(match: re.Match[str]) -> str:
                text = values.get(match[1], match[2])
                if text is None:
                    readable = match[1] in names or match[1] in HARMLESS
                    fix = "set it" if readable else f"tasks may read it with turnkey.agent.inherit=[{match[1]}]"
                    raise TaskFormatError(
                        f"Harbor task {self.folder}: {table}.env needs the environment variable {match[1]}: {fix}"
                    )
                return text

            return {name: _VARIABLE.sub(value, text) for name, text in variables.items()}

        return replace(
            self,
            env=fill("environment", self.env),
            verifier_env=fill("verifier", self.verifier_env),
            solution_env=fill("solution", self.solution_env),
            steps=tuple(step.filled(names) for step in self.steps),
        )

    def fill(self, workspace: Path, rootfs: Path | None = None) -> None:
        """Put the task's files into the empty folder ``workspace``: those of the image's workdir, then its own."""
        if rootfs is not None and (source := rootfs / self.workdir.lstrip("/")).is_dir():
            _copy(source, workspace)
        _copy(self.folder / "environment", workspace, leave_out=_BUILD_FILES)


def _copy(source: Path, target: Path, leave_out: Collection[str] = ()) -> None:
    """Add what ``source`` holds, except ``leave_out``, to ``target``; replaces links there, follows none."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        below = Path(folder).relative_to(source)
        skipped = [name for name in names if name in leave_out and below == Path()]
        for place in (target / below / name for name in names if name not in skipped):
            if place.is_symlink() or place.is_file():
                place.unlink()
        return skipped

    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=left_out)


def find_tasks(folder: Path) -> list[Path]:
    """The task folders in ``folder``, sorted; ``folder`` itself if it is one.

    Raises:
        TaskFormatError: there are none.
    """
    paths = [folder] if (folder / "task.toml").is_file() else sorted(path.parent for path in folder.glob("*/task.toml"))
    if not paths:
        raise TaskFormatError(f"no Harbor tasks in {folder}: a task is a folder with a task.toml")
    return [path.absolute() for path in paths]


def read_reward(folder: Path, key: str = "reward") -> tuple[float, dict[str, float]]:
    """What a verifier left in its log folder: the reward of ``reward.txt``, or ``key`` of ``reward.json``.

    Also all numbers of ``reward.json``; one in a nested object is ``outer.inner``. Links are not followed: code of the
    agent runs in the tests.

    Raises:
        ValueError: there is neither file, or it cannot be read.
    """
    text = _read(folder / "reward.txt")
    if text is not None:
        return _number("reward.txt", text.strip()), {}
    text = _read(folder / "reward.json")
    if text is None:
        raise ValueError("it left neither reward.txt nor reward.json in /logs/verifier")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"reward.json is not JSON: {error}") from None
    if not isinstance(fields, dict) or not fields:
        raise ValueError(f"reward.json must hold names and numbers, not {text[:80]!r}")
    values = _flat(fields)
    name = next(iter(values)) if values.keys() == fields.keys() and len(values) == 1 else key
    if name not in values:
        raise ValueError(f"reward.json has no {key!r} among {sorted(values)}: set turnkey.agent.reward_key")
    numbers = {
        other: _number(f"reward.json: {other}", value)
        for other, value in values.items()
        if other == name or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    return numbers[name], numbers


def _flat(fields: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """The values of nested objects by their names with dots."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        values |= _flat(value, f"{outer}{name}.") if isinstance(value, dict) else {f"{outer}{name}": value}
    return values


def _read(path: Path) -> str | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(REWARD_BYTES).decode("utf-8-sig", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) <= 1e18 or isinstance(value, bool):
        raise ValueError(f"{what} must hold a finite number, not {str(value)[:80]!r}")
    return number


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except ConfigError as error:
        raise TaskFormatError(f"Harbor task {error}") from None


def _toml(path: Path) -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return toml.loads(_text(path))
    except toml.TOMLDecodeError as error:
        raise TaskFormatError(f"{path}: {error}") from None


def _refused(table: str, fields: Any) -> list[str]:
    """Keys of a table of ``task.toml`` that ask for what is not supported."""
    if not isinstance(fields, dict):
        return [f"{table} = {fields!r}"]
    return [
        f"{table}.{key}".lstrip(".")
        for key, value in fields.items()
        if key not in _KEYS[table]
        and value not in (None, 0, "", [], {}, *_HARMLESS.get(key, ()), *_HARMLESS.get(f"{table}.{key}", ()))
    ]


def _require(task: Path, *names: str) -> None:
    for name in names:
        if not (task / name).exists():
            raise TaskFormatError(f"Harbor task {task}: there is no {name}")


def _offline(phase: Mapping[str, Any], environment: Mapping[str, Any]) -> bool:
    """A phase has the network of the environment, unless it says otherwise."""
    mode = phase.get("network_mode") or environment.get("network_mode")
    return mode == "no-network" or (mode is None and environment.get("allow_internet") is False)


def _seconds(folder: Path, table: str, fields: Mapping[str, Any], default: float = 600.0) -> float:
    value = fields.get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise TaskFormatError(f"Harbor task {folder}: {table}.timeout_sec must be positive seconds, not {value!r}")
    return float(value)


def _variables(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in (fields.get("env") or {}).items()}


# --- running a task: the agent in one sandbox, then the task's tests in another one -----------------------------------


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

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> AgentResult:
        """As ``Runner.run``."""
        if task.get("env_id") != ENV_ID:
            return await super().run(task, agent)
        try:
            harbor = HarborTask.load(**task.get("kwargs") or {}).filled(self._inherit)
            return await self.play(harbor, task, agent)
        except (TaskFormatError, TypeError) as error:  # the latter: other arguments
            raise AgentFailure(str(error)) from None

    def scoring_seconds(self, task: Mapping[str, Any]) -> float:
        """How long the verifier of ``task``, and further steps, may run once the agent has ended."""
        if task.get("env_id") != ENV_ID:
            return 0.0
        try:
            harbor = HarborTask.load(**task.get("kwargs") or {})
            scoring = sum(part.verifier_seconds for part in harbor.steps or (harbor,))
            return scoring + (self.timeout if harbor.steps else 0.0)  # /finish ends one step
        except (TaskFormatError, TypeError):  # which ``run`` reports
            return 0.0

    async def play(
        self, task: HarborTask, row: Mapping[str, Any], agent: AgentHandle, *, solution: bool = False
    ) -> AgentResult:
        """One episode of ``task``. ``solution``: the reference solution runs in the agent's place.

        Raises:
            TaskFormatError: the sandbox does not have the task's image.
            AgentFailure: a sandbox could not be started, or the verifier left no reward.
        """
        sandbox, seconds, outcomes = sandbox_for(task, self.sandbox), self.timeout, list[AgentResult]()
        async with episode_folder() as folder:
            workspace = agent.workspace or folder / "app"
            agent = replace(agent, workspace=workspace)
            await asyncio.to_thread(task.fill, workspace, getattr(sandbox, "rootfs", None))
            for part in task.steps or (task,):
                before = outcomes[-1] if outcomes else None
                outcome, seconds = await self._play_part(part, before, sandbox, row, agent, seconds, solution)
                outcomes.append(outcome)
                rewards = {"reward": outcome.reward, **outcome.extra.get("rewards", {})}
                enough = all(rewards.get(name, -math.inf) >= least for name, least in part.least.items())
                if seconds <= 0 or not enough:
                    break
        return outcomes[-1] if not task.steps else _of_steps(task, outcomes)

    async def _play_part(
        self,
        part: HarborTask,
        before: AgentResult | None,
        sandbox: Sandbox,
        row: Mapping[str, Any],
        agent: AgentHandle,
        seconds: float,
        solution: bool,
    ) -> tuple[AgentResult, float]:
        """The task or a step of it: preparation, agent, verifier.

        ``before``: the previous step's result; None for the first step. ``seconds``: for all but the verifier.

        Returns:
            Its result, and the seconds that are left for further steps.
        """
        assert agent.workspace is not None
        deadline = time.monotonic() + seconds
        runner = CommandRunner(
            self.command,
            timeout=min(part.agent_seconds, seconds),
            sandbox=_online(sandbox, part.offline[0]),
            env={**part.env, **(part.solution_env if solution else {}), **self.env},
            files=self.files,
            limits=self.limits,
        )
        # Fresh folders for all but the working folder: what an agent left in HOME or as a reward is not there.
        async with episode_folder() as of_agent, episode_folder() as of_verifier:
            logs = _log_folders(of_agent)
            mounts = [Mount(logs / name, f"/logs/{name}", True) for name in ("agent", "artifacts", "verifier")]
            row = {**row, "instruction": part.instruction}
            job = replace(runner.job(row, agent, of_agent, agent.workspace, part.workdir), mounts=mounts)
            if problem := await _prepare(part, runner, replace(job, socket=None, env=part.env), deadline):
                if before is None:
                    raise AgentFailure(problem)
                # The agent may have caused it in an earlier step.
                return replace(before, reward=0.0, extra={}, reason=cut(problem)), 0.0
            if solution:
                command, copies = _script(part.solution / "solve.sh", "/solution/solve.sh", of_agent)
                job = replace(job, command=command, mounts=[*mounts, Mount(part.solution, "/solution"), *copies])
            ended = await run_job(runner.sandbox, job, min(part.agent_seconds, deadline - time.monotonic()))
            seconds = deadline - time.monotonic()
            outcome = runner.outcome(ended, agent.key)
            verifiers = _online(sandbox, part.offline[1])
            return await self._verify(part, verifiers, of_verifier, agent.workspace, logs, outcome), seconds

    async def _verify(
        self, task: HarborTask, sandbox: Sandbox, folder: Path, workspace: Path, logs: Path, outcome: AgentResult
    ) -> AgentResult:
        verifier_logs = _log_folders(folder) / "verifier"
        tests = task.tests[0]
        if len(task.tests) > 1:
            tests = folder / "tests"
            for path in task.tests:
                await asyncio.to_thread(_copy, path, tests)
        command, mounts = _script(tests / "test.sh", "/tests/test.sh", folder)
        mounts += [
            Mount(tests, "/tests"),
            *(Mount(logs / name, f"/logs/{name}", True) for name in ("agent", "artifacts")),
            Mount(verifier_logs, "/logs/verifier", True),
        ]
        env = {**task.env, **task.verifier_env}
        job = Job(command, folder, workspace, env, mounts, cwd=task.workdir, limits=self.limits)
        ended = await run_job(sandbox, job, task.verifier_seconds)
        if ended.status is None:
            raise AgentFailure(f"the verifier of {task.folder.name} ran longer than {task.verifier_seconds:g} s")
        try:
            reward, rewards = await asyncio.to_thread(read_reward, verifier_logs, self._reward_key)
        except ValueError as error:
            ending = f"exit status {ended.status}: {ended.last_line}"
            raise AgentFailure(cut(f"the verifier of {task.folder.name}: {error} ({ending})")) from None
        extra = {**outcome.extra, **({"rewards": rewards} if rewards else {})}
        return replace(outcome, reward=reward, success=reward >= 1.0, extra=extra, verified=True)


def _online(sandbox: Sandbox, offline: bool) -> Sandbox:
    """``sandbox``; without a network where the task says so."""
    return replace(sandbox, network="gateway") if offline and isinstance(sandbox, Bubblewrap | Docker) else sandbox


async def _prepare(task: HarborTask, runner: CommandRunner, job: Job, deadline: float) -> str:
    """Add a step's files, run its ``setup.sh`` and the healthchecks. Which of them failed, and how; empty: none."""
    jobs = [("healthcheck", replace(job, command=["bash", "-c", text]), limit) for text, limit in task.healthchecks]
    if task.files is not None:  # in the sandbox: a link of the agent's must not lead out of the working folder
        copy = ["bash", "-c", "cp -RP /step/. . && if [ -e /step/setup.sh ]; then bash setup.sh; fi"]
        mounts = [*job.mounts, Mount(task.files, "/step")]
        jobs.insert(0, ("setup", replace(job, command=copy, mounts=mounts), runner.timeout))
    for what, check, limit in jobs:
        seconds = min(limit, deadline - time.monotonic())
        ended = await run_job(runner.sandbox, check, seconds)
        if ended.status != 0:
            ending = (
                f"ran longer than {round(seconds, 1):g} s" if ended.status is None else f"exit status {ended.status}"
            )
            return f"the {what} of {task.name or task.folder.name} failed ({ending}): {ended.last_line}"
    return ""


def _of_steps(task: HarborTask, outcomes: Sequence[AgentResult]) -> AgentResult:
    """The mean reward of the steps that were played, or the last one's, with those of each."""
    rewards: dict[str, float] = {}
    for step, outcome in zip(task.steps, outcomes, strict=False):
        rewards[step.name] = outcome.reward or 0.0
        rewards |= {f"{step.name}.{name}": value for name, value in outcome.extra.get("rewards", {}).items()}
    values, last = [outcome.reward or 0.0 for outcome in outcomes], outcomes[-1]
    reward = values[-1] if task.final else sum(values) / len(values)
    solved = len(outcomes) == len(task.steps) and reward >= 1.0
    return replace(last, reward=reward, success=solved, extra={**last.extra, "rewards": rewards})


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
