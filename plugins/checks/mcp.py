"""Check of MCP servers: whether they can be reached, and whether the model is shown their tools."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from verl_turnkey.envs.prompting.actions import TOOLS
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import OURS, Run
from verl_turnkey.plugins.config.schema import TurnkeyConfig

SERVERS = "turnkey.mcp.servers"


def check_mcp(run: Run) -> None:
    """Refuse servers that cannot be started or reached, without starting one; the probe lists their tools."""
    mcp = run.turnkey.mcp
    if mcp.servers is None:
        return
    if OURS not in run.loops:
        warn("mcp-without-effect", loop=min(run.loops))
        return
    if run.turnkey.rollout.action_format != TOOLS:
        refuse("mcp-action-format", action_format=run.shown("turnkey.rollout.action_format"))
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
    if problems:
        error = "; ".join(problems)
        refuse("mcp-servers", error=error)
        return
    own = [server.name for server in servers if server.name not in mcp.shared]
    if own and run.strategy and run.strategy.clones:
        refuse("mcp-branches", strategy=run.strategy.name, server=own[0])


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
