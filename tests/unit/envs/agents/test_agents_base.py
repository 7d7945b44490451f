"""What an agent is handed, how failures travel, and keys of states from the files of a working folder."""

import asyncio
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import serve

from verl_turnkey.envs.agents import folders
from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, SyncAgentHandle
from verl_turnkey.envs.agents.folders import WorkspaceState
from verl_turnkey.envs.errors import EnvironmentFailure


@pytest.fixture
def gateway() -> Iterator[tuple[AgentHandle, list[tuple[str, Any]]]]:
    with serve({f"/s3cret/{path}": lambda _: {} for path in ("state", "reward", "v1/hello")}) as (url, reports):
        yield AgentHandle(f"{url}/s3cret/v1", "key", "policy"), reports


def test_reports_go_to_the_episode_beside_its_api(gateway: Any) -> None:
    handle, reports = gateway

    async def report() -> None:
        await handle.state("room 3")
        await handle.reward(1)
        await handle.reward(0.5, turn=2)

    asyncio.run(report())
    SyncAgentHandle(**vars(handle)).state("room 4")
    SyncAgentHandle(**vars(handle)).reward(2, turn=0)
    assert reports == [
        ("/s3cret/state", {"key": "room 3"}),
        ("/s3cret/reward", {"reward": 1.0}),
        ("/s3cret/reward", {"reward": 0.5, "turn": 2}),
        ("/s3cret/state", {"key": "room 4"}),
        ("/s3cret/reward", {"reward": 2.0, "turn": 0}),
    ]


def test_clients_have_address_and_key() -> None:
    handle = AgentHandle("http://127.0.0.1:1/secret/v1", "key", "policy")
    clients = (handle.client(max_retries=0), SyncAgentHandle(**vars(handle)).client(max_retries=0))
    assert [type(client).__name__ for client in clients] == ["AsyncOpenAI", "OpenAI"]
    for client in clients:
        assert (str(client.base_url), client.api_key, client.max_retries) == (f"{handle.base_url}/", "key", 0)


def test_a_proxy_is_not_asked(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    handle, reports = gateway

    async def ask() -> None:
        async with handle.client(max_retries=0) as client:
            await client.post("/hello", body={}, cast_to=object)

    asyncio.run(ask())
    with SyncAgentHandle(**vars(handle)).client(max_retries=0) as client:
        client.post("/hello", body={}, cast_to=object)
    assert [path for path, _ in reports] == ["/s3cret/v1/hello"] * 2


def test_a_failure_is_short_and_survives_pickling() -> None:
    failure = pickle.loads(pickle.dumps(AgentFailure("x" * 1000)))
    assert isinstance(failure, AgentFailure)
    assert isinstance(failure, EnvironmentFailure)
    assert failure.kind == "agent"
    assert failure.reason == failure.message == "x" * 297 + "..."
    assert str(failure) == f"agent failure: {failure.reason}"


def fill(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def key(folder: Path, call: str | None = None) -> str | None:
    return WorkspaceState(folder).key(call)


def test_equal_files_are_equal_states_in_any_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path / "one", a="1", sub__b="2")
    other = fill(tmp_path / "two", sub__b="2", a="1")
    os.utime(other / "a", (0, 0))
    assert key(folder) == key(other)
    assert key(folder, "bash") == f"{key(folder)} bash"
    for name in (".git", "__pycache__", "node_modules"):
        fill(other / name, x=name)
    assert key(folder) == key(other)
    digests = WorkspaceState(folder).digests()
    assert digests == WorkspaceState(other).digests()
    assert sorted(digests or ()) == ["a", "sub/b"]
    assert WorkspaceState(folder / "c").digests() is None


def test_each_change_is_another_state(tmp_path: Path) -> None:
    folder = fill(tmp_path / "app", a="1", sub__b="2")
    state, link = WorkspaceState(folder), folder / "link"
    keys = [state.key(None)]
    for change in (
        lambda: fill(folder, a="3"),  # as long as before
        lambda: (folder / "a").chmod(0o755),
        lambda: (folder / "a").rename(folder / "c"),
        (folder / "c").unlink,
        lambda: link.symlink_to("sub"),
        lambda: (link.unlink(), link.symlink_to("elsewhere")),
    ):
        change()
        keys.append(state.key(None))
    assert len(set(keys)) == len(keys)
    link.unlink()
    fill(folder, a="1")
    assert state.key(None) == keys[0]


def test_a_change_within_a_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    folder = fill(tmp_path, a="1")
    state = WorkspaceState(folder)
    for _ in range(50):
        fill(folder, a="1")
        first = state.key(None)
        fill(folder, a="2")
        assert state.key(None) != first


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path, a="1", b="2")
    state = WorkspaceState(folder)
    time.sleep(0.1)
    state.key(None)
    read: list[str] = []
    opens = os.open
    monkeypatch.setattr(os, "open", lambda path, *args: read.append(Path(path).name) or opens(path, *args))
    state.key(None)
    assert read == []
    fill(folder, b="3")
    state.key(None)
    assert read == ["b"]


def test_links_and_special_files_are_not_followed(tmp_path: Path) -> None:
    secret = fill(tmp_path / "outside", secret="1")
    folder = fill(tmp_path / "app", a="1")
    (folder / "link").symlink_to(secret / "secret")
    (folder / "folder").symlink_to(secret)
    os.mkfifo(folder / "pipe")  # reading it would wait for ever
    before = key(folder)
    fill(secret, secret="2")
    assert key(folder) == before


def test_large_files_count_by_size_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LARGE_BYTES", 10)
    monkeypatch.setattr(folders, "_MEGABYTE", 4)
    keys = [key(fill(tmp_path, a=text)) for text in ("0123456789ab", "0123xxxx89ab", "0123456789xx", "0123456789abc")]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_folders_that_give_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(tmp_path / "gone") is None
    monkeypatch.setattr(folders, "MOST_FILES", 1)
    assert key(fill(tmp_path, a="1")) is not None
    assert key(fill(tmp_path, b="1")) is None
