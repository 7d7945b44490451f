"""Agents that are functions, in processes of their own and in this one, or that a service runs: a real HTTP server."""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import Refusal, serve

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, AgentResult
from verl_turnkey.envs.agents.function import FunctionRunner, InProcessFunctionRunner, RemoteRunner, address_towards
from verl_turnkey.envs.errors import EnvironmentKwargsError, ModuleImportError

FILE = Path(__file__).parent / "functions.py"
HANDLE = AgentHandle("http://127.0.0.1:1/secret/v1", "key", "policy", Path("/tmp"))
RUNNERS: list[Callable[..., Any]] = [FunctionRunner, InProcessFunctionRunner]
both = pytest.mark.parametrize("runner", RUNNERS, ids=["process", "in_process"])


def play(runner: Callable[..., Any], name: str, *tasks: dict[str, Any], timeout: float = 60.0, **kwargs: Any) -> Any:
    """The outcomes of ``tasks``, one after another."""

    async def run() -> list[AgentResult]:
        made = runner(f"{FILE}:{name}", timeout=timeout, **kwargs)
        try:
            return [await made.run(task, HANDLE) for task in tasks]
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
    assert "functions" in failure.value.reason
    fields = "{reward, success, turns, outcome, extra}"
    assert f":returns must return a finite number or a dict {fields}: " in failure.value.reason
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
    with pytest.raises(AgentFailure, match=r"turnkey\.agent\.run=http://nobody\.invalid/run cannot be reached"):
        address_towards("http://nobody.invalid/run")
