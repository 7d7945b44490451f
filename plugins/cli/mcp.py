"""What ``turnkey env-check --mcp`` shows: the tools of the MCP servers in a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from verl_turnkey.envs.mcp_servers.servers import Server, read_entries, read_server
from verl_turnkey.envs.mcp_servers.tools import Servers


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
