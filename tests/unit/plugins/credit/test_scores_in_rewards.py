"""What the scores of a process reward model are for: a column, a part of the reward, or the reward itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import estimators, make_record, make_step
from verl_turnkey.plugins.config.scorers import SCORE
from verl_turnkey.plugins.credit.estimator import CreditStep
from verl_turnkey.plugins.prm.worker import of_response, own_tokens

SPA = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "learned_check_values.json").read_text())["spa"]
REWARDS = [[0.0, 0.25, 0.75], [0.5, -0.25]]
"""of two episodes of a group, a row each with turns of two tokens and one masked token behind each"""
BETWEEN = [1, 1, 0]


def jagged(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def step_of(scored: str, method: str, shaping: float = 0.0) -> CreditStep:
    """With the contributions on record as scores, each half on both tokens of its turn; ``shaping`` of each turn."""
    records = [
        make_record([make_step(step=k, reward=r, composed_reward=r + shaping) for k, r in enumerate(of)])
        for of in REWARDS
    ]
    tokens = [[part for c in of for part in (c / 2, c / 2, 0.0)] for of in SPA["c"]]
    return CreditStep(
        params=estimators()[method].params(),
        keys=["g_0_0", "g_1_0"],
        tags=[{"seq_len": 3 * len(of)} for of in REWARDS],
        extra_fields=[{"turnkey": record} for record in records],
        response_mask=jagged([BETWEEN * len(of) for of in REWARDS], torch.int64),
        data={SCORE: jagged(tokens)},
        scored=scored,
    )


@pytest.mark.parametrize(
    ("scored", "expected"),
    [
        ("column", REWARDS),
        ("reward", [[r + c for r, c in zip(*of, strict=True)] for of in zip(REWARDS, SPA["c"], strict=True)]),
        ("redistribute", SPA["c"]),
    ],
)
def test_the_rewards_of_the_table(scored, expected):
    step = step_of(scored, "grpo_steps")
    mask = step.response_mask.to_padded_tensor(0)
    step.run("grpo_steps", torch.zeros(mask.shape), mask)
    assert step.rows is not None
    np.testing.assert_allclose(step.rows.steps.reward, np.concatenate(expected), atol=1e-6)
    np.testing.assert_allclose(step.rows.steps.score[[0, 3]], [sum(of) for of in expected], atol=1e-6)
    assert step.rows.reward_before_kl.tolist() == [*REWARDS[0], *REWARDS[1]]
    assert step.metrics["episode/composed_return/mean"] == pytest.approx(np.mean([sum(of) for of in REWARDS]))


@pytest.mark.parametrize("scored", ["column", "reward", "redistribute"])
def test_the_kl_penalty_of_a_turn_is_without_the_scores(scored):
    step = step_of(scored, "grpo_steps", shaping=2.0)
    mask = step.response_mask.to_padded_tensor(0)
    step.scores = jagged([[0.0] * 3 * len(of) for of in REWARDS])
    step.run("grpo_steps", -0.5 * mask, mask)
    assert step.rows is not None
    assert step.rows.kl is not None
    assert step.rows.kl.tolist() == [-1.0] * 5
    assert step.rows.steps.env_return.tolist() == [1.0] * 3 + [0.25] * 2  # nor KL nor shaping: it says who succeeded


def test_a_column_is_the_sum_over_the_tokens_of_a_turn():
    step = step_of("column", "step_episode")
    mask = step.response_mask.to_padded_tensor(0)
    step.run("step_episode", torch.zeros(mask.shape), mask)
    assert step.rows is not None
    np.testing.assert_allclose(step.rows.steps.extra["turn_score"], np.concatenate(SPA["c"]), atol=1e-6)


def test_which_tokens_and_which_outputs_a_number_is_of():
    rows = step_of("column", "grpo_steps").read()
    implicit, head = (own_tokens(rows.turns, kind) for kind in ("implicit", "head"))
    assert [row.tolist() for row in implicit.unbind()] == [[True, True, False] * 3, [True, True, False] * 2]
    assert [row.tolist() for row in head.unbind()] == [[False, True, False] * 3, [False, True, False] * 2]
    output, response = jagged([[0, 1, 2, 3, 4], [10, 11, 12]]), jagged([[0, 0], [0]])
    assert [row.tolist() for row in of_response(output, response, 1).unbind()] == [[2, 3], [11]]
    assert [row.tolist() for row in of_response(output, response, 0).unbind()] == [[3, 4], [12]]
