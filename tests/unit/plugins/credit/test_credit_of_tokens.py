"""From the tokens of a batch to its table of steps, and back: against a walk over every token of the padded rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import Credit, make_record, make_step, register_estimator
from verl_turnkey.advantage import registry as estimator_registry
from verl_turnkey.losses import Turns
from verl_turnkey.plugins.credit.estimator import CreditStep

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


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


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
        response_mask=jagged(masks),
        scores=jagged(scores) if kl_in_reward else None,
        values=jagged(values),
    )
    if not batch.steps:
        step.read(jagged(scores))
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
    turns = Turns.of(jagged([torch.tensor([0, 1, 1, 0, 1]), torch.tensor([1])]))
    assert turns.first().tolist() == [1, 4, 5]
    left = jagged([torch.tensor([0, 0, 1])])  # of two turns the first lost its tokens
    assert Turns.of(left, jagged([torch.tensor([0, -1, 1])])).first().tolist() == [3, 2]
