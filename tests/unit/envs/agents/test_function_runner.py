"""Agents that are functions, in processes of their own and in this one, or that a service runs: a real HTTP server."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback import Refusal, serve

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, AgentResult
from verl_turnkey.envs.agents.function import FunctionRunner, InProcessFunctionRunner, RemoteRunner, address_towards
from verl_turnkey.envs.agents.sandboxes import Bubblewrap
from verl_turnkey.envs.errors import EnvironmentKwargsError, ModuleImportError
from verl_turnkey.envs.process_tree import Limits

FILE = Path(__file__).parent / "functions.py"
HANDLE = AgentHandle("http://127.0.0.1:1/secret/v1", "key", "policy", Path("/tmp"))
RUNNERS: list[Callable[..., Any]] = [FunctionRunner, InProcessFunctionRunner]
both = pytest.mark.parametrize("runner", RUNNERS, ids=["process", "in_process"])


def play(runner: Callable[..., Any], name: str, *tasks: dict[str, Any], timeout: float = 60.0, **kwargs: Any) -> Any:
    """The outcomes of ``tasks``, one after another."""
    handle = replace(HANDLE, workspace=None) if kwargs.get("sandbox") else HANDLE  # whose folder is shared

    async def run() -> list[AgentResult]:
        made = runner(f"{FILE}:{name}", timeout=timeout, **kwargs)
        try:
            return [await made.run(task, handle) for task in tasks]
        finally:
            await made.close()

    outcomes = asyncio.run(run())
    return outcomes if len(outcomes) > 1 else outcomes[0]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@both
def test_results_of_either_kind(runner: Callable[..., Any]) -> None:
    assert play(runner, "plays", {"value": 2}) == AgentResult(4.0)
    outcome = play(runner, "plays_sync", {})
    extra = {"url": HANDLE.base_url, "folder": "/tmp", "scores": [0, 1]}
    assert outcome == AgentResult(0.5, True, {0: 1.0, 2: 0.25}, extra=extra)
    assert type(outcome.success) is bool
    assert play(runner, "returns", {"what": "none"}) == AgentResult()


@both
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", "the result must be a finite number, not float nan"),
        ("text", "the result must be a finite number, not str '1.0'"),
        ("typo", "there is no field 'rewards'; did you mean 'reward'?"),
        ("turn", "the keys of turns must be 0, 1, 2, ..., not int -1"),
        ("success", "success must be a bool, not int 1"),
        ("coroutine", "the result must be a finite number, not coroutine"),
        ("extra", "extra must hold numbers, texts, lists and dicts, not object"),
    ],
)
def test_other_results_are_refused(runner: Callable[..., Any], what: str, message: str) -> None:
    with pytest.raises(AgentFailure) as failure:
        play(runner, "returns", {"what": what})
    fields = "{reward, success, turns, outcome, extra}"
    assert f"run={FILE}:returns must return a finite number or a dict {fields}: " in failure.value.reason
    assert message in failure.value.reason


@both
def test_what_it_raises_is_the_reason(runner: Callable[..., Any]) -> None:
    outcome = play(runner, "raises", {})
    assert outcome.reward is None
    assert outcome.reason.startswith("ValueError: xxx")
    assert re.search(r"x \(functions\.py:\d+\)$", outcome.reason)
    assert len(outcome.reason) == 300
    assert "SystemExit: enough" in play(runner, "exits", {}).reason


@both
@pytest.mark.parametrize("name", ["hangs", "sleeps"])
def test_a_deadline_ends_the_episode(runner: Callable[..., Any], name: str) -> None:
    outcome = play(runner, name, {"gently": runner is InProcessFunctionRunner}, timeout=0.5)
    assert outcome == AgentResult(truncated=True, reason="the agent ran longer than turnkey.agent.timeout=0.5")


def test_a_crash_costs_its_own_episode() -> None:
    outcomes = play(FunctionRunner, "dies", {}, {})
    reason = "the agent's process ended with exit status 3: last words"
    assert outcomes == [AgentResult(reason=reason), AgentResult(reason=reason)]


def test_a_process_serves_one_episode_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    inherits = play(FunctionRunner, "counts", {}, inherit=["MY_API_KEY"], env={"GIVEN": "yes"})
    assert inherits.extra["variables"]["MY_API_KEY"] == "secret"
    first, second = play(FunctionRunner, "counts", {}, {}, env={"GIVEN": "yes"})
    assert (first.reward, second.reward) == (1.0, 2.0)
    assert first.extra == second.extra
    assert first.extra["pid"] != os.getpid()
    assert first.extra["variables"] == {"MY_API_KEY": None, "GIVEN": "yes", "PATH": os.environ["PATH"]}
    assert not alive(first.extra["pid"])  # after close()


@both
def test_its_clients_ask_this_machine_past_a_proxy(runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    assert play(runner, "proxies", {}).extra["bypassed"]


def test_a_process_that_leaves_something_behind_is_not_used_again() -> None:
    first, second = play(FunctionRunner, "leaves_a_process", {}, {})
    assert first.extra["pid"] != second.extra["pid"]
    assert not any(alive(outcome.extra[name]) for outcome in (first, second) for name in ("pid", "child"))


def test_each_episode_gets_a_new_process_where_the_configuration_says_so() -> None:
    first, second = play(FunctionRunner, "counts", {}, {}, fresh=True)
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert first.extra["pid"] != second.extra["pid"]


# --- a sandbox, and limits --------------------------------------------------------------------------------------------
BOX = Bubblewrap()
SECRET = "the-trainer-s-key"


@pytest.mark.parametrize("sandbox", [None, BOX], ids=["none", "bwrap"])
def test_only_a_sandbox_keeps_the_trainer_s_secrets_and_files(sandbox: Any, tmp_path: Path) -> None:
    """The variables of a process are those with which it started: another one has the secret."""
    (tmp_path / "private").touch()
    holder = subprocess.Popen(["sleep", "60"], env={**os.environ, "WANDB_API_KEY": SECRET})
    try:
        task = {"secret": SECRET, "files": [str(tmp_path / "private")]}
        extra = play(FunctionRunner, "sees", task, sandbox=sandbox).extra
    finally:
        holder.kill()
        holder.wait()
    walled = sandbox is not None
    assert extra["secret"] is not walled
    assert extra["files"][str(tmp_path / "private")] is not walled
    assert not walled or extra["files"]["/etc/shadow"] is False
    if walled:
        assert (extra["url"], extra["cwd"]) == ("http://127.0.0.1:8000/secret/v1", "/app")
        assert extra["workspace"] == "/app"


def test_a_function_in_a_sandbox_gets_its_variables_and_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    options = {"sandbox": BOX, "inherit": ["MY_API_KEY"], "env": {"GIVEN": "yes"}}
    outcomes = play(FunctionRunner, "counts", {}, {}, **options)
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0]
    assert outcomes[0].extra["variables"].items() >= {"MY_API_KEY": None, "GIVEN": "yes"}.items()
    assert play(FunctionRunner, "dies", {}, sandbox=BOX).reason == (
        "the agent's process ended with exit status 3: last words"
    )


def test_further_files_of_a_function_have_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    path = tmp_path / "agent.py"
    folder = "import sys, pathlib; sys.path.append(str(pathlib.Path(__file__).parent))\n"
    path.write_text(f"{folder}from beside import VALUE\ndef play(task, agent):\n    return VALUE\n")

    def outcome_in(sandbox: Bubblewrap) -> AgentResult:
        return asyncio.run(FunctionRunner(f"{path}:play", timeout=60.0, sandbox=sandbox).run({}, HANDLE))

    with pytest.raises(
        AgentFailure, match=r"shows only the function's own file or package and turnkey\.agent\.readable: .*'beside'"
    ):
        outcome_in(BOX)
    assert outcome_in(Bubblewrap(readable=(tmp_path / "beside.py",))).reward == 3.0


MEBIBYTE = 1 << 20


@pytest.mark.parametrize(
    ("task", "limits", "reason", "alone"),
    [
        ({"allocates": 500}, Limits(memory=400 * MEBIBYTE), "MemoryError", True),
        ({"forks": 150}, Limits(memory=400 * MEBIBYTE), "it used more than turnkey.agent.memory_gb=0.390625", True),
        ({"processes": 20}, Limits(processes=10), "it used more than turnkey.agent.processes=10", True),
        ({"shared": 500}, Limits(memory=400 * MEBIBYTE), "No space left on device", False),
        ({"files": 9}, Limits(disk=100 * MEBIBYTE), "it used more than turnkey.agent.disk_gb=0.0976562", False),
        ({"files": 1}, Limits(disk=10 * MEBIBYTE), "File too large", False),
    ],
    ids=["allocates", "together", "processes", "shared", "files", "file"],
)
def test_an_episode_that_exceeds_a_limit_ends_alone(
    task: dict[str, Any], limits: Limits, reason: str, alone: bool
) -> None:
    """``alone``: also without a sandbox."""
    for sandbox in (BOX, None) if alone else (BOX,):
        exceeding, modest = play(FunctionRunner, "uses", task, {"allocates": 50}, sandbox=sandbox, limits=limits)
        assert reason in exceeding.reason
        assert "kernel" not in exceeding.reason
        assert (exceeding.reward, exceeding.truncated, modest.reward) == (None, False, 1.0)


def test_episodes_run_side_by_side_and_a_cancelled_one_leaves_nothing() -> None:
    async def run() -> tuple[list[AgentResult], set[int]]:
        runner = FunctionRunner(f"{FILE}:counts", timeout=60.0)
        outcomes = await asyncio.gather(*(runner.run({}, HANDLE) for _ in range(2)))
        await runner.close()
        hanging = FunctionRunner(f"{FILE}:hangs", timeout=60.0)
        before = children()
        task = asyncio.ensure_future(hanging.run({}, HANDLE))
        while not children() - before:
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return outcomes, children() - before

    outcomes, left = asyncio.run(run())
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0]
    assert not left


def children() -> set[int]:
    this, pids = os.getpid(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == this and fields[0] != "Z":
                pids.add(int(entry.name))
    return pids


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(AgentFailure, match=r"turnkey\.agent\.run: cannot load .*has no 'play'; did you mean 'plays'"):
        play(FunctionRunner, "play", {})
    with pytest.raises(ModuleImportError, match=r"turnkey\.agent\.run: cannot load .*has no 'play'"):
        play(InProcessFunctionRunner, "play", {})


@both
def test_a_function_takes_task_and_agent(runner: Callable[..., Any]) -> None:
    expected = rf"run={FILE}:takes_the_task_alone: expected a function of \(task, agent\), got one of \(task: Any\)"
    with pytest.raises((AgentFailure, ModuleImportError), match=expected):
        play(runner, "takes_the_task_alone", {})


def test_its_process_has_the_hooks_of_editable_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hook, agent = "__editable__.mine.finder.__path_hook__", tmp_path / "agent.py"
    monkeypatch.setattr(sys, "path", [hook, "", *sys.path])
    agent.write_text(
        f"import sys\ndef play(task, agent):\n    return float(sys.path[:2] == [{hook!r}, {os.getcwd()!r}])\n"
    )
    assert asyncio.run(FunctionRunner(f"{agent}:play", timeout=60.0).run({}, HANDLE)).reward == 1.0


def test_a_task_must_be_plain_json() -> None:
    with pytest.raises(AgentFailure, match="the task must hold plain JSON values"):
        play(FunctionRunner, "plays", {"value": object()})


TO_SERVICE = AgentHandle("http://127.0.0.1:1/secret/v1", "secret", "policy")


def answer(episode: dict[str, Any]) -> bytes:
    """Of a service: the task's field ``answer``, after ``seconds``."""
    task = episode["task"]
    time.sleep(task.get("seconds", 0))
    if "status" in task:
        raise Refusal(task["status"], task["answer"])
    return json.dumps(task["answer"]).encode()


