"""hdpo: the check values of the two advantages, its twins, and who has no tool advantage."""

import naive
import numpy as np
from estimator_cases import EPSILON, as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.hdpo import tool_advantages

from verl_turnkey.advantage import StepBatch, compute_credit


def credit(success, calls, group=None, trajectory=None):
    n = len(success)
    trajectory = trajectory or range(n)
    reward = [float(won) if trajectory[i] not in trajectory[i + 1 :] else 0.0 for i, won in enumerate(success)]
    return compute_credit(
        "hdpo",
        StepBatch(
            group=group or ["g"] * n,
            trajectory=trajectory,
            step=range(n),
            reward=reward,
            success=success,
            extra={"tool_calls": calls},
        ),
    )


def test_check_values():
    hdpo = credit([True, True, True, False], [0, 1, 3, 0])
    np.testing.assert_allclose(hdpo.extra["tool_advantages"], [1.0911, -0.2182, -0.8729, 0.0], atol=1e-4)
    np.testing.assert_allclose(hdpo.advantage, [0.5, 0.5, 0.5, -1.5], atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(step_rows("success"), st.randoms(use_true_random=True), st.fixed_dictionaries(EPSILON))
def test_equals_its_naive_twin(rows, random, params):
    solved = {row["trajectory"]: row["success"] for row in rows}
    rows = [{**row, "success": solved[row["trajectory"]], "tool_calls": random.randint(0, 3)} for row in rows]
    hdpo = compute_credit("hdpo", as_batch(rows), **params)
    assert_same_credit(hdpo.advantage, naive.hdpo(rows, **params))
    assert_same_credit(hdpo.extra["tool_advantages"], tool_advantages(rows, **params))


def test_calls_of_all_steps_count():
    tool_part = credit([True] * 3, [1, 2, 0], trajectory=["a", "a", "b"]).extra["tool_advantages"]
    assert tool_part[0] == tool_part[1] < 0 < tool_part[2]


def test_one_solved_trajectory_is_no_comparison():
    assert not credit([True, False, True], [0, 0, 5], group=list("aab")).extra["tool_advantages"].any()
