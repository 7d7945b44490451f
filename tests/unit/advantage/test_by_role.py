"""Several roles in a trajectory: methods that know of none take what each role did for a trajectory of its own."""

import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings

from verl_turnkey.advantage import StepBatch, compute_credit

#: Two rollouts of one task, in which two players move by turns; each wins once, and the loser is paid as well.
GAME = {
    "group": ["g"] * 6,
    "trajectory": [0, 0, 0, 1, 1, 1],
    "step": [0, 1, 2, 0, 1, 2],
    "reward": [0.0, -1.0, 1.0, 0.0, 1.0, -1.0],
    "anchor": ["a", "b", "a", "a", "b", "a"],
    "terminated": [False, False, True] * 2,
    "success": [True] * 3 + [False] * 3,
    "extra": {"role": ["x", "y", "x"] * 2, "role_outcome": [1, -1, 1, -1, 1, -1]},
}
WON = [1, -1, 1, -1, 1, -1]


def apart(rows):
    """The same rows with a trajectory and a group for each role, written down by hand."""

    def own(row, column):
        return str((row[column], row["role"]))

    return [{**row, "trajectory": own(row, "trajectory"), "group": own(row, "group"), "role": "x"} for row in rows]


@settings(max_examples=60, deadline=None)
@given(step_rows("role", "anchor", "reward", "penalty"))
@pytest.mark.parametrize("method", ["gigpo", "grpo_steps", "turn_norm", "rloo_steps", "hgpo", "salt"])
def test_credit_is_that_of_each_role_alone(method, rows):
    for row in rows:  # the score of a trajectory would be that of all its roles
        row.pop("score", None)
        row.setdefault("action", "a")
    together, alone = (compute_credit(method, as_batch(table)).advantage for table in (rows, apart(rows)))
    assert_same_credit(together, alone)


@pytest.mark.parametrize("method", ["gigpo", "grpo_steps", "rloo_steps", "marshal", "rae"])
def test_the_winner_of_a_zero_sum_game_is_praised(method):
    """By trajectory the rewards of both players would add up to 0, and nobody would learn."""
    assert np.sign(compute_credit(method, StepBatch(**GAME)).advantage).tolist() == WON


def test_a_table_by_role():
    table = StepBatch(**GAME, env_return=[7.0] * 6).by_role()
    assert table.ids["trajectory"] == [(0, "x"), (0, "y"), (1, "x"), (1, "y")]
    assert table.ids["group"] == [("g", "x"), ("g", "y")]
    assert (table.n_trajectories, table.n_groups) == (4, 2)
    assert table.score.tolist() == [1, -1, 1, -1, 1, -1]
    assert table.env_return.tolist() == [7.0] * 6
    # The game is over for the one who did not move last as well, and its success is its own.
    assert table.terminated.tolist() == [False, True, True] * 2
    assert table.success.tolist() == [True, False, True, False, True, False]
    assert not table.reward.flags.writeable


def test_the_next_state_is_the_one_in_which_the_role_moves_again():
    extra = {**GAME["extra"], "next_anchor": ["b", "a", None] * 2, "task": ["t"] * 6, "turn_limit": [9] * 6}
    table = StepBatch(**{**GAME, "extra": extra}).by_role()
    assert not {"extra.next_anchor", "extra.turn_limit"} & table.given
    assert not {"next_anchor", "turn_limit"} & table.extra.keys()
    assert table.extra["task"].tolist() == ["t x", "t y", "t x"] * 2


def test_a_role_without_an_outcome_succeeds_with_its_episode():
    extra = {**GAME["extra"], "role_outcome": [1, -1, 1, None, np.nan, None]}
    table = StepBatch(**{**GAME, "success": [False] * 3 + [True] * 3, "extra": extra}).by_role()
    assert table.success.tolist() == [True, False, True, True, True, True]


@pytest.mark.parametrize("role", [["x"] * 6, [None] * 6, [0, 0, 0, 0, 0, 0], None])
def test_one_role_changes_nothing(role):
    batch = StepBatch(**{**GAME, "extra": {} if role is None else {"role": role}})
    assert batch.by_role() is batch


def test_in_a_tree_of_calls_each_role_goes_on_after_its_own_step():
    """The step of y in between is passed over; of two samples of a request by two roles none is the other's sibling."""
    table = StepBatch(**GAME, after=[-1, 0, 1, -1, 0, 0], request=[0, 1, 2, 0, 1, 1], outcome=GAME["reward"]).by_role()
    assert table.runs.tree is not None
    assert table.runs.tree.parent.tolist() == [-1, -1, 0, -1, -1, 3]
    assert table.runs.tree.distance.tolist() == [1, 0, 0, 1, 0, 0]
    assert table.returns(0.5).tolist() == [0.5, -1.0, 1.0, -0.5, 1.0, -1.0]
