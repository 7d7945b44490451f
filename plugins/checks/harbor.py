"""Check of Harbor tasks: whether the agent can be run on them."""

from __future__ import annotations

import json
from typing import Any

from verl_turnkey.envs.agents.harbor import ENV_ID, HarborTask, sandbox_for
from verl_turnkey.envs.errors import SandboxError, TaskFormatError
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.agent import AgentConfig, sandbox_of


def check_harbor(agent: AgentConfig, where: str, text: Any) -> None:
    """Refuse a Harbor task that cannot be run; other tasks are the agent's own business.

    ``where``: file and row, for errors. ``text``: the row's task.
    """
    try:
        task = json.loads(text)
        if not isinstance(task, dict) or task.get("env_id") != ENV_ID:
            return
    except (TypeError, ValueError):
        return
    if isinstance(agent.run, str):
        problem = (
            f"{where}: a Harbor task is for a command in a sandbox, and turnkey.agent.run={agent.run} is a function"
        )
        refuse("harbor-needs-command", f"{problem}: set turnkey.agent.run=[command, ...]")
        return
    if agent.cwd is not None:
        problem = f"{where}: a Harbor task fills the working folder, and turnkey.agent.cwd={agent.cwd} is shared"
        refuse("harbor-working-folder", f"{problem} by all episodes: set it to null")
    try:
        sandbox_for(HarborTask.load(**task.get("kwargs") or {}).filled(agent.inherit), sandbox_of(agent))
    except SandboxError:  # check_agent says so
        pass
    except (TaskFormatError, TypeError) as error:
        refuse("harbor-task", f"{where}: {error}")
