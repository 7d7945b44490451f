"""Checks of our agent loops: turnkey_env with its prompts, MCP servers and first task, and a user's agent."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.agents.function import ARGUMENTS, is_url
from verl_turnkey.envs.errors import SandboxError
from verl_turnkey.envs.http import check_url
from verl_turnkey.envs.prompting.actions import CALLS, FORMATS, TOOLS, instruction_of, load_parser
from verl_turnkey.envs.prompting.prompts import check_examples, load_template
from verl_turnkey.envs.rewards import LOOPS_OWN
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.images import TakesImages, check_images
from verl_turnkey.plugins.checks.rewards import check_columns, supplied_columns
from verl_turnkey.plugins.checks.run import ACTOR, AGENT, OURS, ROLLOUT, CheckedRun
from verl_turnkey.plugins.config.agent import ANYWHERE, COLUMNS, OWN_REWARD, STATES, AgentConfig, sandbox_of
from verl_turnkey.plugins.config.schema import load_examples
from verl_turnkey.plugins.rollout.columns import ROLE


def check_agent_loop(
    run: CheckedRun,
    reward_columns: tuple[str, ...],
    strategy_columns: tuple[str, ...] = (),
    takes_images: TakesImages = check_images,
) -> None:
    """Check limits, prompt settings and the first task of the files, which the probe plays for a few steps.

    Args:
        reward_columns, strategy_columns: the columns that reward components and the rollout strategy add.
        takes_images: checks the model where the first task gives images.
    """
    check_routing(run.config, "turnkey_env")
    budget, limit = run.rollout.response_length, run.turnkey.rollout.max_tokens_per_turn
    if limit is not None and limit > budget:
        refuse("turn-longer-than-response", limit=limit, budget=budget)
    _check_prompts(run)
    from verl_turnkey.plugins.checks.probe import probe

    if (parquet := [file for file in run.files if file.endswith(".parquet")]) and run.turnkey.env.probe:
        check_columns(run, probe(run.config, run.turnkey, parquet[0], takes_images), reward_columns, strategy_columns)


def check_routing(config: DictConfig, loop: str) -> None:
    """Refuse replay of routed experts: the rows of our agent loops do not carry them."""
    replayed = {f"{ROLLOUT}.enable_rollout_routing_replay": "false"}
    replayed |= {f"{ACTOR}.{engine}.router_replay.mode": "R2" for engine in ("megatron", "veomni")}
    if active := [key for key in replayed if OmegaConf.select(config, key) in (True, "R3")]:
        instead = " and ".join(f"{key}={replayed[key]}" for key in active)
        more = " (R2 records routes in the trainer)" if "R2" in instead else ""
        refuse("routed-experts", loop=loop, instead=instead, more=more)


def _check_prompts(run: CheckedRun) -> None:
    """Check the prompt template, and load the functions and parsers that the agent loop will call."""
    options = run.turnkey.rollout
    try:
        template = load_template(options.template)
    except (ValueError, OSError) as error:
        refuse("template-invalid", error=error)
    summarizes = options.prompt == "conversation" and options.when_full == "summarize"
    without_effect = {"summary_request": "when_full"} if not summarizes else {"summary": "when_full"}
    if options.prompt == "template":
        without_effect |= dict.fromkeys(("observation_role", "thinking", "when_full", "summary_request"), "prompt")
    for key, other in without_effect.items():
        if (value := getattr(options, key)) != getattr(type(options)(), key):
            warn("prompt-keys-without-effect", key=key, value=value, other=other, chosen=getattr(options, other))
    if options.action_format in CALLS:
        from verl_turnkey.plugins.rollout.tool_calls import check_tool_parser

        check_tool_parser(run.rollout.multi_turn.format)
    else:
        load_parser(options.action_format)
    try:
        examples = load_examples(options.examples)
        check_examples(examples, options.action_format)
    except ConfigError as error:
        refuse("examples-invalid", error=str(error))
    if options.action_format not in (*FORMATS, *CALLS) and not examples:  # does the prompt explain the user's own?
        instruction = instruction_of(options.action_format)
        if instruction and "{format}" not in template:
            warn("instruction-not-shown", template=options.template, action_format=options.action_format)
        elif not instruction and options.system is None and "{format}" in template:
            warn("format-not-told", action_format=options.action_format)
    if (options.summary is not None or summarizes) and "{summary}" not in template:
        needs = "when_full=summarize" if summarizes else f"summary={options.summary}"
        refuse("template-without-summary", needs=needs, template=options.template)
    if options.summary is not None:
        load_function(options.summary, "turnkey.rollout.summary", "turns")
    if summarizes and run.strategy:
        refuse("summarize-branches", strategy=run.strategy.name)
    if summarizes and 2 * (limit := options.max_tokens_per_turn or 0) + REQUEST > run.rollout.response_length:
        refuse("summarize-without-room", limit=limit, budget=run.rollout.response_length, least=2 * limit + REQUEST)


def check_opponents(run: CheckedRun) -> None:
    """Refuse opponents that cannot play in this run; the probe sees whether the environment has roles for them."""
    fmt = run.turnkey.rollout.action_format
    for key, opponent in run.turnkey.opponents.items():
        run.needs_our_loop("opponent-agent-loop", key=key, opponent=opponent)
        if not isinstance(opponent, str) and fmt in CALLS:
            refuse("opponent-calls", key=key, opponent=opponent, fmt=fmt)


RUN = "turnkey.agent.run"
REQUEST = 64
"""roughly how many tokens ``turnkey.rollout.summary_request`` takes in a chat"""
LOCAL = ("127.", "localhost", "::1")
"""how addresses of this machine alone begin"""
# Keys of turnkey.rollout about prompts that an agent writes itself.
UNREAD = ("history", "history_line", "keep_thinking", "summary", "action_format", "template", "system", "examples")


def check_agent(run: CheckedRun) -> None:
    """Refuse an agent that cannot be run, or whose episodes cannot be trained."""
    turnkey, agent = run.turnkey, run.turnkey.agent
    if AGENT not in run.loops:
        if agent.run is not None:
            warn("agent-without-effect", run=agent.run, loop=min(run.loops))
        return
    if agent.run is None:
        refuse("agent-missing")
        return
    _check_run(agent)
    if agent.state not in STATES:
        load_function(agent.state, "turnkey.agent.state", "view")
    elif agent.state == "workspace" and agent.cwd is not None:
        refuse("agent-state-workspace", cwd=agent.cwd)
    if agent.reward == "none" and all(e["name"] == OWN_REWARD for e in turnkey.rewards if e.get("column") is None):
        refuse("agent-without-reward")
    check_routing(run.config, AGENT)
    try:
        endpoints = agent.endpoints()
    except ConfigError as error:
        refuse("agent-models", error=error)
        return
    for name, endpoint in endpoints.items():
        if endpoint.api_key_env and not os.environ.get(endpoint.api_key_env):
            refuse("agent-models-key", name=name, variable=endpoint.api_key_env)
    if not agent.listen.startswith(LOCAL):
        warn("agent-listens-openly", listen=agent.listen)
        nodes = max(nodes for nodes, _ in run.pools.values())
        if nodes > 1 and agent.listen not in ANYWHERE:
            refuse("agent-listen-one-node", listen=agent.listen, nodes=nodes)
    default = type(turnkey.rollout)()
    for key in (*UNREAD, "anchor"):
        if (value := getattr(turnkey.rollout, key)) != getattr(default, key):
            warn("agent-prompt-keys", key=key, value=value)
    if spec := run.estimator:
        rewards = [entry["column"] for entry in turnkey.rewards if entry.get("column")]
        columns = {f"extra.{name}" for name in (*COLUMNS, *LOOPS_OWN, *rewards)} | supplied_columns(run)
        wanted = [column for column in spec.columns(run.params) if column.startswith("extra.")]
        if lacking := [column for column in wanted if column not in columns]:
            name = lacking[0].removeprefix("extra.")
            instead = f", or each request names as its model {agent.model}/<role>" if name == ROLE else ""
            warn("agent-column", method=spec.name, lacking=lacking[0], name=name, instead=instead)


def check_isolation(agent: AgentConfig) -> None:
    """Refuse limits and a sandbox that would have no effect, or would count other episodes' files."""
    if agent.disk_gb is not None and agent.cwd is not None:
        refuse("agent-disk-shared", disk=agent.disk_gb, cwd=agent.cwd)
    service = isinstance(agent.run, str) and is_url(agent.run)
    if service or agent.in_process:
        unbound = {"memory_gb": (None,), "processes": (None,), "disk_gb": (None,), "fresh_process": (False,)}
        for key, values in {**unbound, "sandbox": ("auto", "none")}.items():
            if (value := getattr(agent, key)) not in values:
                what = "a service" if service else "called in the worker (turnkey.agent.in_process=true)"
                refuse("agent-not-isolated", key=key, value=value, what=what)


