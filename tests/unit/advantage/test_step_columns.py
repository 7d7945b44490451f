"""The extra columns of numbers: what is refused, and what stands for a turn that never reached the environment."""

import numpy as np
import pytest

from verl_turnkey.advantage import ConfigError, StepBatch
from verl_turnkey.advantage.methods._step_columns import step_column, value_after


def batch(column, valid=None, trajectory=None):
    n = len(column)
    columns = {"trajectory": trajectory or [0] * n, "valid": valid or [True] * n}
    return StepBatch(group=["g"] * n, step=range(n), reward=[0.0] * n, extra={"x": column}, **columns)


@pytest.mark.parametrize("wrong", [None, float("nan"), float("inf"), 1.5, "half"])
def test_what_is_no_number_in_range_is_named(wrong):
    with pytest.raises(ConfigError, match=r"mine: extra\.x: expected a finite number from 0 to 1 .* row 1, .* step 1"):
        step_column(batch([0.5, wrong]), "mine", "x", 0.0, 1.0)


def test_numbers_come_as_they_are():
    assert step_column(batch([1, 0.5, True]), "mine", "x").tolist() == [1.0, 0.5, 1.0]
    assert step_column(batch([]), "mine", "x").tolist() == []


VALID = [False, True, False, False, True, False]
COLUMN = [0.0, 0.2, 0.0, 0.0, 0.6, 0.0]


def test_the_state_after_an_idle_turn_is_that_before_it():
    assert value_after(batch(COLUMN, VALID), "mine", "x").tolist() == [0.0, 0.2, 0.2, 0.2, 0.6, 0.6]


def test_what_an_invalid_step_says_counts_and_trajectories_are_apart():
    assert value_after(batch([0.5, 0.3], [True, False]), "mine", "x").tolist() == [0.5, 0.3]
    apart = batch([0.3, 0.0, 0.5], [True, False, True], ["a", "b", "c"])
    assert value_after(apart, "mine", "x").tolist() == [0.3, 0.0, 0.5]


def test_the_rows_may_come_in_any_order():
    order = np.array([4, 0, 5, 2, 1, 3])
    shuffled = StepBatch(
        group=["g"] * 6,
        trajectory=[0] * 6,
        step=order,
        reward=[0.0] * 6,
        valid=np.array(VALID)[order],
        extra={"x": np.array(COLUMN)[order]},
    )
    expected = value_after(batch(COLUMN, VALID), "mine", "x")[order]
    assert value_after(shuffled, "mine", "x").tolist() == expected.tolist()
