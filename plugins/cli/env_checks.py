"""Harbor tasks for ``turnkey tasks`` and ``turnkey env-check``, and the tools that ``env-check --mcp`` lists."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, AgentResult
from verl_turnkey.envs.agents.harbor import ENV_ID, HarborRunner, HarborTask, find_tasks, sandbox_for
from verl_turnkey.envs.agents.sandboxes import Sandbox, choose
from verl_turnkey.envs.errors import TaskFormatError
from verl_turnkey.envs.mcp_servers.servers import Server, read_entries, read_server
from verl_turnkey.envs.mcp_servers.tools import Servers
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.cli.task_rows import TaskRow, split_rows

NOBODY = AgentHandle("http://127.0.0.1:1/none/v1", "none", "none")
"""the handle of a run without an agent"""


def write_tasks(
    out: Path,
    folder: Path,
    val_folder: Path | None,
    *,
    ignore_dockerfile: bool,
    train: int | None,
    val: int | None,
    seed: int,
    data_source: str | None,
) -> list[str]:
    """Write ``train.parquet`` and ``val.parquet`` in ``out`` with the tasks in ``folder``. What was written, in words.

    ``val_folder``: the tasks of validation; None: a tenth of those in ``folder``, at most 128.
    """
    rows_here = _rows(folder, ignore_dockerfile)
    others = None if val_folder is None else _rows(val_folder, ignore_dockerfile)
    splits = split_rows(rows_here, others, train, val, seed)
    lines = []
    for split, rows in zip(("train", "val"), splits, strict=True):
        path = out / f"{split}.parquet"
        tasks = [Task(ENV_ID, 0, row.kwargs) for row in rows]
        write_parquet(path, tasks, data_source or ENV_ID, split, prompts=[row.prompt for row in rows])
        lines.append(f"{len(rows)} tasks in {path}")
    return lines


def _rows(folder: Path, ignore_dockerfile: bool) -> list[TaskRow]:
    further: dict[str, Any] = {"ignore_dockerfile": True} if ignore_dockerfile else {}
    tasks = [{"path": str(path), **further} for path in find_tasks(folder)]
    return [TaskRow(kwargs, prompt=HarborTask.load(**kwargs).instruction) for kwargs in tasks]


def check_tasks(
    folder: Path, *, ignore_dockerfile: bool, as_json: bool, write: Callable[[str], Any], inherit: Collection[str] = ()
) -> bool:
    """Run each task in ``folder`` with its reference solution, with nothing, and with a reward that was planted.

    ``inherit``: as ``turnkey.agent.inherit``.

    Returns:
        whether all of them are right.
    """
    results: dict[str, list[str]] = {}
    for path in find_tasks(folder):
        try:
            task = HarborTask.load(str(path), ignore_dockerfile).filled(inherit)
            sandbox = sandbox_for(task, choose("auto", image=task.docker_image if task.needs_image else None))
            problems = asyncio.run(check_task(task, sandbox))
        except TaskFormatError as error:
            problems = [str(error)]
        results[path.name] = problems
        if not as_json:
            write(f"{path.name}: {'; '.join(problems) or 'right'}")
    if as_json:
        write(json.dumps([{"task": name, "ok": not faults, "problems": faults} for name, faults in results.items()]))
    return not any(results.values())


async def check_task(task: HarborTask, sandbox: Sandbox) -> list[str]:
    """The problems of ``task``, in words.

    The solution must get 1, doing nothing less than 1, and planting a reward must change nothing.
    """
    problems = []
    scripts = [part.solution / "solve.sh" for part in task.steps or (task,)]
    if missing := [str(path.relative_to(task.folder)) for path in scripts if not path.exists()]:
        problems.append(f"there is no {missing[0]}, so nothing shows that the task can be solved")
    else:
        oracle = await _played(task, sandbox, [], solution=True)
        if oracle.reward != 1.0:
            problems.append(f"the reference solution must get reward 1, not {_with_reason(oracle)}")
    nothing = await _played(task, sandbox, ["true"])
    if nothing.reward is None or nothing.reward >= 1.0:
        problems.append(f"doing nothing must get a reward below 1, not {_with_reason(nothing)}")
    plant = "echo 1 | tee /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    planted = await _played(task, sandbox, ["bash", "-c", plant])
    if planted.reward != nothing.reward:
        results = {"planted": planted.reason, "nothing": nothing.reason}
        reasons = "; ".join(f"{what}: {reason}" for what, reason in results.items() if reason)
        words = f"it got {_reward(planted)} instead of {_reward(nothing)}{f' ({reasons})' * bool(reasons)}"
        problems.append(f"a planted reward must be ignored: {words}")
    return problems


async def _played(task: HarborTask, sandbox: Sandbox, command: list[str], *, solution: bool = False) -> AgentResult:
    """The result, without a reward after a failure."""
    seconds = sum(part.agent_seconds for part in task.steps or (task,))
    runner = HarborRunner(command, timeout=seconds, sandbox=sandbox)
    try:
        return await runner.play(task, {}, NOBODY, solution=solution)
    except AgentFailure as failure:
        return AgentResult(reason=failure.reason)


def _reward(result: AgentResult) -> str:
    return "a failure" if result.reward is None else str(result.reward)


def _with_reason(result: AgentResult) -> str:
    return f"{_reward(result)}: {result.reason}" if result.reason else _reward(result)


def show_tools(file: str, *, start_timeout: float, as_json: bool, write: Callable[[str], Any]) -> bool:
    """Start the servers, list their tools by the names that the model sees, and say what is wrong with the others.

    Returns:
        whether all of them could be started and have tools that can be shown.
    """
    servers: list[Server] = []
    problems: dict[str, str] = {}
    listed: list[dict[str, Any]] = []
    try:
        for name, entry in read_entries(file).items():
            try:
                servers.append(read_server(name, entry))
            except ValueError as error:
                problems[name] = str(error)
        opened = Servers(servers, start_timeout=start_timeout, call_timeout=start_timeout)
        listed, failures = asyncio.run(opened.listed())
        problems |= failures
    except ValueError as error:  # of the whole file
        problems[file] = str(error)
    right = bool(listed) and not problems
    if as_json:
        write(json.dumps({"ok": right, "tools": listed, "problems": problems}))
        return right
    for function in (tool["function"] for tool in listed):
        description = " ".join(function["description"].split())
        write(f"{function['name']}({', '.join(function['parameters']['properties'])})  {description}")
    for problem in problems.values():
        write(problem)
    if listed or not problems:
        write(f"{len(listed)} tools")
    return right
