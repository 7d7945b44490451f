"""Sessions with real MCP servers, on stdio and on HTTP, and what becomes of their processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_processes import alive
from typer.testing import CliRunner

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.mcp_servers.servers import read_servers
from verl_turnkey.envs.mcp_servers.tools import EpisodeTools, Servers
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.cli.main import app

PAD = str(Path(__file__).with_name("notes_server.py"))
STDIO = {"pad": {"command": sys.executable, "args": [PAD], "env": {"SEED": "${TURNKEY_SEED}"}}}


def servers(entries: dict[str, Any], **options: Any) -> Servers:
    return Servers(read_servers(entries), **{"start_timeout": 60.0, "call_timeout": 20.0, **options})


def play(servers: Servers, *calls: tuple[str, dict[str, Any]], task: Task | None = None) -> list[Any]:
    """The contents of the results, ``None`` as content of errors, in an episode of its own."""

    async def episode() -> list[Any]:
        tools = await servers.episode(task)
        try:
            results = [await tools.result(name, arguments) for name, arguments in calls]
        finally:
            await tools.close()
            await servers.close()
        return [result["content"] for result in results]

    return asyncio.run(episode())


@pytest.fixture(params=["", "--json"], ids=["streamed", "json"])
def url(request: pytest.FixtureRequest, free_port: Callable[[], int]) -> Iterator[str]:
    """A server on HTTP, which all of its sessions share."""
    port = free_port()
    server = subprocess.Popen([sys.executable, PAD, "--port", str(port), *filter(None, [request.param])])
    try:
        while server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        assert server.poll() is None
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


NOTE, READ = ("note", {"text": "milk", "times": 2}), ("read", {})


async def test_each_episode_has_a_server_of_its_own() -> None:
    pad = servers(STDIO)
    notes, other = await asyncio.gather(pad.episode(None), pad.episode(None))
    assert (notes.state, other.state) == ("", "")
    assert await notes.result(*NOTE) == {"content": "2 notes", "is_error": False}
    assert [(await tools.result(*READ))["content"] for tools in (notes, other)] == ["milk\nmilk", ""]
    assert notes.state != other.state
    await asyncio.gather(notes.close(), other.close())


async def test_equal_calls_with_equal_results_are_the_same_state() -> None:
    async def state(*calls: tuple[str, dict[str, Any]]) -> str:
        tools = await servers(STDIO).episode(None)
        for call in calls:
            await tools.result(*call)
        await tools.close()
        return tools.state

    same, again, other = await asyncio.gather(state(NOTE, READ), state(NOTE, READ), state(READ, NOTE))
    assert same == again != other


def test_schemas_are_those_of_the_server() -> None:
    async def schemas() -> list[dict[str, Any]]:
        tools = await servers(STDIO).episode(None)
        await tools.close()
        return tools.schemas

    note, *others = (schema["function"] for schema in asyncio.run(schemas()))
    assert (note["name"], note["description"]) == ("note", "Write a note.")
    times = {"anyOf": [{"minimum": 1, "type": "integer"}, {"type": "null"}], "default": None, "title": "Times"}
    assert note["parameters"]["properties"] == {"text": {"title": "Text", "type": "string"}, "times": times}
    assert note["parameters"]["required"] == ["text"]
    assert [schema["name"] for schema in others][:2] == ["read", "fails"]


def test_errors_are_results_and_pictures_are_named() -> None:
    contents = play(servers(STDIO), ("fails", {}), ("picture", {}), ("note", {}), NOTE)
    assert contents[0].startswith("Error executing tool fails")
    assert contents[1] == "a red dot\n[image/png: not shown]"
    assert "Field required" in contents[2]
    assert contents[3] == "2 notes"


def test_the_worker_s_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "x")
    (content,) = play(servers(STDIO), ("variables", {}), task=Task("env", 41))
    names, _, seed = content.partition("; seed ")
    assert seed == "41"
    assert {*names.split()} <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "SEED", "LC_CTYPE"}


async def test_names_have_the_server_s_name_only_where_two_collide() -> None:
    entry, other = ({"command": sys.executable, "args": [PAD, name]} for name in ("one", "two"))
    tools = await servers({"my pad": entry}, tools=["note", "my_pad_read"]).episode(None, ["read"])
    await tools.close()
    assert [schema["function"]["name"] for schema in tools.schemas] == ["note", "my_pad_read"]
    both = await servers({"a": entry, "b": other}).episode(None)
    await both.result("a_note", {"text": "x"})
    assert not both.has("note")
    assert [(await both.result(f"{name}_read", {}))["content"] for name in "ab"] == ["x", ""]
    await both.close()
    with pytest.raises(EnvironmentFailure, match="another tool is called 'a_note'"):
        await servers({"a": entry}).episode(None, ["note", "a_note"])
    with pytest.raises(EnvironmentFailure, match=r"turnkey.mcp.tools names 'write'; the servers have note, read"):
        await servers({"a": entry}, tools=["write"]).episode(None)


def test_on_http(url: str) -> None:
    pad = {"pad": {"url": url}}
    assert play(servers(pad), NOTE, READ) == ["2 notes", "milk\nmilk"]
    contents = play(servers(pad), ("fails", {}), ("picture", {}))
    assert contents == ["Error executing tool fails", "a red dot\n[image/png: not shown]"]


BREAKS = [
    (("die", {}), "it broke down in die"),
    (("flood", {"bytes": 1_000_000}), "it broke down in flood"),
    (("wait", {"seconds": 60}), "wait took more than 5 seconds"),
]


def limit(call: tuple[str, dict[str, Any]]) -> float:
    """Seconds for each call, those of other episodes included."""
    return 5.0 if call[0] == "wait" else 20.0


@pytest.mark.parametrize(("call", "reason"), BREAKS, ids=["dies", "floods", "hangs"])
async def test_a_server_that_breaks_down_costs_its_own_episode(call: tuple[str, dict[str, Any]], reason: str) -> None:
    pad = servers(STDIO, most_bytes=100_000, call_timeout=limit(call))
    broken, other = await asyncio.gather(pad.episode(None), pad.episode(None))
    with pytest.raises(EnvironmentFailure, match=reason) as raised:
        await broken.result(*call)
    assert (await other.result(*NOTE))["content"] == "2 notes"
    await asyncio.gather(broken.close(), other.close())
    text = str(raised.value)
    reasons = {"die": "(out of paper)", "flood": "wrote more than 100000 bytes"}
    assert reasons.get(call[0], "MCP server pad") in text


@pytest.mark.parametrize(("call", "reason"), BREAKS, ids=["dies", "floods", "hangs"])
def test_so_does_one_on_http(url: str, call: tuple[str, dict[str, Any]], reason: str) -> None:
    with pytest.raises(EnvironmentFailure, match=reason):
        play(servers({"pad": {"url": url}}, most_bytes=100_000, call_timeout=limit(call)), call)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"command": "sh", "args": ["-c", "echo no licence >&2; exit 3"]}, r"it did not start \(no licence\)"),
        ({"command": "no-such-command"}, r"it did not start \(cannot start no-such-command: No such file"),
        ({"command": "sleep", "args": ["600"]}, "it was not ready within 2 seconds"),
        ({"command": "yes"}, "wrote more than 20000 bytes"),
        ({"url": "http://127.0.0.1:9/mcp"}, r"it did not start \(ConnectError"),
        ({"command": "sh", "args": ["${NO_SUCH_VARIABLE}"]}, "NO_SUCH_VARIABLE, which is not set"),
    ],
)
def test_a_server_that_does_not_start_is_named_with_its_reason(entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(EnvironmentFailure, match=reason) as raised:
        play(servers({"pad": entry}, start_timeout=2.0 if "2 seconds" in reason else 60.0, most_bytes=20_000))
    assert "pad" in raised.value.message


def test_lines_that_are_no_messages_are_left_out() -> None:
    banner = {"command": "sh", "args": ["-c", f"echo Welcome; exec {sys.executable} {PAD}"]}
    assert play(servers({"pad": banner}), NOTE) == ["2 notes"]


async def test_a_shared_server_has_one_session_and_is_started_again_after_it_died() -> None:
    pad = servers(STDIO, shared=["pad"])
    notes, other = await asyncio.gather(pad.episode(None), pad.episode(None))
    await notes.result(*NOTE)
    await notes.close()
    assert (await other.result(*READ))["content"] == "milk\nmilk"
    assert other.state == ""  # it is said to have none
    with pytest.raises(EnvironmentFailure, match="out of paper"):
        await other.result("die", {})
    assert (await other.result(*READ))["content"] == ""
    await pad.close()


async def test_a_shared_server_that_hangs_is_replaced_and_still_answers_others() -> None:
    pad = servers(STDIO, shared=["pad"], call_timeout=10.0)

    async def waited(tools: EpisodeTools, seconds: float) -> str:
        return (await tools.result("wait", {"seconds": seconds}))["content"]

    tools = await pad.episode(None)
    with pytest.raises(EnvironmentFailure, match="wait took more than 10 seconds"):
        await waited(tools, 60)
    assert await waited(tools, 0) == "waited"
    await pad.close()


def test_nothing_of_a_server_runs_after_its_episode() -> None:
    (pids,) = play(servers(STDIO), ("leave_behind", {}))
    assert len(pids.split()) == 2
    assert not any(alive(int(pid)) for pid in pids.split())


def test_nothing_of_a_server_outlives_a_worker_that_is_killed() -> None:
    script = f"""
