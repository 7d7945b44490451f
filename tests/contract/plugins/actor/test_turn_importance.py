"""``turnkey.update.importance`` through verl's advantage step on a real queue, and in verl's own loss functions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import transfer_queue as tq
from contract_tools import EOS, PARTITION, advance, batch_of, output, put, read
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from verl_turnkey.advantage import ConfigError, make_record, make_step

ROLLOUT = -1.0  # of each token, as contract_tools.output has it
#: By row, the old policy's log-probability minus the rollout's of each token; None: an observation.
RATIOS: dict[str, list[float | None]] = {
    "a_0_0": [0.9, 0.9, None, -0.1, -0.1],
    "a_1_0": [0.3, None, -0.4],
    "a_2_0": [None],  # it failed
    "b_0_0": [0.1],
    "b_1_0": [-0.2, None, 0.0, 0.2],
}


def rows() -> Any:
    """A batch with rows of several turns, a failed one and a row of padding."""
    for key, ratios in RATIOS.items():
        group, session, _ = key.split("_")
        mask = [int(r is not None) for r in ratios]
        turns = sum(m and not before for m, before in zip(mask, [0, *mask], strict=False))
        steps = [make_step(step=t, reward=float(t == 0 and session == "0"), anchor="s") for t in range(turns)]
        record = make_record(steps) if turns else make_record([], failed="Boom: it died")
        made = output(record, len(mask), 0.0)
        made.response_mask[:] = mask
        put(group, int(session), [made])
    return upsample_batch_to_divisible_size(batch_of(tq.kv_list(PARTITION)[PARTITION]), 6, EOS)


def old(key: str, position: int) -> float:
    ratio = RATIOS.get(key, [None])[position]
    return ROLLOUT + (5.0 if ratio is None else ratio)  # whatever stands on observations


def by_turn(key: str, *weights: float) -> list[float]:
    column, turn, inside = [], -1, False
    for ratio in RATIOS[key]:
        turn += ratio is not None and not inside
        inside = ratio is not None
        column.append(weights[turn] if inside else 0.0)
    return column


def check(batch: Any, name: str, expected: dict[str, list[float]]) -> None:
    column = read(batch, name)
    for key, tokens in column.items():
        assert tokens == pytest.approx(expected.get(key, [0.0] * len(tokens)), abs=1e-6), key


TURN_WEIGHTS = {
    "a_0_0": by_turn("a_0_0", 3.0, math.exp(-0.2)),
    "a_1_0": by_turn("a_1_0", math.exp(0.3), math.exp(-0.4)),
    "b_0_0": by_turn("b_0_0", math.exp(0.1)),
    "b_1_0": by_turn("b_1_0", math.exp(-0.2), math.exp(0.2)),
}


@pytest.mark.parametrize("estimator", ["gigpo", "grpo"])
def test_each_turn_of_a_row_has_its_own_weight(queue, trainer, estimator):
    own = ["algorithm.adv_estimator=grpo"] if estimator == "grpo" else []
    made = trainer(
        "turnkey.update.importance=turn", "turnkey.update.importance_high=3", *own, recipe="base" if own else "gigpo"
    )
    metrics: dict[str, Any] = {}
    batch = advance(made, rows(), metrics, old)
    check(batch, "rollout_is_weights", TURN_WEIGHTS)
    check(batch, "response_mask", {key: [float(r is not None) for r in ratios] for key, ratios in RATIOS.items()})
    raw = [math.exp(x) for x in (1.8, -0.2, 0.3, -0.4, 0.1, -0.2, 0.2)]
    used = [min(w, 3.0) for w in raw]
    assert metrics["importance/weight/mean"] == pytest.approx(sum(used) / 7)
    assert metrics["importance/weight/max"] == 3.0
    assert metrics["importance/weight/min"] == pytest.approx(math.exp(-0.4))
    assert metrics["importance/outside"] == pytest.approx(1 / 7)
    assert metrics["importance/outside_tokens"] == pytest.approx(2 / 10)
    assert metrics["importance/effective"] == pytest.approx(sum(used) ** 2 / 7 / sum(w * w for w in used))


def test_per_row_the_weights_are_verls(queue, trainer):
    """And per token: the same columns as ``rollout_is`` writes."""
    for level in ("sequence", "token"):
        verls = advance(trainer(f"algorithm.rollout_correction.rollout_is={level}"), rows(), {}, old)
        theirs = read(verls, "rollout_is_weights")
        tq.kv_clear(keys=list(tq.kv_list(PARTITION)[PARTITION]), partition_id=PARTITION)
        ours = read(advance(trainer(f"turnkey.update.importance={level}"), rows(), {}, old), "rollout_is_weights")
        tq.kv_clear(keys=list(tq.kv_list(PARTITION)[PARTITION]), partition_id=PARTITION)
        assert any(w > 1.5 for w in theirs["a_0_0"])
        for key in RATIOS:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6), (level, key)


OUTSIDE = ["turnkey.update.importance=turn", "turnkey.update.importance_high=3", "turnkey.update.importance_low=0.7"]


@pytest.mark.parametrize("outside", ["zero_weight", "clear_mask"])
def test_turns_outside_the_bounds(queue, trainer, outside):
    """The first turn of a row and the second of another: zero_weight keeps them in the mask, clear_mask does not."""
    made = trainer(*OUTSIDE, f"turnkey.update.importance_outside={outside}", "turnkey.update.weight_by=step")
    batch = advance(made, rows(), {}, old)
    expected = TURN_WEIGHTS | {
        "a_0_0": by_turn("a_0_0", 0.0, math.exp(-0.2)),
        "a_1_0": by_turn("a_1_0", math.exp(0.3), 0.0),
    }
    check(batch, "rollout_is_weights", expected)
    mask = {key: [float(r is not None) for r in ratios] for key, ratios in RATIOS.items()}
    steps = 7
    if outside == "clear_mask":
        mask |= {"a_0_0": by_turn("a_0_0", 0.0, 1.0), "a_1_0": by_turn("a_1_0", 1.0, 0.0)}
        steps = 5
    check(batch, "response_mask", mask)
    check(batch, "loss_mask", mask)
    of_steps = {key: [m / steps / max(1, len([x for x in v if x])) for m in v] for key, v in mask.items()}
    of_steps["b_1_0"] = by_turn("b_1_0", 1 / steps, 1 / steps / 2)
    if outside == "zero_weight":
        of_steps["a_0_0"] = by_turn("a_0_0", 1 / steps / 2, 1 / steps / 2)
        of_steps["a_1_0"] = by_turn("a_1_0", 1 / steps, 1 / steps)
    check(batch, "turnkey_weight", of_steps)


def test_verls_rejection_and_ours_both_apply(queue, trainer):
    """A token that verl rejected stays rejected, its ratio still counts for its turn."""
    verls = ["rollout_rs=token_k1", "rollout_rs_threshold=2"]
    rejection = [f"algorithm.rollout_correction.{setting}" for setting in verls]
    batch = advance(trainer(*OUTSIDE, *rejection, "turnkey.update.importance_outside=clear_mask"), rows(), {}, old)
    check(batch, "response_mask", {
        "a_0_0": [0, 0, 0, 1, 1], "a_1_0": [1, 0, 0], "b_0_0": [1], "b_1_0": [1, 0, 1, 1],
    })  # fmt: skip
    check(batch, "rollout_is_weights", {k: v for k, v in TURN_WEIGHTS.items() if k[0] == "b"} | {
        "a_0_0": by_turn("a_0_0", 0.0, math.exp(-0.2)), "a_1_0": by_turn("a_1_0", math.exp(0.3), 0.0),
    })  # fmt: skip


def test_rows_without_log_probabilities_are_an_error(queue, trainer):
    for session in range(2):
        made = output(make_record([make_step(step=0, reward=1.0, anchor="s")]), 2, 1.0)
        made.response_logprobs = None
        put("a", session, [made])
    batch = batch_of(tq.kv_list(PARTITION)[PARTITION])
    with pytest.raises(ConfigError, match=r"turnkey\.update\.importance=turn .* no rollout_log_probs"):
        advance(trainer("turnkey.update.importance=turn"), batch)


def gradient(batch: Any) -> dict[str, list[float]]:
    """Of verl's actor loss with respect to each response token's log-probability, at old = current."""
    names = ["prompts", "responses", "response_mask", "loss_mask", "old_log_probs", "advantages"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[*names, "rollout_is_weights"])
    tokens = int(data["loss_mask"].values().sum())
    extra = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": len(batch)}
    data = tu.get_tensordict(tensor_dict=dict(data.items()), non_tensor_dict=extra)
    lengths = [(len(p), len(r)) for p, r in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)]
    leaves = [row.clone().requires_grad_() for row in data["old_log_probs"].unbind()]
    zero = torch.zeros(1)
    # verl shifts by one: the output at a position is about the next token.
    flat = [torch.cat([zero.expand(p - 1), leaf, zero]) for (p, _), leaf in zip(lengths, leaves, strict=True)]
    offsets = torch.tensor([0, *(p + r for p, r in lengths)]).cumsum(0)
    log_probs = torch.nested.nested_tensor_from_jagged(torch.cat(flat), offsets)
    actor = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(loss_mode="vanilla")
    )
    loss, _ = partial(ppo_loss, config=actor)(model_output={"log_probs": log_probs}, data=data)
    loss.backward()
    return {key: leaf.grad.tolist() for key, leaf in zip(batch.keys, leaves, strict=True)}


@pytest.mark.parametrize("outside", ["truncate", "zero_weight", "clear_mask"])
def test_verls_loss_multiplies_and_divides_by_the_tokens_that_count(queue, trainer, outside):
    low = [] if outside == "truncate" else OUTSIDE[2:]
    made = trainer(*OUTSIDE[:2], *low, f"turnkey.update.importance_outside={outside}")
    batch = advance(made, rows(), {}, old)
    weights, advantages = read(batch, "rollout_is_weights"), read(batch, "advantages")
    tokens = 7 if outside == "clear_mask" else 10
    assert sum(map(sum, read(batch, "loss_mask").values())) == tokens
    expected = {key: [-w * a / tokens for w, a in zip(weights[key], advantages[key], strict=True)] for key in weights}
    assert max(abs(g) for row in expected.values() for g in row) > 0.01
    for key, row in gradient(batch).items():
        assert row == pytest.approx(expected[key], abs=1e-6), key
