"""From the tokens of a batch to its table of steps, and back: against a walk over every token of the padded rows.

Then what the scores of a process reward model are for (a column, a part of the reward, or the reward itself), and the
advantages of a turn's decisions on its tokens, against a loop over the tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_tables import nested

from verl_turnkey.advantage import (
    ConfigError,
    Credit,
    StepBatch,
    compute_credit,
    estimators,
    make_record,
    make_step,
    register_estimator,
)
from verl_turnkey.advantage import registry as estimator_registry
from verl_turnkey.losses import Turns
from verl_turnkey.plugins.config.scorers import SCORE
from verl_turnkey.plugins.credit.estimator import STREAMS, CreditStep, stream_advantages
from verl_turnkey.plugins.prm.worker import of_response, own_tokens

STEPS, TRAJECTORY, EMPTY, FAILED, PADDING = "a row per step", "a row per trajectory", "no token", "failed", "padding"
PENALTY = 0.1  # in float32 none of its multiples is exact


@pytest.fixture(scope="module", autouse=True)
def echo() -> Iterator[None]:
    """Advantage: the step's reward, KL included. Return: the value before its first token."""

    @dataclass(frozen=True)
    class NoParams:
        pass

    @register_estimator("unit_echo", params=NoParams, needs=("value",))
    def unit_echo(batch: Any, params: NoParams) -> Credit:
        return Credit(batch.reward, returns=batch.value, parts={"all": batch.reward}, groups={"all": batch.group})

    yield
    del estimator_registry._ESTIMATORS["unit_echo"]


@dataclass
class Batch:
    """Rows as lists; of each step its row, its tokens and its reward."""

    keys: list[str]
    extra_fields: list[dict[str, Any]]
    tags: list[dict[str, Any]]
    masks: list[list[int]]
    steps: list[tuple[int, list[int], float]]


def draw_batch(rng: np.random.Generator, kinds: list[str]) -> Batch:
    batch = Batch([], [], [], [], [])
    for episode, kind in enumerate(kinds):
        steps = [make_step(step=t, reward=float(rng.normal())) for t in range(rng.integers(1, 4))]
        held = {STEPS: [[step] for step in steps], TRAJECTORY: [steps], EMPTY: [steps[:1]]}.get(kind, [[]])
        for index, of_row in enumerate(held):
            mask = [0] * int(rng.integers(0, 3))
            if kind == STEPS:  # gaps inside the one turn
                mask += [1, *rng.integers(0, 2, size=rng.integers(0, 4)).tolist()]
                batch.steps.append((len(batch.keys), [i for i, m in enumerate(mask) if m], of_row[0]["reward"]))
            elif kind == TRAJECTORY:
                for step in of_row:
                    tokens = int(rng.integers(1, 4))
                    batch.steps.append((len(batch.keys), [len(mask) + i for i in range(tokens)], step["reward"]))
                    mask += [1] * tokens + [0] * int(rng.integers(1, 3))
            else:
                mask += [0]
                batch.steps += [(len(batch.keys), [], step["reward"]) for step in of_row]
            batch.keys.append(f"g{episode % 2}_{episode}_{index}")
            batch.masks.append(mask)
            batch.tags.append({"seq_len": len(mask), "is_padding": kind == PADDING})
            died = {"failed": "it died"} if kind == FAILED else {}
            batch.extra_fields.append({} if kind == PADDING else {"turnkey": make_record(of_row, **died)})
    return batch


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([STEPS, TRAJECTORY, EMPTY, FAILED, PADDING]), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_each_token_carries_what_the_walk_says(kinds, seed, kl_in_reward):
    rng = np.random.default_rng(seed)
    batch = draw_batch(rng, kinds)
    masks = [torch.tensor(mask) for mask in batch.masks]
    values, scores = ([torch.from_numpy(rng.normal(size=len(mask))).float() for mask in masks] for _ in range(2))
    rewards = [
        score - PENALTY * torch.from_numpy(rng.normal(size=len(mask))).float() * mask if kl_in_reward else score
        for score, mask in zip(scores, masks, strict=True)
    ]
    left = [mask * torch.from_numpy(rng.integers(0, 2, size=len(mask))) for mask in masks]  # others were rejected
    step = CreditStep(
        params=estimator_registry.estimators()["unit_echo"].params(),
        keys=batch.keys,
        tags=batch.tags,
        extra_fields=batch.extra_fields,
        response_mask=nested(masks),
        scores=nested(scores) if kl_in_reward else None,
        values=nested(values),
    )
    if not batch.steps:
        step.read(nested(scores))
        assert len(step.rows.row) == 0
        return
    advantages, returns = step.run("unit_echo", padded(rewards), padded(left))

    assert step.credit.parts["all"].tolist() == step.rows.steps.reward.tolist()
    assert step.credit.groups["all"].tolist() == step.rows.steps.group.tolist()
    expected, targets = torch.zeros(padded(masks).shape), torch.zeros(padded(masks).shape)
    for number, (row, tokens, reward) in enumerate(batch.steps):
        total = reward
        penalty = 0.0
        for i in tokens:
            penalty += (rewards[row][i] - scores[row][i]).double().item()
        total += penalty
        value = values[row][tokens[0] if tokens else 0].item()
        assert step.rows.steps.reward[number] == total
        assert step.rows.steps.value[number] == value
        assert step.rows.steps.tokens[number] == len(tokens)  # a step without any is in the table
        assert step.rows.row[number] == row
        for i in tokens:
            expected[row, i] = float(np.float32(total)) * left[row][i]
            targets[row, i] = value * left[row][i]
    assert torch.equal(advantages, expected)
    assert torch.equal(returns, targets)
    assert advantages.dtype == torch.float32


