"""What ``turnkey env-check --mcp`` shows: the tools of the MCP servers in a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.plugins.config.mcp import McpConfig


def show_tools(file: str, *, start_timeout: float, as_json: bool, write: Callable[[str], Any]) -> bool:
    """Start the servers and list their tools by the names that the model sees.

    Returns:
        whether all of them could be started and have tools that can be shown.
    """

    async def schemas() -> list[dict[str, Any]]:
        servers = McpConfig(file).opened(start_timeout, start_timeout)
        assert servers is not None
        tools = await servers.episode(None)
        await tools.close()
        return tools.schemas

    try:
        listed = asyncio.run(schemas())
    except (ValueError, EnvironmentFailure) as error:
        write(json.dumps({"ok": False, "problem": str(error)}) if as_json else str(error))
        return False
    if as_json:
        write(json.dumps({"ok": True, "tools": listed}))
    else:
        for function in (tool["function"] for tool in listed):
            description = " ".join(function["description"].split())
            write(f"{function['name']}({', '.join(function['parameters']['properties'])})  {description}")
        write(f"{len(listed)} tools")
    return bool(listed)
