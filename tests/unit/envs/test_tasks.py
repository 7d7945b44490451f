"""Tasks and the files in which verl reads them."""

import hashlib
import json
from pathlib import Path

import pandas as pd
import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import TaskFormatError
from verl_turnkey.envs.tasks import (
    COLUMN,
    HELD_OUT,
    METADATA,
    Panel,
    Task,
    held_out_seeds,
    make_panel,
    panel_of,
    split_seeds,
    task_of,
    write_parquet,
)
from verl_turnkey.plugins.cli.view import refuse_other_panels


def test_a_task_survives_json():
    task = Task("turnkey/MiniGrid-v0", 7, {"level": "BabyAI-GoToObj-v0", "max_steps": None})
    assert Task.from_json(task.to_json()) == task
    assert Task.from_json('{"env_id": "a", "seed": 1}') == Task("a", 1)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "3",
        '{"seed": 1}',
        '{"env_id": "a", "seed": "1"}',
        '{"env_id": "a", "seed": 1, "kwarg": {}}',
    ],
)
def test_bad_json_names_the_column(text):
    with pytest.raises(TaskFormatError, match=f"column '{COLUMN}' must hold"):
        Task.from_json(text)


def test_kwargs_that_json_cannot_hold():
    with pytest.raises(TaskFormatError, match="plain JSON"):
        Task("a", 1, {"x": object()}).to_json()


def test_seeds_are_disjoint_and_reproducible():
    train, val = split_seeds(500, 200, seed=3)
    assert (len(set(train)), len(set(val)), set(train) & set(val)) == (500, 200, set())
    assert split_seeds(500, 200, seed=3) == (train, val)
    assert split_seeds(500, 200, seed=4)[0] != train


def test_held_out_seeds_are_drawn_by_no_split(monkeypatch):
    held_out = held_out_seeds(HELD_OUT)
    assert len({*held_out}) == HELD_OUT
    assert held_out[:9] == held_out_seeds(9)
    assert all(0 <= seed < 2**31 for seed in held_out)
    with pytest.raises(ValueError, match="65536 held-out seeds"):
        held_out_seeds(HELD_OUT + 1)
    # Of so few seeds a split draws each one that it may draw.
    monkeypatch.setattr("verl_turnkey.envs.tasks._MAX_SEED", HELD_OUT + 50)
    drawn = [seed for split in split_seeds(30, 20, 0) for seed in split]
    assert sorted(drawn) == [*range(50)]
    assert not {*drawn} & {*held_out_seeds(HELD_OUT)}


def test_parquet_as_verl_reads_it(tmp_path):
    tasks = [Task("a", 1, {}), Task("b", 2, {"x": [1]})]
    write_parquet(tmp_path / "train.parquet", tasks, "turnkey", "train")
    rows = pd.read_parquet(tmp_path / "train.parquet").to_dict("records")
    assert [Task.from_json(row[COLUMN]) for row in rows] == tasks
    assert rows[1]["data_source"] == "turnkey"
    assert rows[1]["extra_info"] == {"index": 1, "split": "train"}
    assert rows[1]["reward_model"] == {"style": "rule", "ground_truth": ""}
    assert [sorted(message) for message in rows[0]["prompt"]] == [["content", "role"]]
    with pytest.raises(TaskFormatError, match="no tasks"):
        write_parquet(tmp_path / "x.parquet", [], "turnkey", "train")


def test_a_row_without_a_task_gives_its_prompt() -> None:
    row = {"raw_prompt": [{"role": "user", "content": "2+2?"}], "extra_info": {"index": 1}, "uid": "u"}
    assert task_of(row) == {"prompt": row["raw_prompt"], "extra_info": {"index": 1}}


LAKE, SEARCH = "turnkey/FrozenLake-v0", "turnkey/AppWorld-v0"
URL = "http://127.0.0.1:9000"


@pytest.fixture(scope="module")
def lake() -> Panel:
    return make_panel("lake", LAKE, {"size": 4}, {"rollout": {}}, number=6, returns=[0, 1])


def test_a_panel_survives_its_file(lake):
    text = lake.text()
    assert Panel.read(text, "lake.json") == lake
    assert (
        lake.text() == text == make_panel("lake", LAKE, {"size": 4}, {"rollout": {}}, number=6, returns=[0, 1]).text()
    )
    assert [task["seed"] for task in lake.content["tasks"]] == held_out_seeds(6)
    assert len(lake.sha256) == 64


