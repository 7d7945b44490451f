"""Weights of tokens: steps, episodes or tasks weigh alike, in either layout and in any order of the rows."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.losses.turns import turn_ids
from verl_turnkey.plugins.actor.updates import Recorder, of_turns
from verl_turnkey.plugins.actor.weighing import token_weights

UNITS = ("step", "episode", "task")

#: Task -> episodes -> tokens of each turn, as they were generated.
Tasks = list[list[list[int]]]
Row = tuple[str, list[int], list[int], list[tuple[int, int, int]]]
"""Key, mask of the rollout, mask after a rejection, and (task, episode, turn) of each token."""


def rows_of(tasks: Tasks, per_row: int, rejected: random.Random | None = None) -> list[Row]:
    """Rows of at most ``per_row`` turns, a masked token before each; half of the tokens are ``rejected``."""
    rows: list[Row] = []
    kept = {}
    for t, episodes in enumerate(tasks):
        for e, turns in enumerate(episodes):
            for k, n in enumerate(turns):
                kept[t, e, k] = [int(rejected is None or rejected.random() < 0.5) for _ in range(n)]
            for index, start in enumerate(range(0, len(turns), per_row)):
                mask, after, whose = [], [], []
                for k in range(start, min(start + per_row, len(turns))):
                    mask += [0] + [1] * turns[k]
                    after += [0] + kept[t, e, k]
                    whose += [(t, e, k)] * (turns[k] + 1)
                rows.append((f"task_{t}_{e}_{index}", mask, after, whose))
    return rows


def nested(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def weights(by: str, rows: list[Row]) -> list[list[float]]:
    turn = turn_ids(nested([mask for _, mask, _, _ in rows]))
    by_row = token_weights(by, [key for key, *_ in rows], turn, nested([after for _, _, after, _ in rows]))
    return [row.tolist() for row in by_row.unbind()]


def of_units(by: str, rows: list[Row]) -> dict[tuple[int, ...], list[float]]:
    """The weights of the tokens that count, by unit."""
    by_unit: dict[tuple[int, ...], list[float]] = {}
    for (_, _, after, whose), weight in zip(rows, weights(by, rows), strict=True):
        for trained, who, w in zip(after, whose, weight, strict=True):
            if trained:
                by_unit.setdefault(who[: 1 + UNITS[::-1].index(by)], []).append(w)
            else:
                assert w == 0
    return by_unit


TASKS = st.lists(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=3), min_size=1, max_size=3
)


@pytest.mark.parametrize("by", UNITS)
@settings(deadline=None, max_examples=20)
@given(tasks=TASKS, per_row=st.sampled_from([1, 2, 6]), seed=st.none() | st.integers(0, 99))
def test_units_with_a_token_weigh_alike(by, tasks, per_row, seed):
    rows = rows_of(tasks, per_row, None if seed is None else random.Random(seed))
    by_unit = of_units(by, rows)
    for tokens in by_unit.values():
        assert sum(tokens) == pytest.approx(1 / len(by_unit))
        if by != "task":
            assert set(tokens) == {tokens[0]}
    episodes = of_units("episode", rows)
    for t, tokens in of_units("task", rows).items():
        alike = [len(theirs) for (task, _), theirs in episodes.items() if task == t[0]]
        expected = sorted(sum(tokens) / len(alike) / n for n in alike for _ in range(n))
        assert sorted(tokens) == pytest.approx(expected)


@pytest.mark.parametrize("by", UNITS)
@settings(deadline=None, max_examples=20)
@given(tasks=TASKS, per_row=st.sampled_from([2, 6]), seed=st.integers(0, 99))
def test_the_layout_and_the_order_of_rows_change_nothing(by, tasks, per_row, seed):
    steps = rows_of(tasks, 1, random.Random(seed))
    merged = rows_of(tasks, per_row, random.Random(seed))
    expected = of_units(by, steps)
    for rows in (merged, random.Random(seed).sample(merged, len(merged))):
        by_unit = of_units(by, rows)
        assert {unit: sorted(tokens) for unit, tokens in by_unit.items()} == {
            unit: pytest.approx(sorted(tokens)) for unit, tokens in expected.items()
        }


def test_what_has_no_token_left_does_not_count():
    """A failed episode, a padding row with a key of its own, a step and an episode of which all was rejected."""
    keys = ["a_0_0", "a_0_1", "a_1_0", "a_2_0", "b_0_0", "padding"]
    mask = nested([[1, 1], [1, 0], [0], [1, 1, 1], [1, 1, 1, 1], [0, 0]])
    after = nested([[1, 0], [0, 0], [0], [0, 0, 0], [1, 1, 1, 1], [0, 0]])
    for by in UNITS:
        by_row = [row.tolist() for row in token_weights(by, keys, turn_ids(mask), after).unbind()]
        assert by_row == [[0.5, 0], [0, 0], [0], [0, 0, 0], [0.125] * 4, [0, 0]]
    nothing = nested([[0], [0, 0]])
    assert not token_weights("step", ["a_0_0", "padding"], turn_ids(nothing), nothing).values().any()
    assert not token_weights("task", ["a_0_0", "padding"], turn_ids(nothing), nothing).values().any()


# --- Numbers of tokens to numbers of turns, and which epoch a row is in -----------------------------------------------
NAN = float("nan")


def test_means_and_maxima_are_over_the_trained_tokens_of_each_turn():
    row = [3, 3, 3, 3, 3, 4, 4, 9, 9]
    turn = [0, 0, -1, 1, 1, 1, 1, -1, -1]  # the last row is not recorded; rows 3 and 4 both end with a turn 1
    trained = [1, 1, 0, 0, 1, 1, 1, 1, 1]
    ratio = [1.0, 3.0, 99.0, 99.0, 0.5, 1.0, 1.5, 99.0, 99.0]
    outside = [0, 1, 1, 1, 0, 1, 1, 1, 1]
    entropy = [2.0, 4.0, 99.0, 99.0, 1.0, 0.0, 1.0, 99.0, 99.0]
    columns = of_turns(np.array([row, turn, trained, ratio, outside, entropy], dtype=np.float32))
    assert {name: column.tolist() for name, column in columns.items()} == {
        "row_id": [3, 3, 4],
        "turn_in_row": [0, 1, 1],
        "ratio": [2.0, 0.5, 1.25],
        "ratio_max": [3.0, 0.5, 1.5],
        "clip_share": [0.5, 0.0, 1.0],
        "entropy": [3.0, 1.0, 0.5],
    }


def test_a_micro_batch_of_padding_has_no_turns():
    columns = of_turns(np.array([[0.0], [-1.0], [0.0], [1.0], [0.0], [1.0]], dtype=np.float32))
    assert {len(column) for column in columns.values()} == {0}


class Kept:
    """In the place of the writer."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict]] = []

    def put(self, table: str, step: int, rows: dict) -> None:
        assert table == "updates"
        self.rows.append((step, {name: column.tolist() for name, column in rows.items()}))


def turns(*rows: int, entropy: float = NAN) -> dict[str, np.ndarray]:
    return {"row_id": np.array(rows, dtype=np.int32), "entropy": np.full(len(rows), entropy, dtype=np.float32)}


def test_a_row_that_comes_again_in_a_step_is_in_its_next_epoch():
    recorder = Recorder(Kept())
    for rows in ((5, 5, 6), (7,), (), (6, 7), (5, 5)):
        recorder.add(1, turns(*rows))
    recorder.add(2, turns(5))  # has the rows of the step before written
    recorder.put()
    recorder.put()
    (first, rows), (second, others) = recorder.tables.rows
    assert (first, second) == (1, 2)
    assert rows == {
        "row_id": [5, 5, 6, 7, 6, 7, 5, 5],
        "epoch": [0, 0, 0, 0, 1, 1, 1, 1],
        "train_step": [1] * 8,
    }, "a column that is nowhere known stays out"
    assert others == {"row_id": [5], "epoch": [0], "train_step": [2]}
    recorder = Recorder(Kept())
    recorder.add(1, turns(1))
    recorder.add(1, turns(2, entropy=0.5))
    recorder.put()
    assert recorder.tables.rows[0][1]["entropy"][1] == 0.5
