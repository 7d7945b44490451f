"""Numbers of tokens to numbers of turns, and which epoch a row is in."""

from __future__ import annotations

import numpy as np

from verl_turnkey.plugins.actor.updates import Recorder, of_turns

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


def test_what_is_known_of_some_turns_is_written():
    recorder = Recorder(Kept())
    recorder.add(1, turns(1))
    recorder.add(1, turns(2, entropy=0.5))
    recorder.put()
    assert recorder.tables.rows[0][1]["entropy"][1] == 0.5
