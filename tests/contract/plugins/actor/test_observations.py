"""``turnkey.update.observation_coefficient`` under verl's own policy loss: which tokens, which mean, which gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_tools import nested
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from verl_turnkey.plugins.actor.loss_inputs import _with_observations, observation_columns
from verl_turnkey.plugins.actor.weighing import MINI_BATCHES
from verl_turnkey.plugins.credit.metrics import LEARNED
from verl_turnkey.plugins.credit.rows import OBSERVED

ORACLE = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "teacher_check_values.json").read_text())["echo"]
PROMPT = 2
# Of each row the mask of its response, and of each turn what was observed before it, from the turn's first token.
ROWS: list[tuple[list[int], list[list[tuple[int, int]]]]] = [
    ([1, 1, 0, 0, 0, 0, 1, 0, 0, 1], [[(-2, -1)], [(-3, -1)], [(-2, 0)]]),
    ([1, 0, 0, 0, 0, 0, 1], [[], [(-5, -4), (-3, -1)]]),
    ([1, 1], [[(-1, 0)]]),
    ([0], []),
]
MARKED = [[0, 0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 1, 0, 0], [0, 0], [0]]


def written(rows: list[tuple[list[int], list[Any]]], *, padding: int | None = None) -> tuple[torch.Tensor, float]:
    fields = [{OBSERVED: turns} if turns else {} for _, turns in rows]
    tags = [{"is_padding": row == padding} for row in range(len(rows))]
    column, metrics = observation_columns(0.05, fields, tags, nested([mask for mask, _ in rows], torch.long))
    return column[LEARNED], metrics["rows/observation_tokens"]


def test_each_token_of_an_observation_has_the_same_share():
    column, number = written(ROWS)
    assert number == 7
    assert [(row * 7).round().int().tolist() for row in column.unbind()] == MARKED


def test_what_is_not_of_an_episode_has_no_share():
    column, number = written(ROWS, padding=1)
    assert number == 4
    assert not column.unbind()[1].any()
    rejected = ([1, 0, 0, 1, 0, 1], ROWS[1][1])  # a row of another number of turns than were played
    assert written([rejected])[1] == 0


def test_no_column_without_a_coefficient():
    assert observation_columns(0.0, [{}], [{}], nested([[1]], torch.long)) == ({}, {})


def batch(rows: list[int], column: torch.Tensor, mini_batches: int = 1, dp_size: int = 1) -> TensorDict:
    """A micro-batch of ``rows`` as verl's engine hands it to a loss."""
    masks = [ROWS[row][0] for row in rows]
    tensors = {
        "prompts": nested([[5] * PROMPT for _ in rows], torch.long),
        "responses": nested([[7] * len(mask) for mask in masks], torch.long),
        "response_mask": nested(masks, torch.long),
        "old_log_probs": nested([[-1.0] * len(mask) for mask in masks]),
        "advantages": nested([[0.5] * len(mask) for mask in masks]),
        LEARNED: nested([column.unbind()[row] for row in rows]),
    }
    total = sum(sum(mask) for mask, _ in ROWS)
    others = {"dp_size": dp_size, "batch_num_tokens": total, "global_batch_size": 4, MINI_BATCHES: mini_batches}
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=others)


LEAVES = [torch.linspace(-3, -0.1, len(mask)) for mask, _ in ROWS]


def outputs(rows: list[int], leaves: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the model says of all tokens: verl's outputs are about the next one."""
    whole = [torch.cat([torch.zeros(PROMPT - 1), leaves[row], torch.zeros(1)]) for row in rows]
    lengths = torch.tensor([0] + [len(row) for row in whole])
    return {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(whole), lengths.cumsum(0))}


def gradients(parts: list[list[int]], coefficient: float, **settings: int) -> tuple[list[torch.Tensor], float]:
    """The gradient of verl's loss with the term, over micro-batches, and the sum of the metric."""
    column, _ = written(ROWS)
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    leaves = [leaf.clone().requires_grad_() for leaf in LEAVES]
    total = 0.0

    def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
        return ppo_loss(config, model_output, data, dp_group)

    for rows in parts:
        value, metrics = _with_observations(
            loss, coefficient, model_output=outputs(rows, leaves), data=batch(rows, column, **settings)
        )
        value.backward()
        total += metrics["actor/observation_loss"].aggregate()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves], float(total)


def test_the_gradient_is_that_of_the_mean_cross_entropy_beside_verls():
    plain, _ = gradients([[0, 1, 2, 3]], 0.0)
    both, value = gradients([[0, 1, 2, 3]], 0.05)
    marked = [torch.tensor(row) for row in MARKED]
    for with_term, without, mask in zip(both, plain, marked, strict=True):
        torch.testing.assert_close(with_term - without, -0.05 * mask / 7)
    mean = -sum((leaf * mask).sum() for leaf, mask in zip(LEAVES, marked, strict=True)) / 7
    assert value == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.parametrize("parts", [[[0], [1], [2, 3]], [[3, 1], [0, 2]]])
def test_micro_batches_do_not_matter(parts: list[list[int]]):
    whole, value = gradients([[0, 1, 2, 3]], 0.05)
    split, sum_of_parts = gradients(parts, 0.05)
    for ours, theirs in zip(split, whole, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sum_of_parts == pytest.approx(value)


def test_a_mini_batch_counts_as_the_batch_and_ranks_are_averaged():
    """Half of the batch in each of two mini-batches, or on each of two ranks: the term of a half is doubled."""
    _, value = gradients([[0]], 0.05)
    for settings in ({"mini_batches": 2}, {"dp_size": 2}):
        assert gradients([[0]], 0.05, **settings)[1] == pytest.approx(2 * value)


def test_the_value_on_record():
    column, _ = observation_columns(0.05, [{OBSERVED: [[], [(-3, 0)]]}], [{}], nested([[1, 0, 0, 0, 1]], torch.long))
    log_probs = torch.tensor([0.0, -9, -2, -1, -0.5, float("nan"), 0])
    data = tu.get_tensordict(
        tensor_dict={
            "prompts": nested([[5] * PROMPT], torch.long),
            "responses": nested([[7] * 5], torch.long),
            LEARNED: column[LEARNED],
        },
        non_tensor_dict={"dp_size": 1, MINI_BATCHES: 1},
    )
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(log_probs, torch.tensor([0, 7]))}
    inner = lambda **_: (torch.zeros(()), {})  # noqa: E731
    loss, metrics = _with_observations(inner, 0.05, model_output=output, data=data)
    assert metrics["actor/observation_loss"].aggregate() == pytest.approx(ORACLE["mean_ce"], abs=1e-6)
    assert loss.item() == pytest.approx(ORACLE["times_lambda"], abs=1e-6)
