"""Where heads of a critic are read and fitted: against loops over the tokens of each turn."""

import random

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import Credit, ValueHead, make_record, make_step
from verl_turnkey.advantage.methods.hae import HEADS
from verl_turnkey.losses.turns import Turns
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.credit.trainer_columns import (
    VALUES,
    head_values,
    positions,
    target_columns,
    target_field,
    value_field,
)

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
