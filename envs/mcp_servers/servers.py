"""The servers in a file with ``mcpServers``, as MCP clients have it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl_turnkey.advantage.text_files import read_text

KEY = "turnkey.mcp.servers"
HTTP = ("http", "streamable-http", "streamableHttp", "streamable_http")
"""what clients call the transport of a URL"""
OF_TASK = {"TURNKEY_SEED": "0", "TURNKEY_TASK": "{}"}
"""variables that each episode sets: its seed, and its task as JSON; with the values for a look at the tools"""
_VARIABLE = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}]*))?\}")
_PASSED_ON = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")  # by the clients of the package mcp, too


@dataclass(frozen=True)
class Server:
    """One entry: a command that speaks on its standard streams, or the URL of a server with streamable HTTP."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """variables of the command, besides HOME, LOGNAME, PATH, SHELL, TERM and USER"""
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def filled(self, variables: Mapping[str, str]) -> Server:
        """With ``${NAME}`` and ``${NAME:-default}`` replaced by variables of this process, and by ``variables``.

        Raises:
            ValueError: names a variable that is not set.
        """

        def value(match: re.Match[str]) -> str:
            text = variables.get(match[1], os.environ.get(match[1], match[2]))
            if text is None:
                raise ValueError(f"{KEY}: {self.name} names the variable {match[1]}, which is not set: export it")
            return text

        def fill(text: str) -> str:
            return _VARIABLE.sub(value, text)

        return replace(
            self,
            command=tuple(map(fill, self.command)),
            env={name: fill(text) for name, text in self.env.items()},
            cwd=self.cwd and fill(self.cwd),
            url=self.url and fill(self.url),
            headers={name: fill(text) for name, text in self.headers.items()},
        )

    @property
    def variables(self) -> dict[str, str]:
        """All variables of the command's process."""
        return {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | dict(self.env)

    def check(self) -> None:
        """Look whether it can be reached at all, without starting it.

        Raises:
            ValueError: a variable that is not set, a command that is not on PATH, no folder ``cwd``, or no URL.
        """
        server = self.filled(OF_TASK)
        if server.url is not None:
            parts = urlsplit(server.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{KEY}: the url of {self.name} must be http://host/path, not {server.url!r}")
            return
        if server.cwd is not None and not Path(server.cwd).is_dir():
            raise ValueError(f"{KEY}: there is no folder {server.cwd}, the cwd of {self.name}")
        if shutil.which(server.command[0], path=server.variables.get("PATH")) is None:
            raise ValueError(f"{KEY}: there is no command {server.command[0]!r}, which starts {self.name}, on the PATH")


def read_servers(value: str | Mapping[str, Any]) -> list[Server]:
    """The servers of a file with ``mcpServers``, or of what is under that key; without those that are disabled.

    Raises:
        ValueError: the file cannot be read, or an entry is not a server: says which, and what was expected.
    """
    return [read_server(name, entry) for name, entry in read_entries(value).items()]


def read_entries(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a file with ``mcpServers``, or of what is under that key, by name; not those that are disabled.

    Raises:
        ValueError: the file cannot be read, or has no entries.
    """
    entries: Any = value
    if isinstance(value, str):
        try:
            entries = json.loads(read_text(Path(value).expanduser()))
        except (OSError, ValueError) as error:
            raise ValueError(f"{KEY}={value} cannot be read: {error}") from None
    if isinstance(entries, Mapping) and "mcpServers" in entries:
        entries = entries["mcpServers"]
    elif isinstance(value, str):
        raise ValueError(f'{KEY}={value} must hold {{"mcpServers": {{"name": {{"command": ...}}}}}}')
    if not isinstance(entries, Mapping):
        raise ValueError(f"{KEY} must be a mapping of names to servers, not {type(entries).__name__}")
    enabled = {
        str(name): entry
        for name, entry in entries.items()
        if not (isinstance(entry, Mapping) and entry.get("disabled"))
    }
    if not enabled:
        raise ValueError(f"{KEY} names no servers: set it to null, or add one")
    return enabled


def read_server(name: str, entry: Any) -> Server:
    """The server of one entry, whose keys that only concern other clients are ignored.

    Raises:
        ValueError: it is not a server: says what was expected.
    """

    def wrong(what: str) -> ValueError:
        return ValueError(
            f'{KEY}: {name} {what}; expected {{"command": ..., "args": [...], "env": {{...}}}} or {{"url": ...}}'
        )

    def texts(key: str) -> dict[str, str]:
        values = entry.get(key) or {}
        if not isinstance(values, Mapping):
            raise wrong(f"must have names and values as {key}, not {values!r}")
        return {str(name): str(value) for name, value in values.items()}

    if not isinstance(entry, Mapping):
        raise wrong(f"is {entry!r}")
    command, url, arguments, cwd = (entry.get(key) for key in ("command", "url", "args", "cwd"))
    kind = entry.get("type") or entry.get("transport") or ("stdio" if url is None else "http")
    if (command is None) == (url is None):
        raise wrong("has both command and url" if command else "has neither command nor url")
    if url is not None:
        if kind not in HTTP:
            raise wrong(f"has the transport {kind!r}, and a URL is spoken to with streamable HTTP (type: http)")
        return Server(name, url=str(url), headers=texts("headers"))
    if kind != "stdio":
        raise wrong(f"has the transport {kind!r} and a command, which is spoken to on its standard streams")
    if not isinstance(command, str) or not command or not isinstance(arguments or [], list):
        raise wrong("must have a command as text and args as a list")
    whole = (command, *map(str, arguments or ()))
    return Server(name, whole, texts("env"), None if cwd is None else str(cwd))