def test_the_first_token_of_a_turn():
    turns = Turns.of(nested([[0, 1, 1, 0, 1], [1]]))
    assert turns.first().tolist() == [1, 4, 5]
    left = nested([[0, 0, 1]])  # of two turns the first lost its tokens
    assert Turns.of(left, nested([[0, -1, 1]])).first().tolist() == [3, 2]


SPA = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "learned_check_values.json").read_text())["spa"]
REWARDS = [[0.0, 0.25, 0.75], [0.5, -0.25]]
"""of two episodes of a group, a row each with turns of two tokens and one masked token behind each"""
BETWEEN = [1, 1, 0]


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
        response_mask=nested([BETWEEN * len(of) for of in REWARDS]),
        data={SCORE: nested(tokens, torch.float32)},
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
    step.scores = nested([[0.0] * 3 * len(of) for of in REWARDS])
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
    output, response = nested([[0, 1, 2, 3, 4], [10, 11, 12]]), nested([[0, 0], [0]])
    assert [row.tolist() for row in of_response(output, response, 1).unbind()] == [[2, 3], [11]]
    assert [row.tolist() for row in of_response(output, response, 0).unbind()] == [[3, 4], [12]]


def batch_of(spans, streams=tuple(STREAMS)):
    """An episode with these spans, (S, 3, 2), in the order of STREAMS; of ``streams`` alone."""
    n = len(spans)
    extra = {"switch": [1, 0] * n, "value_low": [0.5] * n, "value_high": [0.25] * n, "value_term": [0.1] * n}
    extra = {name: values[:n] for name, values in extra.items()}
    for i, stream in enumerate(streams):
        extra |= {f"from_{stream}": [s[i][0] for s in spans], f"to_{stream}": [s[i][1] for s in spans]}
    return StepBatch(group=[0] * n, trajectory=[0] * n, step=range(n), reward=[1.0] * n, extra=extra)


def naive(credit, spans, step):
    seen, result = {}, []
    for s in step:
        place = seen[s] = seen.get(s, -1) + 1
        value = 0.0
        own = (credit.extra["switch_advantages"][s], credit.extra["subgoal_advantages"][s], credit.advantage[s])
        for (first, behind), advantage in zip(spans[s], own, strict=True):
            if first <= place < behind:
                value = advantage
        result.append(value)
    return result


@pytest.mark.parametrize("seed", range(5))
def test_equals_a_loop_over_the_tokens(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(0, 12) for _ in range(6)]
    cuts = [sorted(rng.randrange(0, length + 1) for _ in range(4)) for length in lengths]
    spans = [[(a, b), (max(a, b - 1), c), (max(a, c - 1), d)] for a, b, c, d in cuts]  # neighbours share a token
    batch = batch_of(spans)
    credit = compute_credit("hae", batch, normalise=False)
    step = [s for s in rng.sample(range(6), 6) for _ in range(lengths[s])]
    got = stream_advantages(credit, batch, np.array(step, dtype=np.int64))
    np.testing.assert_allclose(got, naive(credit, spans, step))
    assert len({*credit.advantage, *credit.extra["switch_advantages"]}) > 2


def test_without_the_tokens_of_decisions_a_turn_has_one_advantage():
    spans = [[(0, 1), (1, 2), (2, 3)]] * 2
    batch = batch_of(spans)
    bare = batch_of(spans, ("switch", "subgoal"))
    step = np.array([0, 0, 1])
    assert stream_advantages(compute_credit("hae", bare), bare, step) is None
    assert stream_advantages(compute_credit("grpo_steps", batch), batch, step) is None
    credit = replace(compute_credit("hae", batch), tokens=np.zeros(3))
    with pytest.raises(ConfigError, match="drop its modifiers of tokens"):
        stream_advantages(credit, batch, step)
