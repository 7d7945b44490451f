"""Check of Harbor tasks: whether the agent can be run on them."""

from __future__ import annotations

import json
from typing import Any

from verl_turnkey.envs.agents.harbor import ENV_ID, HarborTask
from verl_turnkey.envs.agents.harbor_runner import sandbox_for
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
        refuse("harbor-needs-command", where=where, run=agent.run)
        return
    if agent.cwd is not None:
        refuse("harbor-working-folder", where=where, cwd=agent.cwd)
    try:
        sandbox_for(HarborTask.load(**task.get("kwargs") or {}).filled(agent.inherit), sandbox_of(agent))
    except SandboxError:  # check_agent says so
        pass
    except (TaskFormatError, TypeError) as error:
        refuse("harbor-task", where=where, error=error)
