"""Check of MCP servers: whether they can be reached, and whether the model is shown their tools."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from verl_turnkey.envs.prompting.actions import TOOLS
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import OURS, Run
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.rollout.strategies import KEY

SERVERS = "turnkey.mcp.servers"


def check_mcp(run: Run) -> None:
    """Refuse servers that cannot be started or reached, without starting one; the probe lists their tools."""
    mcp = run.turnkey.mcp
    if mcp.servers is None:
        return
    if OURS not in run.loops:
        idle = f"{SERVERS} has no effect with the agent loop {min(run.loops)}"
        warn("mcp-without-effect", f"{idle}: only {OURS} shows tools of MCP servers")
        return
    if run.turnkey.rollout.action_format != TOOLS:
        problem = f"{SERVERS} gives the model tools, which {run.setting('turnkey.rollout.action_format')} does not call"
        refuse("mcp-action-format", f"{problem}: set it to {TOOLS}, or the servers to null")
    if find_spec("mcp") is None:
        refuse("mcp-package-missing", f'{SERVERS} needs the package mcp: pip install "verl-turnkey[mcp]"')
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
    if problems:
        error = "; ".join(problems)
        refuse("mcp-servers", f"an MCP server cannot be started or reached: {error}")
        return
    own = [server.name for server in servers if server.name not in mcp.shared]
    if own and run.strategy and run.strategy.clones:
        problem = f"{KEY}={run.strategy.name} forks episodes, and no fork has the state of the MCP server {own[0]}"
        fix = "set turnkey.mcp.shared=[...] with the servers that keep none, or an independent strategy"
        refuse("mcp-branches", f"{problem}: {fix}")


async def with_servers(turnkey: TurnkeyConfig, task: Task, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tools of the first episode: ``own``, its environment's, and those of MCP servers, which start for it."""
    from verl_turnkey.plugins.rollout.tool_calls import tools_of

    servers = turnkey.mcp.opened(turnkey.env.reset_timeout, turnkey.env.step_timeout)
    if servers is None:
        return own
    try:
        episode = await servers.episode(task, [tool["function"]["name"] for tool in own])
        await episode.close()
    finally:
        await servers.close()
    return [*own, *tools_of(episode.schemas).schemas]
