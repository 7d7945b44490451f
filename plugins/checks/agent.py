"""Checks of the agent loop turnkey_agent: the agent, its states and its rewards."""

from __future__ import annotations

import shutil
from urllib.parse import urlsplit

from verl_turnkey.envs.agents.remote import is_url
from verl_turnkey.envs.errors import SandboxError
from verl_turnkey.envs.rewards import LOOPS_OWN
from verl_turnkey.envs.rpc import check_url
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.checks.agent_loop import check_routing
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.rewards import supplied_columns
from verl_turnkey.plugins.checks.run import AGENT, Run
from verl_turnkey.plugins.config.agent import ANYWHERE, COLUMNS, OWN_REWARD, STATES, AgentConfig, sandbox_of
from verl_turnkey.plugins.config.schema import TurnkeyConfig

RUN = "turnkey.agent.run"
LOCAL = ("127.", "localhost", "::1")
"""how addresses of this machine alone begin"""
# Keys of turnkey.rollout about prompts that an agent writes itself.
UNREAD = ("history", "history_line", "keep_thinking", "summary", "action_format", "template", "system", "examples")


def check_agent(run: Run) -> None:
    """Refuse an agent that cannot be run, or whose episodes cannot be trained."""
    turnkey, agent = run.turnkey, run.turnkey.agent
    if AGENT not in run.loops:
        if agent.run is not None:
            warn("agent-without-effect", run=agent.run, loop=min(run.loops))
        return
    if agent.run is None:
        refuse("agent-missing")
        return
    _check_run(turnkey)
    if agent.state not in STATES:
        load_function(agent.state, "turnkey.agent.state")
    elif agent.state == "workspace" and agent.cwd is not None:
        refuse("agent-state-workspace", cwd=agent.cwd)
    own = [entry["name"] == OWN_REWARD for entry in turnkey.rewards if entry.get("column") is None]
    if agent.reward == "none" and all(own):
        refuse("agent-without-reward")
    check_routing(run.config, AGENT)
    if not agent.listen.startswith(LOCAL):
        warn("agent-listens-openly", listen=agent.listen)
        nodes = max(nodes for nodes, _ in run.pools.values())
        if nodes > 1 and agent.listen not in ANYWHERE:
            refuse("agent-listen-one-node", listen=agent.listen, nodes=nodes)
    default = type(turnkey.rollout)()
    for key in (*UNREAD, "anchor"):
        if (value := getattr(turnkey.rollout, key)) != getattr(default, key):
            warn("agent-prompt-keys", key=key, value=value)
    _warn_of_columns(run)


def _check_run(turnkey: TurnkeyConfig) -> None:
    agent = turnkey.agent
    assert agent.run is not None
    kind = "a command" if not isinstance(agent.run, str) else "a service" if is_url(agent.run) else "a function"
    if agent.in_process and kind != "a function":
        refuse("agent-command-in-process", kind=kind)
    if agent.reward == "exit_code" and kind != "a command":
        refuse("agent-exit-code", run=agent.run, kind=kind)
    if isinstance(agent.run, str):
        _check_service(agent) if is_url(agent.run) else load_function(agent.run, RUN)
        return
    try:
        sandbox = sandbox_of(agent)
    except SandboxError as error:
        refuse("agent-sandbox", error=error)
        return
    if sandbox.name == "none" and "{" not in agent.run[0] and shutil.which(agent.run[0]) is None:
        refuse("agent-command-missing", command=agent.run[0])


def _check_service(agent: AgentConfig) -> None:
    host = urlsplit(check_url(agent.run, RUN)).hostname or ""
    if agent.listen.startswith(LOCAL) and not host.startswith(LOCAL):
        refuse("agent-remote-listen", run=agent.run, listen=agent.listen)
    if agent.state == "workspace":
        refuse("agent-remote-workspace", run=agent.run)


def _warn_of_columns(run: Run) -> None:
    spec = run.estimator
    wanted = () if spec is None else spec.columns(run.params)
    rewards = [entry["column"] for entry in run.turnkey.rewards if entry.get("column")]
    known = {f"extra.{name}" for name in (*COLUMNS, *LOOPS_OWN, *rewards)} | supplied_columns(run)
    if spec and (lacking := [column for column in wanted if column.startswith("extra.") and column not in known]):
        warn("agent-column", method=spec.name, lacking=lacking[0], name=lacking[0].removeprefix("extra."))
