"""The node ``turnkey.mcp``: MCP servers whose tools the model may call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.config.roles import HiddenInServers, Hosted, Played, ServersFile

if TYPE_CHECKING:
    from verl_turnkey.envs.mcp_servers.servers import Server
    from verl_turnkey.envs.mcp_servers.tools import Servers


@dataclass(frozen=True)
class McpConfig:
    """Servers, which each episode has for itself, and which of their tools are shown."""

    servers: Played[HiddenInServers[ServersFile[str | dict[str, Any] | None]]] = None
    """file with mcpServers as MCP clients have it, or what is under that key: a command with args and env, or a url, by
    name; null: none"""
    shared: Played[list[str]] = field(default_factory=list)
    """servers that keep no state: all episodes of an agent-loop worker share one session with each"""
    tools: Played[list[str] | None] = None
    """names of the tools that are shown; null: all"""
    message_bytes: Hosted[int] = 4194304
    """bytes that a server may write for one call; more fails its episode"""

    def __post_init__(self) -> None:
        check(self.message_bytes > 0, "message_bytes", "positive bytes", self.message_bytes)

    def read(self) -> Sequence[Server]:
        """The servers; empty without any.

        Raises:
            ValueError: the file cannot be read, an entry is not a server, or ``shared`` names none of them.
        """
        if self.servers is None:
            return ()
        from verl_turnkey.envs.mcp_servers.servers import read_servers

        servers = read_servers(self.servers)
        names = [server.name for server in servers]
        if unknown := sorted(set(self.shared) - set(names)):
            raise ValueError(f"turnkey.mcp.shared names {unknown[0]!r}; turnkey.mcp.servers has {', '.join(names)}")
        return servers

    def opened(self, start_timeout: float, call_timeout: float) -> Servers | None:
        """The servers for the episodes of a process; None without any. Raises ``ValueError`` as :meth:`read`."""
        from verl_turnkey.envs.mcp_servers.tools import Servers

        servers = self.read()
        if not servers:
            return None
        return Servers(servers, self.shared, self.tools, self.message_bytes, start_timeout, call_timeout)
