"""Checks of the agent loop turnkey_agent in the driver: the agent, its states and its rewards."""

from __future__ import annotations

import shutil
from collections.abc import Collection

from omegaconf import DictConfig

from verl_turnkey.envs.errors import SandboxError
from verl_turnkey.envs.rewards import LOOPS_OWN
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.checks.agent_loop import check_routing
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.rewards import supplied_columns
from verl_turnkey.plugins.checks.sizes import AGENT
from verl_turnkey.plugins.config.agent import COLUMNS, OWN_REWARD, STATES, sandbox_of
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_params, estimator_of

LOCAL = ("127.", "localhost", "::1")
"""how addresses of this machine alone begin"""
UNREAD = (
    "history",
    "history_line",
    "keep_thinking",
    "summary",
    "action_format",
    "template",
    "system",
    "examples",
    "anchor",
)
"""keys of ``turnkey.rollout`` about prompts that an agent writes itself"""


def check_agent(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """Refuse an agent that cannot be run, or whose episodes cannot be trained.

    ``loops``: the agent loops of the training rows.

    Raises:
        ConfigError: names the key to change.
        ModuleImportError: the agent's function, or that of its states, cannot be imported.
    """
    agent = turnkey.agent
    if AGENT not in loops:
        if agent.run is not None:
            warn(
                "agent-without-effect",
                f"turnkey.agent.run={agent.run} has no effect with the agent loop {min(loops)}: leave out "
                "actor_rollout_ref.rollout.agent.default_agent_loop and the data's column agent_name",
            )
        return
    if agent.run is None:
        refuse("agent-missing", f"the agent loop {AGENT} runs an agent of yours: set turnkey.agent.run=module:function")
        return
    _check_run(turnkey)
    _check_states(turnkey)
    _check_rewards(turnkey)
    check_routing(config, AGENT)
    if not agent.listen.startswith(LOCAL):
        warn(
            "agent-listens-openly",
            f"turnkey.agent.listen={agent.listen}: whoever reaches this address and knows an episode's secret can "
            "query the model in it; requests are not encrypted",
        )
    default = type(turnkey.rollout)()
    for key in UNREAD:
        if (value := getattr(turnkey.rollout, key)) != getattr(default, key):
            warn(
                "agent-prompt-keys",
                f"turnkey.rollout.{key}={value} has no effect with turnkey.agent.run: the agent writes its prompts",
            )
    _warn_of_columns(config, turnkey)


def _check_run(turnkey: TurnkeyConfig) -> None:
    agent = turnkey.agent
    assert agent.run is not None
    if isinstance(agent.run, str):
        load_function(agent.run, "turnkey.agent.run")
        if agent.reward == "exit_code":
            refuse(
                "agent-exit-code",
                f"turnkey.agent.reward=exit_code needs a command, and turnkey.agent.run={agent.run} is a function: "
                "return the reward, and set turnkey.agent.reward=result",
            )
        return
    if agent.in_process:
        refuse(
            "agent-command-in-process",
            "turnkey.agent.in_process=true calls a function in the worker, and turnkey.agent.run is a command: set it "
            "to false",
        )
    try:
        sandbox = sandbox_of(agent)
    except SandboxError as error:
        refuse("agent-sandbox", f"{error}: set turnkey.agent.sandbox=none, or install what is missing on every node")
        return
    if sandbox.name == "none" and "{" not in agent.run[0] and shutil.which(agent.run[0]) is None:
        refuse(
            "agent-command-missing",
            f"turnkey.agent.run: there is no command {agent.run[0]!r} on this machine: give its path, or install it on "
            "every node",
        )


def _check_states(turnkey: TurnkeyConfig) -> None:
    agent = turnkey.agent
    if agent.state not in STATES:
        load_function(agent.state, "turnkey.agent.state")
    elif agent.state == "workspace" and agent.cwd is not None:
        refuse(
            "agent-state-workspace",
            f"turnkey.agent.state=workspace is a key of the files of one episode, and all episodes share "
            f"turnkey.agent.cwd={agent.cwd}: set turnkey.agent.cwd=null, or another turnkey.agent.state",
        )


def _check_rewards(turnkey: TurnkeyConfig) -> None:
    own = [entry["name"] == OWN_REWARD for entry in turnkey.rewards if entry.get("column") is None]
    if turnkey.agent.reward == "none" and all(own):
        refuse(
            "agent-without-reward",
            "turnkey.agent.reward=none leaves the reward to turnkey.rewards, which has no component beside step: add "
            "one, or set turnkey.agent.reward=result",
        )


def _warn_of_columns(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    spec = estimator_of(config)
    wanted = [] if spec is None else spec.columns(credit_params(config, turnkey))
    rewards = [entry["column"] for entry in turnkey.rewards if entry.get("column")]
    known = {f"extra.{name}" for name in (*COLUMNS, *LOOPS_OWN, *rewards)} | supplied_columns(config, turnkey)
    if spec and (lacking := [column for column in wanted if column.startswith("extra.") and column not in known]):
        warn(
            "agent-column",
            f"{spec.name} needs the column {lacking[0]!r}, which the agent has to return in `extra`: "
            f"{{'reward': 1.0, 'extra': {{'{lacking[0].removeprefix('extra.')}': ...}}}}",
        )
