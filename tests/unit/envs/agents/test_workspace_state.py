"""Keys of states from the files of a working folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from verl_turnkey.envs.agents import states
from verl_turnkey.envs.agents.states import WorkspaceState


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


def test_each_change_is_another_state(tmp_path: Path) -> None:
    folder = fill(tmp_path / "app", a="1", sub__b="2")
    state = WorkspaceState(folder)
    keys = [state.key(None)]

    def note() -> None:
        keys.append(state.key(None))

    fill(folder, a="3")  # as long as before
    note()
    (folder / "a").chmod(0o755)
    note()
    (folder / "a").rename(folder / "c")
    note()
    (folder / "c").unlink()
    note()
    (folder / "link").symlink_to("sub")
    note()
    (folder / "link").unlink()
    (folder / "link").symlink_to("elsewhere")
    note()
    assert len(set(keys)) == len(keys)
    (folder / "link").unlink()
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
    monkeypatch.setattr(states, "LARGE_BYTES", 10)
    monkeypatch.setattr(states, "_MEGABYTE", 4)
    keys = [key(fill(tmp_path, a=text)) for text in ("0123456789ab", "0123xxxx89ab", "0123456789xx", "0123456789abc")]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_folders_that_give_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(tmp_path / "gone") is None
    monkeypatch.setattr(states, "MOST_FILES", 1)
    assert key(fill(tmp_path, a="1")) is not None
    assert key(fill(tmp_path, b="1")) is None
