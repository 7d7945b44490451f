"""The runs of ones in a response mask, against loops over rows and tokens."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.plugins.credit.rows import Runs, token_counts

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
