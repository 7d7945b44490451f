"""The tables' files are whole and have all columns; what the disk does neither stops the caller nor goes unsaid."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.plugins.log.schema import TABLES
from verl_turnkey.plugins.log.writer import Tables
from verl_turnkey.plugins.view.join import read

SECONDS = 30.0  # for what takes none
SEGMENT = "20260102T030405_00ff"


def tables(folder: Path, process: str = "test-1", **limits: float) -> Tables:
    return Tables(folder / "log", SEGMENT, process, **limits)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder / "log")) for path in (folder / "log").rglob("*") if path.is_file())


def turns(*numbers: int, episode: str = "u_0", **further) -> dict[str, list]:
    return {"episode": [episode] * len(numbers), "turn": list(numbers), **further}


def test_a_file_for_each_table_and_step(tmp_path: Path):
    writer = tables(tmp_path, "a host:7")
    for step in (1, 1, 2, 1):
        writer.put("turns", step, turns(0, 1))
    writer.put("texts", 1, turns(0, response=["go"]))
    assert writer.drain(SECONDS)
    name = f"{SEGMENT}-a_host_7"
    assert files(tmp_path) == [
        f"texts/step=000001/{name}-3.parquet",
        f"turns/step=000001/{name}-0.parquet",  # when step 2 began
        f"turns/step=000001/{name}-2.parquet",  # came after it
        f"turns/step=000002/{name}-1.parquet",
    ]
    assert (writer.written, writer.lost) == (9, 0)
    assert writer.seconds > 0
    for table in ("turns", "texts"):
        path = tmp_path / "log" / files(tmp_path)[0 if table == "texts" else 1]
        named = [column.name for column in TABLES[table].columns if not column.name.endswith("*")]
        assert parquet.read_schema(path).names == named
        assert parquet.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    assert [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "log", tmp_path / "log" / "turns")] == [
        "0o700",
        "0o700",
    ]


@pytest.mark.parametrize("limits", [{"most_puts": 2}, {"seconds": 0.0}, {"most_bytes": 2400}], ids=str)
def test_what_writes_a_file_before_the_step_ends(tmp_path: Path, limits):
    writer = tables(tmp_path, **limits)
    for turn in range(8):
        writer.put("turns", 1, turns(turn, action=["x" * 600]))
        if "most_bytes" in limits:  # 600 characters and what Python needs for them are more than a quarter
            while writer.written <= turn:
                threading.Event().wait(0.001)
    while writer.written < 8:
        threading.Event().wait(0.001)
    assert len(files(tmp_path)) >= 4


def test_columns_of_families_come_with_the_rows(tmp_path: Path):
    writer = tables(tmp_path)
    writer.put("turns", 1, turns(0, **{"composed_reward.step": [0.5]}))
    writer.put("turns", 1, turns(1, **{"composed_reward.judge": [1.5]}))
    assert writer.drain(SECONDS)
    writer.put("turns", 2, turns(2))
    assert writer.drain(SECONDS)
    for path in (tmp_path / "log" / "turns").rglob("*.parquet"):
        names = parquet.read_schema(path).names
        assert names[names.index("composed_reward") :][:3] == [
            "composed_reward",
            "composed_reward.judge",
            "composed_reward.step",
        ]
    frame = read(tmp_path / "log", "turns")
    assert frame["composed_reward.judge"].tolist() == pytest.approx([np.nan, 1.5, np.nan], nan_ok=True)


def test_numpy_columns_and_texts_of_any_kind(tmp_path: Path):
    writer = tables(tmp_path)
    numbers = {"train_step": np.full(2, 3), "turn_in_row": np.array([0, 1]), "advantage": np.array([0.1, np.nan])}
    writer.put("credit", 3, turns(0, 1, **numbers, **{"part.step": np.array([1, 2], np.float32)}))
    writer.put("texts", 3, turns(0, 1, 2, response=["a\ud800b", None, "\0\x1b[31m‮"], observation=["é"] * 3))
    assert writer.drain(SECONDS)
    frame = pd.read_parquet(tmp_path / "log" / "credit")
    assert frame["advantage"].tolist() == pytest.approx([0.1, np.nan], nan_ok=True)
    assert frame["advantage"].dtype == np.float32
    assert frame["row_id"].isna().all()
    texts = pd.read_parquet(tmp_path / "log" / "texts")["response"].tolist()
    assert [texts[0], texts[2]] == ["a\\ud800b", "\0\x1b[31m‮"]
    assert pd.isna(texts[1])


def test_credit_computed_again_from_the_log_is_that_of_the_run(tmp_path: Path):
    """Three episodes win with 1.1 + 5 * 0.1, a fourth collects 16 * 0.1: equal returns, but for their rounding."""
    writer = tables(tmp_path)
    won, lost = [*[0.1] * 5, 1.1], [0.1] * 16
    steps: dict[str, list] = {name: [] for name in ("trajectory", "step", "reward", "penalty", "anchor")}
    for episode, rewards in zip("abcd", (won, won, won, lost), strict=True):
        number = len(rewards)
        penalties, anchors = [*[0.0] * (number - 1), 0.3], [f"{episode}{t}" for t in range(number)]
        numbers = {"composed_reward": rewards, "penalty": penalties}
        writer.put("turns", 1, turns(*range(number), episode=episode, anchor=anchors, **numbers))
        for column, values in zip(steps, ([episode] * number, range(number), rewards, penalties, anchors), strict=True):
            steps[column] += values
    assert writer.drain(SECONDS)
    columns = dict(zip(steps, ("episode", "turn", "composed_reward", "penalty", "anchor"), strict=True))
    logged = read(tmp_path / "log", "turns")
    again = {name: logged[column].tolist() for name, column in columns.items()}
    assert again == steps
    of_run, of_log = (compute_credit("gigpo", StepBatch(group=[0] * 34, **table)) for table in (steps, again))
    assert not of_run.parts["episode_level"].any()
    assert of_log.advantage.tolist() == of_run.advantage.tolist()


@pytest.mark.parametrize(
    ("table", "rows", "reason"),
    [
        ("turns", turns(0, turn_in_row=["x"]), "ValueError: turns.turn_in_row: Could not convert"),
        ("turns", turns(0, turn_in_row=[2**40]), "ValueError: turns.turn_in_row: "),
        ("turns", turns(0, 1, action=["x"]), "ArrowInvalid"),
        ("turns", turns(0, thought=["x"]), "ValueError: the table 'turns' has no column 'thought'"),
        ("thoughts", turns(0), "ValueError: there is no table 'thoughts'"),
    ],
)
def test_rows_that_do_not_fit_cost_themselves(tmp_path: Path, caplog, table, rows, reason):
    writer = tables(tmp_path)
    for _ in range(2):
        writer.put("turns", 1, turns(0))
        writer.put(table, 1, rows)
    assert writer.drain(SECONDS)
    assert (writer.written, writer.lost) == (2, 2 * len(rows["turn"]))
    [record] = caplog.records  # once
    assert record.getMessage().startswith(f"rows of turnkey.log.trajectories cannot be written: {reason}")


def test_rows_that_are_made_in_the_thread_are_written_all_or_none(tmp_path: Path, caplog):
    by = []

    def make(*extra):
        by.append(threading.current_thread().daemon)
        yield "turns", 1, turns(0, 1)
        yield "texts", 1, turns(0, 1, response=["a", "b"])
        yield from extra

    writer = tables(tmp_path)
    writer.put_later(make, 4, 1000)
    writer.put_later(lambda: make(("texts", 1, turns(2, response=[3]))), 5, 1000)
    assert writer.drain(SECONDS)
    assert by == [True, True]
    assert (writer.written, writer.lost) == (4, 5)
    assert [len(read(tmp_path / "log", table)) for table in ("turns", "texts")] == [2, 2]
    assert "texts.response: " in caplog.text


def test_a_disk_that_hangs_costs_what_there_is_no_room_for(tmp_path: Path, caplog, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    replace = os.replace

    def stalled(*paths):
        begun.set()
        assert go_on.wait(SECONDS)
        replace(*paths)

    monkeypatch.setattr(os, "replace", stalled)
    writer = tables(tmp_path, most_puts=1, most_bytes=10 << 20)
    writer.put("texts", 1, turns(0, response=["x" * (4 << 20)]))
    assert begun.wait(SECONDS)
    for turn in range(1, 6):
        writer.put("texts", 1, turns(turn, response=["x" * (4 << 20)]))
    assert not writer.drain(0.01)
    assert (writer.written, writer.lost) == (0, 4)
    [record] = caplog.records  # once, however many were lost
    lost = "rows of turnkey.log.trajectories are not written until this is over: "
    assert record.getMessage() == f"{lost}writing hangs, and 10 MB wait"
    go_on.set()
    assert writer.drain(SECONDS)
    assert read(tmp_path / "log", "texts")["turn"].tolist() == [0, 1]
    assert caplog.records[1].getMessage().endswith("are written again; 4 were lost, 4 in all")
    assert len(caplog.records) == 2
    writer.put("texts", 1, turns(9, response=["x" * (8 << 20)]))  # there is room again
    assert writer.drain(SECONDS)
    assert writer.written == 3


def test_a_folder_that_cannot_be_made_is_tried_again(tmp_path: Path, caplog):
    (tmp_path / "log").write_text("a file where a folder should be")
    writer = tables(tmp_path)
    for turn in range(2):
        writer.put("turns", 1, turns(turn))
        assert writer.drain(SECONDS)
    (tmp_path / "log").unlink()
    writer.put("turns", 1, turns(2))
    assert writer.drain(SECONDS)
    messages = [record.getMessage() for record in caplog.records]
    assert (
        "until this is over: FileExistsError" in messages[0] or "until this is over: NotADirectoryError" in messages[0]
    )
    assert messages[1:] == ["rows of turnkey.log.trajectories are written again; 2 were lost, 2 in all"]
    assert read(tmp_path / "log", "turns")["turn"].tolist() == [2]


PROCESS = """
import resource, sys
from verl_turnkey.plugins.log.writer import Tables

