"""A teacher's log-probabilities in verl's queue: columns of steps, advantages of tokens, and the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from contract_tools import EOS, PARTITION, batch_of, put, read, row, write
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.view import join

Rows = dict[tuple[str, int], list[AgentLoopOutput]]

#: Masked tokens stand between turns and around them; the score of an episode is what its steps earn.
PLAYED: Rows = {
    ("a", 0): [row("011", [{"step": 0}]), row("10", [{"step": 1}])],
    ("a", 1): [row("0110010", [{"step": 0}, {"step": 1}])],  # merged
    ("a", 2): [row("0", "it died")],
    ("a", 3): [row("110", [{"step": 0}])],
}
REWARDS = {("a", 0): 1.0, ("a", 1): 0.0, ("a", 3): 0.0}
WITHOUT_TEXT = "a_3_0"


def gap(key: str, position: int) -> float:
    return 0.0 if key == WITHOUT_TEXT else 0.2 * ((len(key) * 3 + position + int(key[-1])) % 7 - 3)


def old(key: str, position: int) -> float:
    return -1.0 - 0.1 * position


def fill(seed: int = 3) -> KVBatchMeta:
    """The episodes in the queue, with padding and in another order."""
    for (group, session), outputs in PLAYED.items():
        for output in outputs:
            for step in output.extra_fields["turnkey"]["steps"]:
                last = output is outputs[-1] and step is output.extra_fields["turnkey"]["steps"][-1]
                step["reward"] = REWARDS[group, session] if last else 0.0
        put(group, session, outputs)
    batch = upsample_batch_to_divisible_size(batch_of(tq.kv_list(PARTITION)[PARTITION]), 7, EOS)
    batch.reorder(np.random.default_rng(seed).permutation(len(batch)).tolist())
    write(batch, "old_log_probs", old)
    return batch


def taught(value: Callable[[str, int], float] = gap) -> KVBatchMeta:
    """With what the teacher's pass writes: nested like ``old_log_probs``, and a flag per row."""
    batch = fill()
    write(batch, "teacher_log_prob", lambda key, i: old(key, i) + value(key, i))
    has = torch.tensor([key != WITHOUT_TEXT and key != "a_2_0" for key in batch.keys])
    fields = TensorDict({"has_teacher": has}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)
    return batch


@pytest.fixture
def teaching(queue, trainer) -> Callable[..., Any]:
    """A trainer with a teacher, and with means as baselines."""
    return partial(trainer, MEAN, "turnkey.teacher.source=group_success", recipe="grpo_steps")


def advantages(made: Any, batch: KVBatchMeta) -> tuple[dict[str, list[float]], dict[str, Any]]:
    metrics: dict[str, Any] = {}
    batch = made._compute_advantage(batch, metrics)
    return read(batch, "advantages"), metrics


def masks() -> dict[str, list[int]]:
    return {f"{g}_{s}_{i}": out.response_mask for (g, s), rows in PLAYED.items() for i, out in enumerate(rows)}


BASE = 2 / 3, -1 / 3
"""what grpo_steps with norm=mean gives the episode that was won, and the two that were not"""
RLSD = "turnkey.credit.modify=[{name: rlsd, decay_steps: 20}]"
MEAN = "turnkey.credit.norm=mean"


def rlsd(key: str, position: int, step: int) -> float:
    base = BASE[key.startswith(("a_1", "a_3"))]
    share = 0.5 * (1 - step / 20)
    return base * (1 + share * (min(max(np.exp(np.sign(base) * gap(key, position)), 0.8), 1.2) - 1))


@pytest.mark.parametrize("step", [1, 10, 20])
def test_each_token_has_its_own_advantage_and_the_step_of_training_counts(teaching, step):
    batch = taught()
    made = teaching(RLSD)
    made.global_steps = step
    credit, metrics = advantages(made, batch)
    for key, mask in masks().items():
        expected = [m * rlsd(key, i, step) if key != "a_2_0" else 0.0 for i, m in enumerate(mask)]
        assert credit[key] == pytest.approx(expected, abs=1e-6), key
    assert all(not any(row) for key, row in credit.items() if key not in masks())  # padding
    changes = [
        rlsd(k, i, step) - BASE[k != "a_0_0" and k != "a_0_1"] for k in masks() for i, m in enumerate(masks()[k]) if m
    ]
    assert metrics["credit/rlsd/tokens/mean"] == pytest.approx(np.mean(changes), abs=1e-6)


def test_a_rejected_token_gets_nothing(teaching):
    batch = taught()
    write(batch, "rollout_log_probs", lambda key, i: old(key, i) - (3.0 if (key, i) == ("a_0_0", 1) else 0.0))
    correction = ["rollout_rs=token_k1", "rollout_rs_threshold='0.5_2.0'"]
    keys = [f"algorithm.rollout_correction.{key}" for key in correction]
    made = teaching(RLSD, *keys)
    made.global_steps = 1
    credit, _ = advantages(made, batch)
    assert credit["a_0_0"] == pytest.approx([0.0, 0.0, rlsd("a_0_0", 2, 1)], abs=1e-6)
    assert credit["a_0_1"] == pytest.approx([rlsd("a_0_1", 0, 1), 0.0], abs=1e-6)


