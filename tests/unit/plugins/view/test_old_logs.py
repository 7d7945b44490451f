"""Logs and metrics of version 1 are read by their current names: in the viewer, and in ``turnkey compare``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import version_1
from run_folders import write
from typer.testing import CliRunner

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.log.schema import current_metric, current_value
from verl_turnkey.plugins.log.writer import Tables
from verl_turnkey.plugins.view import page
from verl_turnkey.plugins.view.compare import compare
from verl_turnkey.plugins.view.join import load, read
from verl_turnkey.plugins.view.runs import read as read_run


def test_each_quantity_has_its_current_name(tmp_path: Path):
    log = version_1.write(tmp_path)
    [episode] = read(log, "episodes").to_dict("records")
    assert (episode["env_return"], episode["composed_return"]) == (1.0, pytest.approx(1.1))
    turns = read(log, "turns")
    assert turns["reward"].tolist() == [0.0] * 9 + [1.0]
    assert turns["composed_reward"].tolist() == pytest.approx([0.0] * 4 + [0.1] + [0.0] * 4 + [1.0])
    assert (turns["composed_reward.env"] + turns["composed_reward.chore"]).tolist() == turns["composed_reward"].tolist()
    assert turns["anchor"][1] == turns["next_anchor"][0] == "0 done, at the fridge, holding nothing"
    assert read(log, "credit").set_index("turn")["value_target"][9] == 1.0
    named = read(log, "steps").set_index("name")["value"].to_dict()
    assert named["episode/composed_return/mean"] == named["groups/composed_return/mean"] == 0.6
    assert named["episode/composed_return.chore/mean"] == 0.1
    frames = [read(log, name) for name in ("episodes", "turns", "credit")]
    assert not {"return", "score", "state_key", "next_key", "env_reward"} & {name for frame in frames for name in frame}


def test_an_old_log_opens_in_the_viewer(tmp_path: Path):
    version_1.write(tmp_path)
    blocks = page.blocks([load(tmp_path)])
    raw = gzip.decompress(blocks["run-0"])
    index = json.loads(raw[4 : 4 + int.from_bytes(raw[:4], "little")])
    assert index["notes"] == []
    assert index["episodes"]["env_return"] == [1.0]
    assert {chart["title"] for chart in index["charts"]} >= {"Env return", "Credit", "Repetition"}
    numbers = json.loads(gzip.decompress(blocks["numbers-0-0"]))["columns"]
    assert {"anchor", "reward", "composed_reward", "composed_reward.chore", "value_target"} <= numbers.keys()
    out = tmp_path / "view.html"
    assert CliRunner().invoke(app, ["view", str(tmp_path), "--out", str(out)]).exit_code == 0
    assert out.stat().st_size > 100_000


def test_a_log_of_both_versions_is_read_as_one(tmp_path: Path):
    """As after an update between two starts of a run."""
    log = version_1.write(tmp_path)
    tables = Tables(log, "20260102T000000_0000", "new")
    tables.put("turns", 2, {"episode": ["x_0"], "turn": [0], "reward": [0.5], "composed_reward": [0.75]})
    tables.put("episodes", 2, {"episode": ["x_0"], "env_return": [0.5], "composed_return": [0.75]})
    assert tables.drain(10)
    turns, episodes = read(log, "turns"), read(log, "episodes")
    assert turns["reward"].tolist()[-2:] == [1.0, 0.5]
    assert turns["composed_reward"].tolist()[-2:] == [1.0, 0.75]
    assert episodes["composed_return"].tolist() == pytest.approx([1.1, 0.75])


def with_metric(folder: Path, name: str, seed: int) -> Path:
    write(folder, {0: 0.2, 4: 0.9}, seed=seed)
    [path] = folder.rglob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["data"][name] = line["step"] / 8
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("metric", ["episode/return/mean", "episode/composed_return/mean"])
def test_old_and_new_runs_are_compared_by_either_name(tmp_path: Path, metric: str):
    old = with_metric(tmp_path / "old", "episode/return/mean", 0)
    new = with_metric(tmp_path / "new", "episode/composed_return/mean", 1)
    comparison = compare([read_run(old), read_run(new)], metric=metric)
    assert comparison["metric"] == "episode/composed_return/mean"
    assert comparison["groups"][0]["final"]["of_runs"] == [0.5, 0.5]
    done = CliRunner().invoke(app, ["compare", str(old), str(new), "--metric", metric])
    assert done.exit_code == 0, done.output
    assert "episode/composed_return/mean" in done.output


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("val-aux/lake/episode_return/mean@1", "val-aux/lake/env_return/mean@1"),
        ("val-aux/my/lake/episode_return/best@4/mean", "val-aux/my/lake/env_return/best@4/mean"),
        ("val-aux/lake/reward/step/mean@1", "val-aux/lake/composed_return.step/mean@1"),
        ("val-aux/lake/reward/mean@1", "val-aux/lake/reward/mean@1"),  # verl's own
        ("val-aux/lake/reward/best@2/mean", "val-aux/lake/reward/best@2/mean"),
        ("val-core/lake/acc/mean@1", "val-core/lake/acc/mean@1"),
        ("episode/reward/step", "episode/composed_return.step/mean"),
        ("groups/score/mean", "groups/composed_return/mean"),
        ("episode/signals/score", "episode/signals/score"),
        ("critic/score/mean", "critic/score/mean"),
    ],
)
def test_a_metric_is_renamed_where_it_is_ours(before: str, now: str):
    assert current_metric(before) == now
    assert current_metric(now) == now


def test_a_value_of_an_episode_is_renamed_where_it_is_ours():
    names = ("episode_return", "reward/step", "reward", "acc", "env_return", "composed_return.step")
    now = ["env_return", "composed_return.step", "reward", "acc", "env_return", "composed_return.step"]
    assert [current_value(name) for name in names] == now