import asyncio, os, signal
from verl_turnkey.envs.mcp_servers.servers import read_servers
from verl_turnkey.envs.mcp_servers.tools import Servers

async def episode():
    tools = await Servers(read_servers({STDIO!r})).episode(None)
    print((await tools.result("leave_behind", {{}}))["content"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(episode())
"""
    worker = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ)
    pids = [int(pid) for pid in worker.stdout.split()]
    assert len(pids) == 2
    while any(map(alive, pids)):  # the guard notices the end of its stdin; the test's own timeout is the limit
        time.sleep(0.02)


def test_an_episode_that_is_cancelled_leaves_nothing() -> None:
    async def run() -> list[int]:
        tools = await servers(STDIO).episode(None)
        pids = [int(pid) for pid in (await tools.result("leave_behind", {}))["content"].split()]
        waiting = asyncio.create_task(tools.result("wait", {"seconds": 60}))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await tools.close()
        return pids

    assert not any(map(alive, asyncio.run(run())))


def test_env_check_lists_the_tools(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": STDIO}))
    result = CliRunner().invoke(app, ["env-check", "--mcp", str(file)])
    assert (result.exit_code, result.output.splitlines()[0]) == (0, "note(text, times)  Write a note.")
    assert result.output.splitlines()[-1] == "10 tools"
    listed = json.loads(CliRunner().invoke(app, ["env-check", "--mcp", str(file), "--json"]).output)
    assert (listed["ok"], listed["tools"][1]["function"]["name"]) == (True, "read")
    broken = {"bad": {"command": "false"}, "worse": {"command": 3}, "unset": {"command": "sh", "args": ["${NOT_SET}"]}}
    file.write_text(json.dumps({"mcpServers": {**broken, **STDIO}}))
    failed = CliRunner().invoke(app, ["env-check", "--mcp", str(file)])
    assert failed.exit_code == 1
    assert failed.output.splitlines()[0].startswith("note(text, times)")
    assert failed.output.splitlines()[-1] == "10 tools"
    for problem in ("bad: it did not start", "worse must have a command as text", "unset names the variable NOT_SET"):
        assert problem in failed.output
    listed = json.loads(CliRunner().invoke(app, ["env-check", "--mcp", str(file), "--json"]).output)
    assert (listed["ok"], len(listed["tools"]), {*listed["problems"]}) == (False, 10, {*broken})
    file.write_text("[]")
    failed = CliRunner().invoke(app, ["env-check", "--mcp", str(file)])
    assert (failed.exit_code, "must hold" in failed.output, "0 tools" in failed.output) == (1, True, False)


def test_a_server_on_this_machine_is_asked_past_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert play(servers({"pad": {"url": url}}), NOTE) == ["2 notes"]