def size(limit):  # a write beyond it is cut short, and the next one refused, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

tables = Tables(sys.argv[1], sys.argv[2], "p")
for turn, limit in enumerate([resource.RLIM_INFINITY, 150, 20, resource.RLIM_INFINITY]):
    size(limit)
    tables.put("turns", 1, {"episode": ["u_0"], "turn": [turn]})
    assert tables.drain(30)
    print(tables.written, tables.lost)
tables.put("turns", 1, {"episode": ["u_0"], "turn": [9]})  # written when the process ends
assert not {"verl", "torch", "ray"} & sys.modules.keys()
"""


def test_a_full_disk_leaves_no_half_file_and_a_process_that_ends_nothing_unwritten(tmp_path: Path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "log"), SEGMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0", "1", "1", "1", "2", "2", "2"]
    assert read(tmp_path / "log", "turns")["turn"].tolist() == [0, 3, 9]
    assert len(files(tmp_path)) == 3  # no unfinished one


def test_processes_of_one_name_do_not_replace_each_others_files(tmp_path: Path):
    for turn in range(2):
        writer = tables(tmp_path)
        writer.put("turns", 1, turns(turn))
        assert writer.drain(SECONDS)
    assert read(tmp_path / "log", "turns")["turn"].tolist() == [0, 1]


def test_nothing_to_write(tmp_path: Path):
    writer = tables(tmp_path)
    writer.put("turns", 1, {})
    writer.put("turns", 1, turns())
    assert writer.drain(0.0)
    assert not (tmp_path / "log").exists()
