"""Tables are read while a run writes them, after it was killed, and after it was resumed."""

import os
import socket
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from verl_turnkey.plugins.log.schema import TABLES
from verl_turnkey.plugins.log.writer import SEGMENT, Tables, look, new_segment, read_segments, write_segment
from verl_turnkey.plugins.view.join import parts, read

FIRST, SECOND, THIRD = (f"2026010{day}T030405_00ff" for day in (1, 2, 3))


def write(folder: Path, segment: str, *steps: int, table: str = "episodes", process: str = "p", **columns) -> None:
    """A row in each step, named after both."""
    writer = Tables(folder, segment, process)
    for step in steps:
        writer.put(table, step, {"episode": [f"{segment[7]}-{step}"], **columns})
    assert writer.drain(30.0)


def episodes(folder: Path, *steps: int) -> list[str]:
    return read(folder, "episodes", steps or None)["episode"].tolist()


@pytest.fixture(autouse=True)
def _strict():
    """A warning that a test does not expect is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("table", TABLES)
def test_a_log_without_the_table_has_its_columns(tmp_path: Path, table):
    frame = read(tmp_path, table)
    assert len(frame) == 0
    named = [column.name for column in TABLES[table].columns if not column.name.endswith("*")]
    assert frame.columns.tolist() == [*named, "step", "segment"]


def test_columns_that_a_file_lacks_are_added(tmp_path: Path):
    write(tmp_path, FIRST, 1, process="a", composed_return=[0.5])
    write(tmp_path, FIRST, 1, process="b", table="turns", **{"turn": [0], "composed_reward.step": [1.0]})
    write(tmp_path, FIRST, 2, process="c", table="turns", turn=[1])
    old = pd.DataFrame({"episode": ["old"], "turn": pd.Series([7], dtype="int64"), "further": ["x"]})
    old.to_parquet(tmp_path / "turns" / "step=000001" / f"{FIRST}-a-0.parquet")
    frame = read(tmp_path, "turns")
    assert frame["episode"].tolist() == ["old", "1-1", "1-2"]
    assert frame["composed_reward.step"].tolist() == pytest.approx([np.nan, 1.0, np.nan], nan_ok=True)
    assert frame["step"].tolist() == [1, 1, 2]
    assert frame["segment"].tolist() == [FIRST] * 3
    assert frame["further"].tolist()[0] == "x"
    assert frame["turn"].dtype == np.int32
    assert read(tmp_path, "turns", {2})["turn"].tolist() == [1]


def test_pandas_alone_reads_a_table(tmp_path: Path):
    write(tmp_path, FIRST, 1, 2, composed_return=[0.5], success=[True])
    (tmp_path / "episodes" / "step=000001" / f".{FIRST}-p-9.parquet.tmp").write_bytes(b"PAR1")
    frame = pd.read_parquet(tmp_path / "episodes")
    assert frame["episode"].tolist() == ["1-1", "1-2"]
    assert frame["step"].tolist() == [1, 2]
    assert frame["success"].tolist() == [True, True]
    assert len(pd.read_parquet(tmp_path / "episodes", filters=[("step", "==", 2)])) == 1


def test_a_file_that_cannot_be_read_is_named_and_left_out(tmp_path: Path):
    write(tmp_path, FIRST, 1, 2)
    [whole] = (tmp_path / "episodes" / "step=000001").iterdir()
    whole.with_name(f"{FIRST}-q-0.parquet").write_bytes(whole.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=f"left out, it cannot be read: .*{FIRST}-q-0.parquet: "):
        assert episodes(tmp_path) == ["1-1", "1-2"]
    whole.with_name(f"{FIRST}-q-0.parquet").unlink()
    pd.DataFrame({"episode": ["x"], "turns": ["many"]}).to_parquet(whole.with_name(f"{FIRST}-q-0.parquet"))
    with pytest.warns(UserWarning, match=f"left out, it cannot be read: .*{FIRST}-q-0.parquet: "):
        assert episodes(tmp_path) == ["1-1", "1-2"]


def test_foreign_files_are_named_and_left_out(tmp_path: Path):
    write(tmp_path, FIRST, 1)
    for name in ("notes.txt", "step=000001/a.parquet", "step=000001/.hidden"):
        (tmp_path / "episodes" / name).write_text("x")
    with pytest.warns(UserWarning, match=r"not a file of the trajectory log: .*notes.txt, .*a.parquet$"):
        assert episodes(tmp_path) == ["1-1"]


def test_what_a_later_start_did_again_counts(tmp_path: Path):
    """The second start resumed from step 2 and validated there again; the third one from step 3."""
    for segment, resumed in ((FIRST, 0), (SECOND, 2), (THIRD, 3)):
        write_segment(tmp_path, segment, {"resumed_from": resumed})
    write(tmp_path, FIRST, 0, 1, 2, 3, 4, 5)
    write(tmp_path, SECOND, 2, 3, 4)
    write(tmp_path, THIRD, 4)
    with pytest.warns(UserWarning, match="episodes: a later start of the trainer did steps 3 to 5 again"):
        assert episodes(tmp_path) == ["1-0", "1-1", "1-2", "2-2", "2-3", "3-4"]
    assert episodes(tmp_path, 1, 2) == ["1-1", "1-2", "2-2"]
    with pytest.warns(UserWarning, match="steps 4 to 4 again"):
        assert [part.segment for part in parts(tmp_path, "episodes", [4])] == [THIRD]


def test_an_episode_that_was_begun_again_counts_once(tmp_path: Path):
    """With other turns than before, under its old key: an asynchronous trainer was resumed from step 2."""
    write_segment(tmp_path, SECOND, {"resumed_from": 2})
    for segment, step, turns in ((FIRST, 2, 3), (SECOND, 3, 2)):
        writer = Tables(tmp_path, segment, "p")
        writer.put("turns", step, {"episode": ["u_0"] * turns, "turn": list(range(turns))})
        writer.put("turns", step, {"episode": [f"v_{step}"], "turn": [0]})
        assert writer.drain(30.0)
    frame = read(tmp_path, "turns")
    assert list(zip(frame["episode"], frame["turn"], frame["step"], strict=True)) == [
        ("v_2", 0, 2),
        ("u_0", 0, 3),
        ("u_0", 1, 3),
        ("v_3", 0, 3),
    ]


def test_a_start_that_says_nothing_of_itself_replaces_the_steps_that_it_has(tmp_path: Path):
    write(tmp_path, FIRST, 1, 2, 3)
    write(tmp_path, SECOND, 2)
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / f"{SECOND}.json").write_text("{half a fi")
    with pytest.warns(UserWarning, match="steps 2 to 2 again"):
        assert episodes(tmp_path) == ["1-1", "2-2", "1-3"]


def test_an_unknown_table(tmp_path: Path):
    with pytest.raises(ValueError, match="no table 'turn'; it has episodes, turns, texts"):
        read(tmp_path, "turn")


def test_segments(tmp_path: Path):
    names = {new_segment() for _ in range(20)}
    assert len(names) == 20
    assert all(SEGMENT.fullmatch(name) for name in names)
    write_segment(tmp_path / "log", SECOND, {"resumed_from": 2})
    write_segment(tmp_path / "log", FIRST, {"resumed_from": None})
    (tmp_path / "log" / "segments" / "notes.json").write_text("{}")
    assert list(read_segments(tmp_path / "log").items()) == [
        (FIRST, {"segment": FIRST, "resumed_from": None}),
        (SECOND, {"segment": SECOND, "resumed_from": 2}),
    ]
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700
    assert read_segments(tmp_path / "nothing") == {}
    assert SEGMENT.fullmatch(new_segment(tmp_path / "nothing"))


def test_a_start_is_behind_those_of_a_machine_whose_clock_is_ahead(tmp_path: Path):
    """Else its steps would count as replaced."""
    ahead = "29991231T235959_ffff"
    write_segment(tmp_path, ahead, {"resumed_from": 0})
    resumed = new_segment(tmp_path)
    assert resumed.startswith("30000101T000000_")
    write_segment(tmp_path, resumed, {"resumed_from": 2})
    write(tmp_path, ahead, 1, 2, 3)
    write(tmp_path, resumed, 3, 4)
    with pytest.warns(UserWarning, match="a later start of the trainer did steps 3 to 3 again"):
        assert read(tmp_path, "episodes")["segment"].tolist() == [ahead, ahead, resumed, resumed]


def test_a_machine_that_does_not_see_the_trainers_folder_says_so(tmp_path: Path, caplog):
    write_segment(tmp_path, FIRST, {"resumed_from": 0})
    look(tmp_path, FIRST)
    assert caplog.messages == []
    look(tmp_path, SECOND)
    [warning] = caplog.messages
    assert f"{tmp_path}/segments/{SECOND}.json, which the trainer writes, is not to be seen on " in warning


@pytest.mark.parametrize("may_read", [True, False])
def test_a_machine_that_may_not_write_there_says_so(may_read: bool, tmp_path: Path, caplog, monkeypatch):
    write_segment(tmp_path, FIRST, {"resumed_from": 0})
    if may_read:
        monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    else:  # the folders of a log belong to one user

        def is_refused(path: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "exists", is_refused)
    look(tmp_path, FIRST)
    [warning] = caplog.messages
    assert f"{tmp_path} is not writable on {socket.gethostname()}, whose part of the log is lost: make it" in warning