def _check_run(agent: AgentConfig) -> None:
    assert agent.run is not None
    kind = "a command" if not isinstance(agent.run, str) else "a service" if is_url(agent.run) else "a function"
    if agent.in_process and kind != "a function":
        refuse("agent-command-in-process", kind=kind)
    if agent.reward == "exit_code" and kind != "a command":
        refuse("agent-exit-code", run=agent.run, kind=kind)
    check_isolation(agent)
    if isinstance(agent.run, str):
        if kind == "a function":
            load_function(agent.run, RUN, *ARGUMENTS)
        else:
            host = urlsplit(check_url(agent.run, RUN)).hostname or ""
            if agent.listen.startswith(LOCAL) and not host.startswith(LOCAL):
                refuse("agent-remote-listen", run=agent.run, listen=agent.listen)
            if agent.state == "workspace":
                refuse("agent-remote-workspace", run=agent.run)
            return
    if agent.in_process:
        return
    try:
        sandbox = sandbox_of(agent)
    except SandboxError as error:
        refuse("agent-sandbox", error=error)
        return
    if isinstance(agent.run, str) or sandbox.name != "none" or "{" in agent.run[0]:
        return
    if shutil.which(agent.run[0]) is None:
        refuse("agent-command-missing", command=agent.run[0])


def check_mcp(run: CheckedRun) -> None:
    """Refuse servers that cannot be started or reached, without starting one; the probe lists their tools."""
    mcp = run.turnkey.mcp
    if mcp.servers is None:
        return
    if OURS not in run.loops:
        warn("mcp-without-effect", loop=min(run.loops))
        return
    if run.turnkey.rollout.action_format != TOOLS:
        refuse("mcp-action-format", action_format=run.value_text("turnkey.rollout.action_format"))
    if find_spec("mcp") is None:
        refuse("mcp-package-missing")
    problems, servers = [], []
    try:
        servers = mcp.read()
    except ValueError as error:
        problems.append(str(error))
    for server in servers:
        try:
            server.check()
        except ValueError as error:
            problems.append(str(error))
    unshared = [server.name for server in servers if server.name not in mcp.shared]
    if problems:
        refuse("mcp-servers", error="; ".join(problems))
    elif unshared and run.strategy and run.strategy.clones:
        refuse("mcp-branches", strategy=run.strategy.name, server=unshared[0])
