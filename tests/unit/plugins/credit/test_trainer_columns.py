"""Columns that the trainer supplies, the key of a task; where heads of a critic are read and fitted, against loops."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import ConfigError, Credit, ValueHead, make_record, make_step
from verl_turnkey.advantage.methods.hae import HEADS
from verl_turnkey.advantage.modifiers.rank_shaping import NAMES
from verl_turnkey.advantage.registry import FROM_TRAINER, HOW_TO_SET
from verl_turnkey.envs.tasks import Task
from verl_turnkey.losses.turns import Turns
from verl_turnkey.plugins.config.scorers import TURN_SCORE
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.credit.trainer_columns import (
    SOURCES,
    VALUES,
    check_supplied,
    fields,
    from_trainer,
    head_values,
    positions,
    supply,
    target_columns,
    target_field,
    task_key,
    value_field,
)


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


LOW, HIGH, TERM = HEADS


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def drawn(seed):
    """Masks of rows with turns, and of each turn its row, its tokens, and where its switch and its subgoal end."""
    rng, masks, turns = random.Random(seed), [], []
    for row in range(4):
        mask = [0] * rng.randrange(2)
        for _ in range(rng.randrange(1, 4)):
            tokens = rng.randrange(1, 7)
            switch = rng.choice([0, rng.randrange(1, tokens + 1)])
            subgoal = rng.choice([0, rng.randrange(switch, tokens + 1)])
            turns.append((row, range(len(mask), len(mask) + tokens), switch, subgoal))
            mask += [1] * tokens + [0] * rng.randrange(1, 3)
        masks.append(mask)
    return masks, turns


def place(head, turn):
    """The token of the row before which a head is read."""
    _, tokens, switch, subgoal = turn
    if head != LOW:
        return tokens[0]
    behind = subgoal or switch
    return tokens[min(behind, len(tokens) - 1)]


@pytest.mark.parametrize("seed", range(20))
def test_values_and_targets_stand_at_the_token_of_each_head(seed):
    masks, turns = drawn(seed)
    mask = jagged(masks)
    draw = np.random.default_rng(seed)
    values = {value_field(HEADS, head): [draw.normal(size=len(row)) for row in masks] for head in HEADS}
    extra = {"to_switch": [turn[2] for turn in turns], "to_subgoal": [turn[3] for turn in turns]}
    table, row = Turns.of(mask), np.array([turn[0] for turn in turns])
    columns = head_values(HEADS, {name: jagged(rows) for name, rows in values.items()}, table, row, extra)
    targets = {head.name: draw.normal(size=len(turns)) for head in HEADS}
    targets["high"][::2] = np.nan  # the turns inside segments
    trained = [[x and draw.random() < 0.8 for x in row] for row in masks]
    credit = Credit(np.zeros(len(turns)), targets=targets)
    written = target_columns(HEADS, credit, table, extra, jagged([np.array(row, dtype=np.int64) for row in trained]))
    assert list(columns) == ["value_low", "value_high", "value_term"]
    for head in HEADS:
        expected = [np.full(len(row), np.nan) for row in masks]
        for t, turn in enumerate(turns):
            at = place(head, turn)
            assert columns[f"value_{head.name}"][t] == values[value_field(HEADS, head)][turn[0]][at]
            if trained[turn[0]][at]:
                expected[turn[0]][at] = targets[head.name][t]
        for got, want in zip(written[target_field(head)].unbind(), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_fields_are_distinct_and_the_first_is_verls():
    assert [value_field(HEADS, head) for head in HEADS] == [VALUES, "turnkey_value_high", "turnkey_value_term"]
    assert len({target_field(head) for head in HEADS}) == 3


def test_a_turn_with_gaps_is_counted_by_its_own_tokens():
    """A row's only turn may have masked tokens inside; behind two of its own is the token 4 of the row."""
    turns = Turns.of(jagged([[1, 0, 1, 0, 1, 1]]), jagged([[0] * 6]))
    assert positions(LOW, turns, {"to_subgoal": [2]}).tolist() == [4]
    assert positions(HIGH, turns, {"to_subgoal": [2]}).tolist() == [0]


def test_without_decisions_in_the_record_all_heads_are_read_at_the_first_token():
    turns = Turns.of(jagged([[0, 1, 1, 0, 1]]))
    for head in HEADS:
        assert positions(head, turns, {}).tolist() == [1, 4]


def step(number, **extra):
    return make_step(step=number, reward=0.0, extra={"switch": 1, **extra})


def test_a_record_with_values_keeps_its_own_and_a_turn_without_tokens_has_that_of_its_row():
    heads = (LOW, ValueHead("own"))
    records = [make_record([step(0, to_switch=1, value_own=7.0)]), make_record([step(1, to_switch=0, value_own=8.0)])]
    fields = {VALUES: jagged([[0.5, 1.5], [2.5, 3.5]]), "turnkey_value_own": jagged([[0.0] * 2] * 2)}
    rows = read_rows(
        ["g_0_0", "g_0_1"],
        [{}, {}],
        [{"turnkey": record} for record in records],
        jagged([[1, 1], [0, 0]]),
        values=fields[VALUES],
        heads=lambda *arguments: head_values(heads, fields, *arguments),
    )
    assert rows.steps.extra["value_own"].tolist() == [7.0, 8.0]
    assert rows.steps.extra["value_low"].tolist() == rows.steps.value.tolist() == [1.5, 2.5]
