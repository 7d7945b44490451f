"""Tasks and the files in which verl reads them."""

from __future__ import annotations

import pandas as pd
import pytest

from verl_turnkey.envs import TaskFormatError
from verl_turnkey.envs.tasks import COLUMN, HELD_OUT, Task, held_out_seeds, split_seeds, task_of, write_parquet


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


def test_zero_tasks(tmp_path):
    with pytest.raises(TaskFormatError, match="no tasks"):
        write_parquet(tmp_path / "x.parquet", [], "turnkey", "train")


def test_a_row_without_a_task_gives_its_prompt() -> None:
    row = {"raw_prompt": [{"role": "user", "content": "2+2?"}], "extra_info": {"index": 1}, "uid": "u"}
    assert task_of(row) == {"prompt": row["raw_prompt"], "extra_info": {"index": 1}}