@pytest.mark.parametrize("part", ["seed", "samples", "start", "returns"])
def test_a_changed_file_is_refused(lake, part):
    content = json.loads(lake.text())
    if part in content:
        content[part] = 7
    else:
        content["tasks"][2][part] = 7
    with pytest.raises(TaskFormatError, match=r"x\.json was changed: the hash of its content"):
        Panel.read(json.dumps(content), "x.json")
    with pytest.raises(TaskFormatError, match=r"x\.json is not a panel"):
        Panel.read("[]", "x.json")


def test_a_task_that_starts_otherwise_is_named(lake):
    tasks = lake.tasks({})
    assert tasks == [Task(LAKE, seed, {"size": 4}) for seed in held_out_seeds(6)]
    assert lake.other_starts(tasks, {}) == []
    other = make_panel("lake", LAKE, {"size": 5}, {"rollout": {}}, number=6).content["tasks"]
    changed = Panel({**lake.content, "tasks": [*lake.content["tasks"][:5], {**lake.content["tasks"][5], **other[5]}]})
    assert changed.other_starts(tasks, {}) == [f"seed-{tasks[5].seed}"]


def test_a_task_that_starts_with_another_picture_is_named():
    drawn = make_panel("rooms", "turnkey/MiniGrid-v0", {"images": True, "tile": 8}, {"rollout": {}}, number=2)
    tasks = drawn.tasks({})
    assert drawn.other_starts(tasks, {}) == []
    drawn.content["environment"]["kwargs"]["tile"] = 16  # the words are the same
    assert drawn.other_starts(tasks, {}) == [f"seed-{task.seed}" for task in tasks]


def test_own_ids_are_found_in_another_order_and_missing_ones_are_named(tmp_path):
    def listed(ids: list[str]) -> dict:
        (tmp_path / "test.txt").write_text("\n".join(ids))
        return {"urls": URL, "tasks": str(tmp_path / "test.txt")}

    ids = [f"task_{n}" for n in range(9)]
    panel = make_panel("apps", SEARCH, listed(ids), {}, number=4, with_starts=False)
    chosen = [task["id"] for task in panel.content["tasks"]]
    assert "urls" not in panel.content["environment"]["kwargs"]
    reordered = [*reversed(ids), "another"]
    again = make_panel("apps", SEARCH, listed(reordered), {}, number=4, with_starts=False)
    least = sorted(reordered, key=lambda id: hashlib.sha256(id.encode()).hexdigest())[:4]
    assert [task["id"] for task in again.content["tasks"]] == sorted(least, key=reordered.index)
    assert len({*chosen} & {*least}) >= 3
    listed(reordered)
    assert [reordered[task.seed] for task in panel.tasks({"urls": URL})] == chosen
    listed([id for id in ids if id != chosen[2]])
    with pytest.raises(TaskFormatError, match=f"1 of its 4 tasks are not on this machine, such as '{chosen[2]}'"):
        panel.tasks({"urls": URL})


def test_the_file_for_verl_holds_the_panel_until_it_is_rewritten(lake, tmp_path):
    file = tmp_path / "lake.parquet"
    lake.write_parquet(file, lake.tasks({}))
    rows = pd.read_parquet(file)
    assert [Task.from_json(text) for text in rows[COLUMN]] == lake.tasks({})
    assert set(rows["data_source"]) == {"lake"}
    assert panel_of(file) == lake
    rows.head(3).to_parquet(tmp_path / "some.parquet")
    assert panel_of(tmp_path / "some.parquet") is None
    assert panel_of(tmp_path / "absent.parquet") is None
    assert METADATA == "turnkey_panel"


def test_runs_on_different_panels_are_not_compared(tmp_path):
    def run(name: str, panel: dict | None) -> Path:
        (tmp_path / name / "turnkey_log" / "episodes").mkdir(parents=True)
        (tmp_path / name / "turnkey_log" / "run.json").write_text(json.dumps({"panel": panel}))
        return tmp_path / name

    lake, taxi = {"name": "frozenlake-48", "sha256": "1" * 64}, {"name": "taxi-48", "sha256": "2" * 64}
    alike = [run("a", lake), run("b", lake), run("c", None), tmp_path]
    refuse_other_panels(alike)
    with pytest.raises(ConfigError, match=r"/a validates on the panel frozenlake-48, .*/d on taxi-48"):
        refuse_other_panels([*alike, run("d", taxi)])
