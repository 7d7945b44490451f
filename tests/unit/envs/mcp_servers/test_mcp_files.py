"""Files with ``mcpServers``: what is a server, and what the driver finds wrong without starting one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_turnkey.envs.mcp_servers.servers import Server, read_servers


def test_a_file_of_another_client_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    entries = {
        "files": {"command": "npx", "args": ["-y", "server", 7], "env": {"A": "b"}, "autoApprove": ["x"]},
        "web": {"type": "http", "url": "https://host/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}},
        "old": {"command": "gone", "disabled": True},
    }
    file.write_text(json.dumps({"mcpServers": entries, "inputs": []}))
    files, web = read_servers(str(file))
    assert files == Server("files", ("npx", "-y", "server", "7"), {"A": "b"})
    assert web == Server("web", url="https://host/mcp", headers={"Authorization": "Bearer ${TOKEN}"})
    assert read_servers(entries) == [files, web]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "cannot be read: Expecting property name"),
        ('{"servers": {}}', 'must hold {"mcpServers": '),
        ('{"mcpServers": []}', "must be a mapping of names to servers, not list"),
        ('{"mcpServers": {"a": {"command": "x", "disabled": true}}}', "names no servers: set it to null"),
        ('{"mcpServers": {"a": "npx server"}}', "a is 'npx server'; expected "),
        ('{"mcpServers": {"a": {"args": []}}}', "a has neither command nor url"),
        ('{"mcpServers": {"a": {"command": "x", "url": "http://h"}}}', "a has both command and url"),
        ('{"mcpServers": {"a": {"command": "x", "args": "-y"}}}', "must have a command as text and args as a list"),
        ('{"mcpServers": {"a": {"command": "x", "env": ["A=b"]}}}', "must have names and values as env"),
        ('{"mcpServers": {"a": {"type": "sse", "url": "http://h"}}}', "a has the transport 'sse'"),
        ('{"mcpServers": {"a": {"type": "http", "command": "x"}}}', "a has the transport 'http' and a command"),
    ],
)
def test_a_file_that_names_no_servers_is_refused(tmp_path: Path, content: str, error: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"turnkey\.mcp\.servers") as raised:
        read_servers(str(file))
    assert error in str(raised.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"turnkey\.mcp\.servers=no/mcp\.json cannot be read: .*No such file"):
        read_servers("no/mcp.json")


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"command": "no-such-command"}, "there is no command 'no-such-command', which starts a, on the PATH"),
        ({"command": "sh", "env": {"PATH": "/nowhere"}}, "there is no command 'sh'"),
        ({"command": "sh", "cwd": "/no/folder"}, "there is no folder /no/folder, the cwd of a"),
        ({"command": "sh", "args": ["${NO_SUCH_VARIABLE}"]}, "a names the variable NO_SUCH_VARIABLE, which is not set"),
        ({"url": "host/mcp"}, "the url of a must be http://host/path, not 'host/mcp'"),
        ({"url": "http:///mcp"}, "the url of a must be http://host/path"),
    ],
)
def test_what_cannot_be_reached_is_found_without_starting_it(entry: dict[str, Any], error: str) -> None:
    (server,) = read_servers({"a": entry})
    with pytest.raises(ValueError, match="a") as raised:
        server.check()
    assert error in str(raised.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"command": sys.executable, "cwd": "/tmp"},
        {"command": "sh", "args": ["${NO_SUCH_VARIABLE:-echo}", "${TURNKEY_SEED}"]},
        {"url": "http://127.0.0.1:8000/mcp"},
    ],
)
def test_what_can_be_reached_passes(entry: dict[str, Any]) -> None:
    (server,) = read_servers({"a": entry})
    server.check()


def test_variables_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("OTHER", "x")
    (server,) = read_servers({"a": {"command": "sh", "env": {"KEY": "${env:API_KEY}", "SEED": "${TURNKEY_SEED}"}}})
    variables = server.filled({"TURNKEY_SEED": "7"}).variables
    assert (variables["KEY"], variables["SEED"]) == ("secret", "7")
    assert variables.keys() <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "KEY", "SEED"}
