"""Turns, credit and updates of a log joined, and why a turn has no credit."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import synthetic_run

from verl_turnkey.plugins.log.bounds import chosen
from verl_turnkey.plugins.log.schema import TABLES
from verl_turnkey.plugins.log.writer import write_segment
from verl_turnkey.plugins.view import join
from verl_turnkey.plugins.view.page import blocks


def table(name: str, rows: list[dict]) -> pd.DataFrame:
    columns = [column.name for column in TABLES[name].columns if not column.name.endswith(".*")]
    return pd.DataFrame(rows, columns=columns)


def joined(
    credit: list[dict], updates: list[dict] = (), begun: int = 1, staleness: float = 0, **of_episode: object
) -> pd.DataFrame:
    """Episodes a and b of one group, c of another; a turn of each, and a second one of a."""
    keys = [("a", "g", begun), ("b", "g", begun), ("c", "h", begun)]
    episodes = [{"episode": e, "group": g, "global_step": s, "validation": False} for e, g, s in keys]
    for name, value in of_episode.items():
        episodes[2][name] = value
    turns = [{"episode": e, "turn": t, "turn_in_row": 0} for e, t in (("a", 0), ("a", 1), ("b", 0), ("c", 0))]
    tables = [
        table(n, r) for n, r in (("episodes", episodes), ("turns", turns), ("credit", credit), ("updates", updates))
    ]
    return join.join(*tables, staleness)


def credit(episode: str, turn: int, step: int = 1, row: int = 0, advantage: float = 0.0) -> dict:
    return {
        "episode": episode, "turn": turn, "train_step": step, "row_id": row, "turn_in_row": 0, "advantage": advantage
    }  # fmt: skip


def test_zero_credit_and_none_are_two_things():
    turns = joined([credit("a", 0)])
    assert turns["advantage"].notna().tolist() == [True, False, False, False]
    assert turns["reason"].tolist() == [join.HAS_CREDIT, join.TURN_LOST, join.EPISODE_LOST, join.GROUP_LOST]


@pytest.mark.parametrize(
    ("of_episode", "reason"),
    [
        ({"failed": "the process died"}, join.FAILED),
        ({"validation": True}, join.VALIDATION),
        ({"global_step": 2}, join.NOT_YET),
        ({"global_step": 1}, join.GROUP_LOST),
    ],
)
def test_why_a_turn_has_no_credit(of_episode, reason):
    assert joined([credit("a", 0)], **of_episode)["reason"].tolist()[3] == reason


@pytest.mark.parametrize(
    ("begun", "trained", "staleness", "played", "reason"),
    [
        (5, 5, 0, 5, join.GROUP_LOST),
        (5, 5, 2, 5, join.NOT_YET),  # in the first steps of a run nothing has waited yet
        (7, 7, 2, 5, join.GROUP_LOST),
        (7, 7, 2, 6, join.NOT_YET),
        (9, 9, float("inf"), 1, join.NOT_YET),
        (5, 7, 0, 5, join.GROUP_LOST),  # episodes a and b waited two steps
        (5, 7, 0, 6, join.NOT_YET),
    ],
)
def test_under_an_asynchronous_trainer_a_group_in_flight_is_not_lost(begun, trained, staleness, played, reason):
    turns = joined([credit("a", 0, step=trained)], begun=begun, staleness=staleness, global_step=played)
    assert turns["reason"].tolist()[3] == reason


@pytest.mark.parametrize(
    ("mode", "threshold", "reason"),
    [
        ("turnkey_sync", 8, join.GROUP_LOST),
        ("turnkey_separate_async", 8, join.NOT_YET),
        ("colocate_async", None, join.NOT_YET),
        ("colocate_async", 1, join.GROUP_LOST),
    ],
)
def test_the_configuration_says_how_long_an_episode_may_wait(tmp_path, mode, threshold, reason):
    folder = synthetic_run.write(tmp_path / "run", episodes=40, steps=2)
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    sampler = {"max_off_policy_threshold": threshold}
    info["config"]["trainer"] = {"v1": {"trainer_mode": mode, "sampler": sampler}}
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")
    [path] = folder.glob("credit/step=000001/*.parquet")
    rows = pq.ParquetFile(path).read()
    group = rows["episode"][0].as_py().partition("_")[0]
    pq.write_table(rows.filter([not key.startswith(group) for key in rows["episode"].to_pylist()]), path)
    run = join.load(tmp_path / "run")
    lost = run.turns["episode"].str.startswith(group) & (run.turns["reason"] != join.FAILED)
    assert set(run.turns["reason"][lost]) == {reason}


def test_without_any_credit_nothing_is_trained_yet():
    assert set(joined([])["reason"]) == {join.NOT_YET}


def test_of_two_steps_that_train_a_turn_the_last_counts():
    """Under asynchronous trainers the step that trains is not the one that played."""
    turns = joined([credit("a", 0, step=7, advantage=2.0), credit("a", 0, step=5, advantage=1.0)])
    assert turns.loc[0, ["train_step", "advantage"]].tolist() == [7, 2.0]


def test_updates_are_found_through_their_row_and_put_together():
    def update(epoch: int, ratio: float, clipped: float, entropy: float, step: int = 1) -> dict:
        numbers = {"ratio": ratio, "ratio_max": 2 * ratio, "clip_share": clipped, "entropy": entropy}
        return dict(train_step=step, row_id=4, turn_in_row=0, epoch=epoch, **numbers)

    updates = [update(0, 1.0, 0.0, 0.5), update(1, 2.0, 0.4, 0.3), update(0, 9.0, 1.0, 9.0, step=2)]
    turns = joined([credit("a", 0, row=4), credit("b", 0, row=5)], updates)
    columns = ["ratio", "ratio_max", "clip_share", "entropy"]
    assert turns.loc[0, columns].tolist() == [1.5, 4.0, 0.2, 0.5]
    assert turns.loc[2, columns].isna().all()


def test_a_log_on_the_disk(tmp_path):
    folder = synthetic_run.write(tmp_path / "run", episodes=40, steps=3)
    run = join.load(tmp_path / "run")
    assert run.folder == folder
    assert run.name == "run"
    assert join.load(folder).name == "run"
    assert run.parts == ["advantage", "part.episode_level", "part.penalty", "part.step_level"]
    assert run.turns["at"].is_monotonic_increasing
    trained = run.turns[run.turns["reason"] == join.HAS_CREDIT]
    assert len(trained) > 200
    parts = trained[run.parts[1:]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(trained["advantage"].to_numpy(), abs=1e-4)
    assert trained["ratio"].notna().all()


def test_a_folder_without_a_log_says_how_to_get_one(tmp_path):
    with pytest.raises(join.NoLog, match=r"turnkey\.log\.trajectories=FOLDER"):
        join.load(tmp_path)
    (tmp_path / "turnkey_log" / "episodes").mkdir(parents=True)
    with pytest.raises(join.NoLog, match="no episode is written yet"):
        join.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '"text"', '{"params": {"clip": NaN, "top": Infinity}}'])
def test_a_damaged_or_odd_run_json_costs_nothing_else(tmp_path, content):
    folder = synthetic_run.write(tmp_path / "run", episodes=10, steps=1)
    (folder / "run.json").write_text(content, encoding="utf-8")
    run = join.load(tmp_path / "run")
    assert run.about in ({}, {"params": {"clip": "NaN", "top": "Infinity"}})
    assert blocks([run], 60)


def test_what_a_segment_logged_decides_which_of_its_episodes_are_of_whole_groups(tmp_path):
    """run.json is of the latest start, and stands for those of which nothing else is known."""
    folder = synthetic_run.write(tmp_path / "run", episodes=80, steps=3)
    all_of_it = join.load(folder)
    assert all_of_it.whole.all()
    [segment] = all_of_it.episodes["segment"].unique()
    groups, validation = all_of_it.episodes["group"], all_of_it.episodes["validation"].to_numpy(bool)
    half, tenth = (groups.map(lambda group, share=share: chosen(group, share)).to_numpy() for share in (0.5, 0.1))
    assert validation.any()

    def whole(of_run: dict, of_segment: dict | None = None) -> list[bool]:
        (folder / "run.json").write_text(json.dumps(of_run), encoding="utf-8")
        if of_segment is not None:
            write_segment(folder, segment, of_segment)
        return join.load(folder).whole.tolist()

    assert whole({"share": 0.5}) == half.tolist()
    both = np.where(validation, tenth, half).tolist()
    assert both != half.tolist()
    assert whole({"share": 0.5, "validation_share": 0.1}) == both
    assert whole({"share": 1.0}, {"share": 0.5, "validation_share": 0.1}) == both
    assert whole({"share": 0.5}, {}) == half.tolist()


def test_what_cannot_be_read_is_left_out_and_noted(tmp_path):
    folder = synthetic_run.write(tmp_path / "run", episodes=10, steps=1)
    (folder / "turns" / "step=000001" / "20260101T000000_0000-0-1.parquet").write_bytes(b"half")
    run = join.load(tmp_path / "run")
    assert len(run.turns)
    assert any("cannot be read" in note for note in run.notes)
