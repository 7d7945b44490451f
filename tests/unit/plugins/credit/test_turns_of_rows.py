"""Row keys, and what belongs to the turns of verl's rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.losses.turns import turn_ids
from verl_turnkey.plugins.credit.estimator import CreditStep
from verl_turnkey.plugins.credit.row_turns import at_turn_start, split_key, sum_by_turn, turn_counts

MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
VALUES = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0], [9.0, 9.0, 9.0, 9.0]])
ROW, TURN = np.array([0, 0, 1]), np.array([0, 1, 0])


@pytest.mark.parametrize("uid", ["1f-e", "task_7", "a_b_3"])
def test_a_key_ends_with_session_and_index_whatever_the_uid_is(uid):
    assert split_key(f"{uid}_2_13") == (uid, f"{uid}_2", 13)


def test_sums_and_starts_of_turns():
    ids = turn_ids(MASK)
    assert turn_counts(ids) == [2, 1, 0]
    assert sum_by_turn(VALUES, ids, ROW, TURN).tolist() == [3.0, 8.0, 96.0]
    assert at_turn_start(VALUES, ids, ROW, TURN).tolist() == [1.0, 8.0, 32.0]


def test_a_turn_without_tokens_has_nothing():
    """Its tokens may all have been rejected: the step is still there."""
    ids = turn_ids(torch.zeros(1, 3))
    assert sum_by_turn(torch.ones(1, 3), ids, np.array([0]), np.array([0])).tolist() == [0.0]
    assert sum_by_turn(VALUES, turn_ids(MASK), np.array([], dtype=int), np.array([], dtype=int)).tolist() == []


def test_records_are_there_when_every_row_but_the_padding_has_one():
    said = {"turnkey": make_record([make_step(step=0, reward=0.0)])}
    tags = [{}, {}, {"is_padding": True}]

    def step(*extra_fields):
        return CreditStep(None, ["a_0_0", "b_0_0", "p_0_0"], tags, extra_fields, torch.ones(3, 1))

    assert step(said, said, {}).has_records
    assert not step(said, {}, {}).has_records
    assert not step({}, {}, said).has_records
