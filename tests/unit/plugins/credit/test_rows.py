"""Rows of the queue: their keys and records, and the runs of ones in a response mask, against loops over the tokens."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.advantage import RecordError, make_record, make_step
from verl_turnkey.plugins.credit.estimator import CreditStep
from verl_turnkey.plugins.credit.rows import Runs, read_rows, split_key, token_counts

ROWS = st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=6).filter(any)


def jagged(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


def naive(rows: list[list[int]]) -> list[tuple[int, int, int]]:
    """Row, start in the flat mask and length of each run."""
    turns, at = [], 0
    for number, row in enumerate(rows):
        for trained, run in groupby(row):
            length = len([*run])
            if trained:
                turns.append((number, at, length))
            at += length
    return turns


@given(rows=ROWS)
def test_runs_of_ragged_rows(rows: list[list[int]]):
    runs, expected = Runs.of(jagged(rows)), naive(rows)
    assert [*zip(runs.row.tolist(), runs.start.tolist(), runs.length.tolist(), strict=True)] == expected
    assert runs.count.tolist() == [sum(run[0] == row for run in expected) for row in range(len(rows))]
    assert runs.first.tolist() == [sum(run[0] < row for run in expected) for row in range(len(rows))]
    assert token_counts(jagged(rows)).tolist() == [sum(row) for row in rows]


@given(rows=ROWS)
def test_what_is_written_on_runs_is_on_their_tokens_alone(rows: list[list[int]]):
    runs = Runs.of(jagged(rows))
    spread = runs.spread(np.arange(len(runs.start)), -1)
    expected = torch.full((sum(map(len, rows)),), -1)
    for number, (_, start, length) in enumerate(naive(rows)):
        expected[start : start + length] = number
    assert spread.values().tolist() == expected.tolist()
    assert spread.offsets().tolist() == jagged(rows).offsets().tolist()


@pytest.mark.parametrize(
    ("rows", "row", "turn", "of_run", "tokens"),
    [
        pytest.param([[1, 0, 1], [1]], [0, 0, 1], [0, 1, 0], [0, 1, 2], [1, 1, 1], id="a turn for each run"),
        pytest.param([[1, 0, 1], [1, 1]], [0, 1], [0, 0], [0, 0, 1], [2, 2], id="a step with a gap"),
        pytest.param([[0, 0], [1, 1]], [0, 1], [0, 0], [1], [0, 2], id="a step without a token"),
        pytest.param([[1, 0, 1], [1]], [1], [0], [1, 1, 0], [1], id="a row without steps"),
        pytest.param([[1, 0, 1, 1], [1]], [1, 0, 0], [0, 1, 0], [2, 1, 0], [1, 2, 1], id="steps in another order"),
    ],
)
def test_the_step_of_each_run(rows, row, turn, of_run, tokens):
    runs = Runs.of(jagged(rows))
    steps = runs.steps(np.array(row), np.array(turn))
    assert steps.tolist() == of_run
    turns = runs.turns(steps, len(row))
    assert turns.tokens.tolist() == tokens
    assert turns.n == len(row)


@pytest.mark.parametrize("uid", ["1f-e", "task_7", "a_b_3"])
def test_a_key_ends_with_session_and_index_whatever_the_uid_is(uid):
    assert split_key(f"{uid}_2_13") == (uid, f"{uid}_2", 13)


def test_records_are_there_when_every_row_but_the_padding_has_one():
    with_record = {"turnkey": make_record([make_step(step=0, reward=0.0)])}
    tags = [{}, {}, {"is_padding": True}]

    def step(*extra_fields):
        return CreditStep(None, ["a_0_0", "b_0_0", "p_0_0"], tags, extra_fields, torch.ones(3, 1))

    assert step(with_record, with_record, {}).has_records
    assert not step(with_record, {}, {}).has_records
    assert not step({}, {}, with_record).has_records


def test_an_answer_is_an_empty_text_on_the_steps_before_it():
    """As copo's page says: a record holds no None, and a step with an action that lacks it takes the column away."""

    def extra(*answers):
        extras = [{} if answer is None else {"answer": answer} for answer in answers]
        steps = [make_step(step=t, reward=0.0, action="go", extra=more) for t, more in enumerate(extras)]
        rows = [{"turnkey": make_record([step])} for step in steps]
        mask = torch.nested.as_nested_tensor([torch.ones(1)] * len(rows), layout=torch.jagged)
        return read_rows([f"a_0_{t}" for t in range(len(rows))], [{}] * len(rows), rows, mask).steps.extra

    assert extra("", "", "Paris")["answer"].tolist() == ["", "", "Paris"]
    assert extra(7.0, 7.0)["answer"].tolist() == [7.0, 7.0]
    assert "answer" not in extra(None, "Paris")
    with pytest.raises(RecordError, match=r"extra\.answer: expected a float or a str .* got None"):
        make_step(step=0, reward=0.0, extra={"answer": None})


def test_a_step_without_an_action_may_leave_out_what_its_answer_would_say():
    """A 0, or None for a text, is right of what nothing changed, and wrong of whose move it was."""
    full = {"turn_score": 1.0, "said": "yes", "role": "white", "turn_value": 0.5}
    steps = [make_step(step=0, reward=0.0), make_step(step=1, reward=0.0, action="go", extra=full)]
    rows = [{"turnkey": make_record([step])} for step in steps]
    mask = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    answer = {"turn_score": [0.0, 1.0], "said": [None, "yes"]}

    def columns(*before):
        extra = read_rows(["a_0_0", "a_0_1"], [{}, {}], rows, mask, before=before).steps.extra
        return {name: column.tolist() for name, column in extra.items()}

    assert columns("role", "turn_value") == answer
    assert columns("role") == {**answer, "turn_value": [0.0, 0.5]}  # of a method that takes it from the answer
