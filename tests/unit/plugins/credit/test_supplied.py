"""Columns that the trainer supplies: every one that is promised, and the key of a task."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import ConfigError, make_record, make_step
from verl_turnkey.advantage.modifiers.rank_shaping import NAMES
from verl_turnkey.advantage.registry import FROM_TRAINER, HOW_TO_SET
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.config.scorers import TURN_SCORE
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.credit.supplied import SOURCES, check_supplied, fields, from_trainer, supply, task_key


def test_every_promised_column_has_a_source():
    assert set(SOURCES) == {*FROM_TRAINER, TURN_SCORE} == from_trainer("implicit", critic=True)
    for column in from_trainer(None, critic=True):
        assert FROM_TRAINER[column] in HOW_TO_SET[column]
    values = {f"extra.value_{head}" for head in ("low", "high", "term")}
    assert from_trainer(None, critic=False) == from_trainer(None, critic=True) - values
    assert values <= from_trainer(None, critic=True)


def test_only_what_is_needed_is_fetched():
    assert fields(("anchor", "extra.role")) == []
    assert fields(("anchor", "extra.entropy")) == ["entropy"]
    assert set(supply(("anchor", "extra.entropy", "extra.log_prob"), {"entropy": None})) == {"entropy"}


def test_steps_have_the_ranks_of_their_rows():
    ranks = torch.nested.as_nested_tensor([torch.tensor([3.0, 0.5, -0.1]), torch.tensor([2.0, 0.0, 0.0])])
    columns = supply([f"extra.{name}" for name in NAMES], {"turnkey_rank": ranks})
    made = {name: column(None, np.array([1, 0, 0])).tolist() for name, column in columns.items()}
    assert made == {
        "rank": [2.0, 3.0, 3.0],
        "rank_velocity": [0.0, 0.5, 0.5],
        "rank_acceleration": pytest.approx([0.0, -0.1, -0.1]),
    }


def test_a_step_without_tokens_or_text_has_no_number_of_them():
    """Three steps: one without a token, one in a row without a text, and one of two tokens."""

    def jagged(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    records = [make_record([make_step(step=0, reward=0.0)])] * 3
    columns = (f"extra.{name}" for name in ("entropy", "teacher_gap", "teacher_gap_mean", "teacher_log_prob_mean"))
    data = {"entropy": jagged([7.0], [0.5], [0.5, 1.0]), "has_teacher": torch.tensor([True, False, True])}
    data |= {
        "old_log_probs": jagged([-9.0], [-1.0], [-1.0, -2.0]),
        "teacher_log_prob": jagged([-1.0], [-1.0], [0.0] * 2),
    }
    mask, keys = jagged([0], [1], [1, 1]), ["g_0_0", "g_1_0", "g_2_0"]
    extra_fields = [{"turnkey": record} for record in records]
    rows = read_rows(keys, [{}] * 3, extra_fields, mask, supply=supply(columns, data))
    nan = np.nan
    expected = {
        "entropy": [nan, 0.5, 0.75],
        "teacher_gap": [nan, nan, 3.0],
        "teacher_gap_mean": [nan, nan, 1.5],
        "teacher_log_prob_mean": [nan, nan, 0.0],
    }
    for name, column in expected.items():
        np.testing.assert_array_equal(rows.steps.extra[name], column, name)


PROMPT = [{"role": "user", "content": "2 + 2?"}]
ROW = {"turnkey_task": None, "data_source": "sums", "index": 3, "raw_prompt": PROMPT}


def test_a_task_of_ours_is_known_by_itself():
    tasks = [Task("turnkey/MiniGrid-v0", seed, kwargs).to_json() for seed in (1, 2) for kwargs in ({}, {"size": 5})]
    keys = [task_key({"turnkey_task": task, "index": 7, "raw_prompt": PROMPT}) for task in tasks]
    assert len(set(keys)) == 4
    assert keys == [task_key({"turnkey_task": task}) for task in tasks]


@pytest.mark.parametrize(
    "other", [{"data_source": "x"}, {"index": 4}, {"raw_prompt": [{"role": "user", "content": "2 + 3?"}]}]
)
def test_other_rows_are_known_by_source_index_and_prompt(other):
    assert task_key(ROW) != task_key({**ROW, **other})


@pytest.mark.parametrize("index", [np.int64(3), np.array(3)])
def test_the_key_does_not_depend_on_the_type_of_a_number(index):
    assert task_key({**ROW, "index": index}) == task_key(ROW)


class Image:
    """As PIL's: its text has an address in it."""

    def __init__(self, pixels: bytes) -> None:
        self.pixels = pixels

    def tobytes(self) -> bytes:
        return self.pixels


def test_images_of_a_prompt_count_by_their_pixels():
    def key(image: object) -> str:
        return task_key({**ROW, "raw_prompt": [{"role": "user", "content": [{"type": "image", "image": image}]}]})

    assert key(Image(b"red")) == key(Image(b"red")) != key(Image(b"blue"))
    assert key(np.zeros(3)) == key(np.zeros(3)) != key(np.ones(3))
    assert key(object()) == key(object())


def test_the_key_is_the_same_in_every_run():
    """States of checkpoints are kept under it."""
    assert task_key({"turnkey_task": json.dumps({"env_id": "x", "seed": 1})}) == "afe11f5958f8a9cf"
    assert task_key(ROW) == "a8e2d37953681b0d"


def test_entropies_that_verl_does_not_compute():
    check_supplied(["mine"], ("extra.log_prob", "extra.task"))
    with pytest.raises(
        ConfigError, match=r"^mine with other needs 'extra\.entropy'.*bypass_mode=true: set it to false"
    ):
        check_supplied(["mine", "other"], ("extra.task", "extra.entropy"))
