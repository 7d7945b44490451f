"""Checks of the agent loop turnkey_agent: the agent, its states and its rewards."""

from __future__ import annotations

import shutil
from urllib.parse import urlsplit

from verl_turnkey.envs.agents.function import is_url
from verl_turnkey.envs.errors import SandboxError
from verl_turnkey.envs.rewards import LOOPS_OWN
from verl_turnkey.envs.rpc import check_url
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.checks.agent_loop import check_routing
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.rewards import supplied_columns
from verl_turnkey.plugins.checks.run import AGENT, ROLLOUT, Run
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
            problem = f"{RUN}={agent.run} has no effect with the agent loop {min(run.loops)}"
            instead = f"leave out {ROLLOUT}.agent.default_agent_loop and the data's column agent_name"
            warn("agent-without-effect", f"{problem}: {instead}")
        return
    if agent.run is None:
        refuse("agent-missing", f"the agent loop {AGENT} runs an agent of yours: set {RUN}=module:function")
        return
    _check_run(turnkey)
    if agent.state not in STATES:
        load_function(agent.state, "turnkey.agent.state")
    elif agent.state == "workspace" and agent.cwd is not None:
        problem = f"turnkey.agent.state=workspace is a key of one episode's files, which turnkey.agent.cwd={agent.cwd}"
        refuse("agent-state-workspace", f"{problem} shares: set turnkey.agent.cwd=null, or another turnkey.agent.state")
    own = [entry["name"] == OWN_REWARD for entry in turnkey.rewards if entry.get("column") is None]
    if agent.reward == "none" and all(own):
        problem = "turnkey.agent.reward=none leaves the reward to turnkey.rewards, which has no component beside step"
        refuse("agent-without-reward", f"{problem}: add one, or set turnkey.agent.reward=result")
    check_routing(run.config, AGENT)
    if not agent.listen.startswith(LOCAL):
        problem = f"turnkey.agent.listen={agent.listen}: whoever reaches this address and knows an episode's secret"
        warn("agent-listens-openly", f"{problem} can query the model; requests are not encrypted")
        nodes = max(nodes for nodes, _ in run.pools.values())
        if nodes > 1 and agent.listen not in ANYWHERE:
            problem = (
                f"turnkey.agent.listen={agent.listen} is an address of one machine, and {nodes} nodes listen on it"
            )
            refuse("agent-listen-one-node", f"{problem}: set it to 0.0.0.0, in a closed network")
    default = type(turnkey.rollout)()
    for key in (*UNREAD, "anchor"):
        if (value := getattr(turnkey.rollout, key)) != getattr(default, key):
            problem = f"turnkey.rollout.{key}={value} has no effect with {RUN}"
            warn("agent-prompt-keys", f"{problem}: the agent writes its prompts")
    _warn_of_columns(run)


def _check_run(turnkey: TurnkeyConfig) -> None:
    agent = turnkey.agent
    assert agent.run is not None
    kind = "a command" if not isinstance(agent.run, str) else "a service" if is_url(agent.run) else "a function"
    if agent.in_process and kind != "a function":
        problem = f"turnkey.agent.in_process=true calls a function in the worker, and {RUN} is {kind}"
        refuse("agent-command-in-process", f"{problem}: set it to false")
    if agent.reward == "exit_code" and kind != "a command":
        problem = f"turnkey.agent.reward=exit_code needs a command, and {RUN}={agent.run} is {kind}"
        refuse("agent-exit-code", f"{problem}: return the reward, and set turnkey.agent.reward=result")
    if isinstance(agent.run, str):
        _check_service(agent) if is_url(agent.run) else load_function(agent.run, RUN)
        return
    try:
        sandbox = sandbox_of(agent)
    except SandboxError as error:
        refuse("agent-sandbox", f"{error}: set turnkey.agent.sandbox=none, or install what is missing on every node")
        return
    if sandbox.name == "none" and "{" not in agent.run[0] and shutil.which(agent.run[0]) is None:
        problem = f"{RUN}: there is no command {agent.run[0]!r} on this machine"
        refuse("agent-command-missing", f"{problem}: give its path, or install it on every node")


def _check_service(agent: AgentConfig) -> None:
    host = urlsplit(check_url(agent.run, RUN)).hostname or ""
    if agent.listen.startswith(LOCAL) and not host.startswith(LOCAL):
        problem = f"{RUN}={agent.run} runs on another machine, which cannot reach turnkey.agent.listen={agent.listen}"
        refuse("agent-remote-listen", f"{problem}: set turnkey.agent.listen=0.0.0.0, in a closed network")
    if agent.state == "workspace":
        problem = f"turnkey.agent.state=workspace hashes files on this machine, and {RUN}={agent.run} is a service"
        refuse("agent-remote-workspace", f"{problem}: post keys to /state, or choose another turnkey.agent.state")


def _warn_of_columns(run: Run) -> None:
    spec = run.estimator
    wanted = () if spec is None else spec.columns(run.params)
    rewards = [entry["column"] for entry in run.turnkey.rewards if entry.get("column")]
    known = {f"extra.{name}" for name in (*COLUMNS, *LOOPS_OWN, *rewards)} | supplied_columns(run)
    if spec and (lacking := [column for column in wanted if column.startswith("extra.") and column not in known]):
        returned = f"{{'reward': 1.0, 'extra': {{'{lacking[0].removeprefix('extra.')}': ...}}}}"
        problem = f"{spec.name} needs the column {lacking[0]!r}"
        warn("agent-column", f"{problem}, which the agent has to return in `extra`: {returned}")
