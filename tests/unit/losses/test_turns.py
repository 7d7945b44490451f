"""Turns of a mask, padded and jagged, against a loop over its rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.losses import Turns, turn_ids

rows = st.integers(0, 7).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=5)
)
ragged = st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=5)


def naive_ids(row):
    ids, turn, before = [], -1, False
    for token in row:
        turn += token and not before
        ids.append(turn if token else -1)
        before = token
    return ids


def jagged(rows, dtype):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


@settings(max_examples=100, deadline=None)
@given(rows, st.sampled_from([torch.bool, torch.int64, torch.float32]))
def test_ids_of_a_padded_mask(rows, dtype):
    mask = torch.tensor(rows, dtype=dtype)
    ids = turn_ids(mask)
    assert ids.dtype == torch.int64
    assert ids.shape == mask.shape
    assert ids.tolist() == [naive_ids(row) for row in rows]


@settings(max_examples=100, deadline=None)
@given(ragged)
def test_ids_of_a_jagged_mask(rows):
    ids = turn_ids(jagged(rows, torch.bool))
    assert ids.is_nested
    assert [row.tolist() for row in ids.unbind()] == [naive_ids(row) for row in rows]


@settings(max_examples=60, deadline=None)
@given(ragged, st.randoms(use_true_random=True))
def test_sums_means_and_spread(rows, random):
    values = [[random.uniform(-2, 2) for _ in row] for row in rows]
    turns = Turns.of(jagged(rows, torch.bool))
    expected: dict[tuple[int, int], list[float]] = {}
    for r, row in enumerate(rows):
        for turn, value in zip(naive_ids(row), values[r], strict=True):
            if turn >= 0:
                expected.setdefault((r, turn), []).append(value)
    columns = jagged(values, torch.float64)
    assert turns.n == len(expected)
    assert turns.tokens.tolist() == [len(of_turn) for of_turn in expected.values()]
    assert turns.sum(columns).tolist() == pytest.approx([sum(v) for v in expected.values()])
    means = turns.mean(columns)
    assert means.tolist() == pytest.approx([sum(v) / len(v) for v in expected.values()])
    order = list(expected)
    for r, row in enumerate(turns.spread(means).unbind()):
        wanted = [0.0 if t < 0 else means[order.index((r, t))].item() for t in naive_ids(rows[r])]
        assert row.tolist() == pytest.approx(wanted)


@settings(max_examples=60, deadline=None)
@given(rows, st.booleans(), st.randoms(use_true_random=True))
def test_turns_of_a_mask_that_was_thinned_out(rows, nested, random):
    """The numbers of the whole mask tell them: runs that fell apart are one turn, and what is left of it counts."""
    left = [[token and random.random() < 0.6 for token in row] for row in rows]
    values = [[random.uniform(-2, 2) for _ in row] for row in rows]
    make = jagged if nested else torch.tensor
    turns = Turns.of(make(left, dtype=torch.bool), turn_ids(make(rows, dtype=torch.bool)))
    expected: dict[tuple[int, int], list[float]] = {}
    for r, row in enumerate(rows):
        for turn, here, value in zip(naive_ids(row), left[r], values[r], strict=True):
            if here:
                expected.setdefault((r, turn), []).append(value)
    assert sorted(n for n in turns.tokens.tolist() if n) == sorted(map(len, expected.values()))
    by_token = turns.spread(turns.mean(make(values, dtype=torch.float64)))
    for r, row in enumerate(by_token.unbind()):
        means = [sum(v) / len(v) if (v := expected.get((r, t))) else 0.0 for t in naive_ids(rows[r])]
        wanted = [mean if here else 0.0 for mean, here in zip(means, left[r], strict=True)]
        assert row.tolist() == pytest.approx(wanted)


def test_what_is_jagged_can_be_padded():
    mask = jagged([[0, 1, 1], [1]], torch.bool)
    assert turn_ids(mask).to_padded_tensor(-1).tolist() == [[-1, 0, 0], [0, -1, -1]]
    assert Turns.of(mask).spread(torch.tensor([2.0, 3.0])).to_padded_tensor(0.0).tolist() == [[0, 2, 2], [3, 0, 0]]
    assert turn_ids(torch.zeros(0, 3)).shape == (0, 3)
    turns = Turns.of(torch.zeros(2, 3))
    assert turns.n == 0
    assert turns.spread(turns.mean(torch.ones(2, 3))).tolist() == [[0.0] * 3] * 2
