"""What is read from the folder of a run: every kind of log, several starts, and what cannot be read."""

import gzip
import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import synthetic_run
import version_1
from run_folders import VAL, write
from typer.testing import CliRunner

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.log.bounds import chosen
from verl_turnkey.plugins.log.schema import TABLES, current_metric, current_value
from verl_turnkey.plugins.log.writer import Tables, write_segment
from verl_turnkey.plugins.view import join, page
from verl_turnkey.plugins.view.compare import compare
from verl_turnkey.plugins.view.join import load, read
from verl_turnkey.plugins.view.page import blocks
from verl_turnkey.plugins.view.runs import read as read_run

KINDS, WHAT = ("trained", "measured"), ("tokens", "steps")


def test_a_run_as_turnkey_train_leaves_it(tmp_path):
    run = read_run(write(tmp_path, {0: 0.2, 2: 0.5}, method="salt", seed=3))
    steps, values = run.curve(VAL)
    assert steps.tolist() == [0, 2]
    assert values.tolist() == [0.2, 0.5]
    assert run.step.tolist() == [0, 1, 2]
    assert run.interactions().tolist() == [0, 320, 640]  # failed episodes have no turns
    assert run.seconds().tolist() == [0, 20, 40]
    assert run.config["algorithm.adv_estimator"] == "salt"
    assert run.config["data.seed"] == 3
    assert run.source == "metrics/1/doorkey/salt.jsonl"


def test_branches_cost_turns_and_tokens(tmp_path):
    folder = write(tmp_path, {0: 0.2, 2: 0.5})
    [path] = folder.rglob("gigpo.jsonl")
    branches = {f"branching/{kind}_{what}": n for n, (kind, what) in enumerate(product(KINDS, WHAT), start=2)}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["data"] |= branches  # means over the 32 rollouts that were played; the first training step had none
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run.interactions().tolist() == [0, 320, 640 + 32 * (3 + 5)]
    assert run.tokens().tolist() == [0, 5000, 10000 + 32 * 4]  # of trained branches: in rows


def test_a_resumed_run_counts_as_trained_last(tmp_path):
    write(tmp_path, {0: 0.1, 4: 0.4, 8: 0.8})
    write(tmp_path, {6: 0.6, 7: 0.7}, start="2")  # from the checkpoint of step 6; what came after it is gone
    run = read_run(tmp_path)
    steps, values = run.curve(VAL)
    assert (steps.tolist(), values.tolist()) == ([0, 4, 6, 7], [0.1, 0.4, 0.6, 0.7])
    assert run.step.tolist() == list(range(8))
    assert run.interactions()[-1] == 7 * 320


def test_half_a_line_at_the_end_is_still_being_written(tmp_path):
    write(tmp_path, {0: 0.1, 1: 0.4})
    [path] = tmp_path.rglob("*.jsonl")
    whole = path.read_text()
    path.write_text(whole + '{"step":2,"data":{"a":')
    assert read_run(tmp_path).step.tolist() == [0, 1]
    path.write_text(whole + '{"step":2,"data":{"a"\n{"step":3,"data":{}}\n')
    with pytest.raises(ValueError, match=r'gigpo.jsonl:3: expected \{"step".*got \{"step":2,"data":\{"a"'):
        read_run(tmp_path)


def test_what_is_no_number_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step":1,"data":{"a":null,"b":"x","c":2,"d":NaN,"e":true}}\n')
    (tmp_path / "episodes-host-1.jsonl").write_text('{"key": "a", "step": 3}\n')
    run = read_run(tmp_path)
    assert {name: values.tolist() for name, values in run.metrics.items() if name != "d"} == {"c": [2.0], "e": [1.0]}
    assert run.curve("d")[0].tolist() == []
    assert run.config == {}
    assert run.interactions() is None
    assert run.seconds() is None


def test_event_files_without_tensorboard(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1").touch()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        read_run(tmp_path)


def test_a_console_log(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "INFO starting\n"
        "\x1b[36m(TaskRunnerV1 pid=12)\x1b[0m step:0 - val-core/a - b/acc/mean@1:0.25\n"
        "step:1 - loss:np.float64(-1e-05) - grad:np.float32(nan) - lr:1e-06 - on:True\n"
        "step:2 - loss:2\n"
        "step:1 - loss:3\n"  # another start, appended
        "the step:9 - and so on\n"
    )
    run = read_run(tmp_path)
    assert run.source == "train.log"
    assert run.step.tolist() == [0, 1]
    assert run.curve("loss")[1].tolist() == [3.0]
    assert run.metrics["lr"][1] == 1e-6
    assert np.isnan(run.metrics["grad"]).all()


def test_metrics_files_come_before_logs(tmp_path):
    write(tmp_path, {0: 0.1, 1: 0.4})
    (tmp_path / "train.log").write_text("step:7 - a:1\n")
    assert read_run(tmp_path).step.tolist() == [0, 1]


def test_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected the folder of a run, found no .*absent"):
        read_run(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"found a file .*file"):
        read_run(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"holds no metrics: expected a .jsonl file of trainer.logger=\[file\]"):
        read_run(tmp_path)
    (tmp_path / "m.jsonl").write_text('{"step":1,"data":{"a":1}}\n')
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("a: 1\nb: ]\n")
    with pytest.raises(ValueError, match=r"yaml, line 2: expected the configuration that Hydra writes, in YAML$"):
        read_run(tmp_path)


def test_a_folder_of_several_runs(tmp_path):
    for seed in (0, 1):
        write(tmp_path / str(seed), {0: 0.1, 1: 0.2}, seed=seed)
    with pytest.raises(ValueError, match=r"holds several runs .*/0/checkpoints, .*/1/checkpoints.*one by one"):
        read_run(tmp_path)


def test_a_metric_that_was_not_logged(tmp_path):
    run = read_run(write(tmp_path, {0: 0.2, 1: 0.5}))
    with pytest.raises(LookupError, match=r"no metric 'episode/sucess_rate'; did you mean episode/success_rate"):
        run.curve("episode/sucess_rate")
    with pytest.raises(LookupError, match=r"no metric 'xyzzy'; it has \d+ others"):
        run.curve("xyzzy")


# --- Turns, credit and updates of a log joined, and why a turn has no credit ------------------------------------------
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
    # Under asynchronous trainers the step that trains is not the one that played.
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
    with pytest.raises(join.NoLog, match=r"nowhere: expected the folder of a run, .* there is no such folder$"):
        join.load(tmp_path / "nowhere")
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


# --- Logs and metrics of version 1 are read by their current names: in the viewer, and in ``turnkey compare`` ---------
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