@pytest.mark.parametrize(
    "modifier", ["rlsd", "opid", "trial", "{name: agent_opsd, granularity: token}", "agent_opsd", "grsd"]
)
def test_a_teacher_that_says_nothing_changes_nothing(teaching, modifier):
    batch = taught(lambda key, i: 0.0)
    plain, got = (advantages(teaching(f"turnkey.credit.modify=[{m}]"), batch)[0] for m in ("", modifier))
    assert got == plain


@pytest.mark.parametrize("modifier", ["{name: opid, weight: 5}", "{name: hcapo, weight: 5}"])
def test_the_credit_apart_from_the_teacher_has_its_own_signs(teaching, modifier):
    batch = taught()
    made = teaching(f"turnkey.credit.modify=[{modifier}]")
    credit, _ = advantages(made, batch)
    apart = dict(zip(batch.keys, made.advantage_step.untaught.unbind(), strict=True))
    for key, mask in masks().items():
        base = [0.0 if key == "a_2_0" else m * BASE[key.startswith(("a_1", "a_3"))] for m in mask]
        assert apart[key].tolist() == pytest.approx(base, abs=1e-6), key
    changes = [abs(a - b) for key in apart for a, b in zip(apart[key].tolist(), credit[key], strict=True)]
    assert max(changes) > 0.5, "the modifier has to change something"


def test_without_a_modifier_that_reads_the_teacher_the_advantages_are_the_credit(teaching):
    batch = taught()
    made = teaching("+turnkey/loss=sdar")
    advantages(made, batch)
    assert made.advantage_step.untaught is None


def test_columns_of_steps_are_sums_and_means_and_nan_without_a_text(teaching):
    batch = taught()
    made = teaching("turnkey.credit.modify=[agent_opsd,grsd,hcapo]")
    made._compute_advantage(batch, {})
    steps = made.advantage_step.steps().steps
    names = [(steps.ids["trajectory"][t], int(s)) for t, s in zip(steps.trajectory, steps.step, strict=True)]
    of = {name: dict(zip(names, steps.extra[name].tolist(), strict=True)) for name in steps.extra}
    tokens = {
        ("a_0", 0): [("a_0_0", 1), ("a_0_0", 2)], ("a_0", 1): [("a_0_1", 0)],
        ("a_1", 0): [("a_1_0", 1), ("a_1_0", 2)], ("a_1", 1): [("a_1_0", 5)],
    }  # fmt: skip
    for step, places in tokens.items():
        gaps = [gap(*place) for place in places]
        assert of["teacher_gap"][step] == pytest.approx(sum(gaps), abs=1e-6)
        assert of["teacher_gap_mean"][step] == pytest.approx(np.mean(gaps), abs=1e-6)
        teacher = [old(*place) + gap(*place) for place in places]
        assert of["teacher_log_prob_mean"][step] == pytest.approx(np.mean(teacher), abs=1e-6)
    assert all(np.isnan(of[name]["a_3", 0]) for name in of)


def test_without_the_columns_the_key_is_named(teaching):
    made = teaching(RLSD)
    with pytest.raises(
        ConfigError, match=r"grpo_steps with rlsd needs 'extra.teacher_gap'.*set turnkey.teacher.source"
    ):
        made._compute_advantage(fill(), {})


def test_the_log_has_the_gap_and_the_advantage_of_each_token(teaching, tmp_path):
    batch = taught()
    made = teaching(RLSD, f"turnkey.log.trajectories={tmp_path}")
    made.global_steps = 1
    made.log.begin_step()
    made._compute_advantage(batch, {})
    assert made.log.tables.drain(120.0)
    tokens = join.read(tmp_path, "tokens").set_index(["episode", "turn"])
    assert tokens.loc[("a_1", 0)]["gap"].tolist() == pytest.approx([gap("a_1_0", 1), gap("a_1_0", 2)], abs=1e-6)
    expected = [rlsd("a_1_0", i, 1) for i in (1, 2)]
    assert tokens.loc[("a_1", 0)]["advantage"].tolist() == pytest.approx(expected, abs=1e-6)
    assert set(tokens["train_step"]) == {1}
    credit = join.read(tmp_path, "credit").set_index(["episode", "turn"])
    assert credit.loc[("a_1", 0)]["advantage"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert credit.loc[("a_1", 0)]["part.rlsd"] == pytest.approx(np.mean(expected) - BASE[1], abs=1e-6)


@pytest.mark.parametrize("name", ["sdar", "skill_sd", "sdpo_sampled"])
def test_losses_find_the_columns_beside_the_rows(queue, trainer, name):
    """They are the queue's own; a loss with weights over rows with a text gets its share of the batch."""
    batch = taught()
    made = trainer(MEAN, f"+turnkey/loss={name}", recipe="grpo_steps")
    batch = made._compute_advantage(batch, {})
    fields = set(tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION).keys())
    assert {"teacher_log_prob", "has_teacher"} <= fields
    assert not {"turnkey_teacher_log_prob", "turnkey_has_teacher"} & fields
    assert ("turnkey_weight_share" in fields) == (name == "sdpo_sampled")
    if name == "sdpo_sampled":
        share = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["turnkey_weight_share"])
        tokens = sum(sum(mask) for mask in masks().values())
        assert share["turnkey_weight_share"][0].item() == pytest.approx(tokens / (tokens - sum(masks()[WITHOUT_TEXT])))