@pytest.fixture
def service() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    with serve({"/run": answer}) as (url, requests):
        yield f"{url}/run", requests


@pytest.fixture
def url(service: tuple[str, Any]) -> str:
    return service[0]


def outcome(url: str, timeout: float = 5.0, **task: Any) -> AgentResult:
    return asyncio.run(RemoteRunner(url, timeout=timeout).run(task, TO_SERVICE))


def test_the_service_gets_the_task_and_the_gateway_and_answers_with_the_result(service: Any) -> None:
    url, requests = service
    result = {"reward": 0.5, "success": True, "turns": {"1": 0.25}, "extra": {"files": 3}}
    assert outcome(url, answer=result) == AgentResult(0.5, True, {1: 0.25}, extra={"files": 3})
    sent = {"task": {"answer": result}, "base_url": TO_SERVICE.base_url, "key": "secret", "model": "policy"}
    assert requests == [("/run", sent)]
    assert outcome(url, answer=1) == AgentResult(1.0)
    assert outcome(url, answer=None) == AgentResult()


def test_a_service_that_fails_costs_its_episode(url: str) -> None:
    assert "answered 500" in outcome(url, answer="no such task", status=500).reason
    with pytest.raises(AgentFailure, match="must return a finite number"):
        outcome(url, answer="much")
    late = outcome(url, timeout=0.2, answer=1, seconds=1)
    assert (late.truncated, late.reward) == (True, None)
    assert late.reason == "the agent ran longer than turnkey.agent.timeout=0.2"


def test_a_service_that_is_not_there_is_named() -> None:
    assert "turnkey.agent.run" in outcome("http://127.0.0.1:9/run", answer=1).reason
    for wrong, words in (
        ("http://", r"turnkey\.agent\.run must be a URL"),
        ("http://me:secret@host/run", "without a login"),
        ("http://[::1/run", "must be a URL"),
    ):
        with pytest.raises(EnvironmentKwargsError, match=words):
            RemoteRunner(wrong, timeout=1)


def test_the_address_of_this_machine_is_that_of_the_route(url: str) -> None:
    assert address_towards(url) == "127.0.0.1"
    states = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family == socket.AF_INET and states[name].isup]
        for address in addresses[:1]:  # packets to a further one may have the first as their source
            assert address_towards(f"http://{address}:9/run") == address, "what another node would be told"
    with pytest.raises(AgentFailure, match=r"turnkey\.agent\.run=http://nobody\.invalid/run cannot be reached"):
        address_towards("http://nobody.invalid/run")
