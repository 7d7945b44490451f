"""Updates in phases on a real TransferQueue: which rows, in which order, with which columns, against plain loops.

The workers are a stand-in with one number as its policy: every token's log-probability is that number times the
token's place, and each update adds to it what it was asked to.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
from contract_tools import EOS, EPISODES, PARTITION, advance, batch_of, fill, put, read, row
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.actor import loss_inputs
from verl_turnkey.plugins.trainer.worker_setup import WorkerCalls

MOVE = 0.03


class Policy:
    """Stands in the place of the actor's worker group."""

    def __init__(self) -> None:
        self.version = 0
        self.updates: list[dict[str, Any]] = []
        self.forwards: list[list[str]] = []

    def log_prob(self, key: str, place: int, version: int) -> float:
        sign = 1 if key[2] in "12" else -1  # episodes 1 and 2 of a group become likelier, the others less likely
        return -1.0 + sign * MOVE * version * (1 + place)

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        self.forwards.append(list(batch.keys))
        mask = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["input_ids", "response_mask"])
        rows = []
        for key, ids, response in zip(
            batch.keys, mask["input_ids"].unbind(), mask["response_mask"].unbind(), strict=True
        ):
            n = len(response)
            answer = [self.log_prob(key, i, self.version) for i in range(n)]
            # verl's engines give a number per input token, that of the next one.
            rows.append(torch.tensor([0.0] * (len(ids) - n - 1) + answer + [0.0]))
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields = TensorDict({"log_probs": nested}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)
        return batch

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        self.updates.append({"keys": list(batch.keys), "info": dict(batch.extra_info), "fields": set(batch.fields)})
        for name in ("advantages", "old_log_probs", "turnkey_group_log_ratio"):
            if name in batch.fields:
                self.updates[-1][name] = dict(
                    zip(batch.keys, [row.tolist() for row in column(batch, name)], strict=True)
                )
        self.version += 1
        return {"metrics": {"mfu": 0.0, "pg_clipfrac": [float(self.version)]}}


def column(batch: KVBatchMeta, name: str) -> list[torch.Tensor]:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[name])
    return list(data[name].unbind())


def ready(made: Any, ranks: int = 1) -> tuple[KVBatchMeta, Policy]:
    """A batch with advantages, before the actor's update."""
    batch = fill(EPISODES)
    batch.extra_info["temperature"] = 1.0
    if ranks > 1:
        batch = upsample_batch_to_divisible_size(batch, len(batch) + ranks + (-len(batch) % ranks), EOS)
    batch = advance(made, batch)
    policy = Policy()
    made.batching.ranks = ranks
    made.actor_rollout_wg = WorkerCalls(policy, made.actor_update.before_call)
    return batch, policy


def real(keys: list[str]) -> list[str]:
    return sorted(key for key in keys if not key.startswith("pad"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("old_policy", ["turn", "iteration"])
def test_turns_go_from_the_last_to_the_first_weighed_by_what_later_ones_did(queue, trainer, old_policy, ranks):
    made = trainer(f"turnkey.update.old_policy={old_policy}", recipe="seeupo")
    batch, policy = ready(made, ranks)
    before = read(batch, "advantages")
    metrics: dict[str, Any] = {}
    made._update_actor(batch, metrics)

    assert [real(update["keys"]) for update in policy.updates] == [
        ["a_1_2"],
        ["a_1_1", "a_2_1", "b_0_1", "b_1_1"],
        ["a_1_0", "a_2_0", "a_3_0", "b_0_0", "b_1_0"],
    ]
    assert all(len(update["keys"]) % ranks == 0 for update in policy.updates)
    ratio = dict.fromkeys(["a_1", "a_2", "a_3", "b_0", "b_1"], 1.0)
    for version, update in enumerate(policy.updates):
        keys = real(update["keys"])
        assert update["info"]["global_batch_size"] == len(keys)
        assert update["info"]["num_mini_batch"] == 1
        for key in keys:
            expected = [value * ratio[key[:3]] for value in before[key]]
            assert update["advantages"][key] == pytest.approx(expected, abs=1e-6)
            old = version if old_policy == "turn" else 0
            if old_policy == "turn":
                expected = [policy.log_prob(key, i, old) for i in range(len(before[key]))]
                assert update["old_log_probs"][key] == pytest.approx(expected, abs=1e-6)
            else:
                assert update["old_log_probs"][key] == [-1.0] * len(before[key])
            tokens = range(len(before[key]))
            gaps = [policy.log_prob(key, i, version + 1) - policy.log_prob(key, i, old) for i in tokens]
            of_turn = min(max(math.exp(sum(gaps) / len(gaps)), 0.8), 1.2)
            ratio[key[:3]] = min(max(ratio[key[:3]] * of_turn, 0.8), 1.2)
    assert any(abs(value - 1) > 0.02 for value in ratio.values())
    assert metrics["actor/phases"] == 3
    # verl's metrics of the three updates, each by its rows
    assert metrics["actor/pg_clipfrac"] == pytest.approx((1 * 1 + 2 * 4 + 3 * 5) / 10)


def test_the_last_turn_needs_no_forward_pass_before_it_and_the_first_none_after(queue, trainer):
    made = trainer(recipe="seeupo")
    batch, policy = ready(made)
    made._update_actor(batch, {})
    assert [real(keys)[0][-1] for keys in policy.forwards] == ["2", "1", "1", "0"]


LATER = [  # updates whose old log-probabilities are not those of the policy as it is
    pytest.param(["algorithm.rollout_correction.bypass_mode=true"], 0, id="bypass"),
    pytest.param([], 1, id="second update of separate_async"),
]


@pytest.mark.parametrize(("overrides", "update"), LATER)
def test_the_last_turn_starts_from_the_policy_as_it_is(queue, trainer, overrides, update):
    made = trainer(*overrides, recipe="seeupo")
    batch, policy = ready(made)
    made.local_trigger_step, policy.version = update, 2
    made._update_actor(batch, {})
    assert [real(keys)[0][-1] for keys in policy.forwards] == ["2", "2", "1", "1", "0"]
    for key, old in policy.updates[0]["old_log_probs"].items():
        assert old == pytest.approx([policy.log_prob(key, i, 2) for i in range(len(old))])


@pytest.mark.parametrize(("overrides", "update"), LATER)
def test_rebels_first_step_knows_how_far_the_policy_has_moved(queue, trainer, overrides, update):
    made = trainer("+turnkey/loss=rebel", *overrides, recipe="grpo_steps")
    batch, policy = ready(made)
    made.local_trigger_step, policy.version = update, 2
    made._update_actor(batch, {})
    check_group_log_ratios(batch, policy, policy.updates[0], version=2)


def test_ranks_without_padding_rows_get_some(queue, trainer):
    made = trainer(recipe="seeupo")
    made.tokenizer = SimpleNamespace(eos_token_id=EOS)
    made.actor_rollout_wg = type("Group", (), {"_dispatch_info": {"actor": [0, 1]}})()
    everything = fill(EPISODES)
    batch = batch_of(dict(zip(everything.keys[:10], everything.tags[:10], strict=True)))  # nothing to fill up
    balanced = made._balance_batch(batch, metrics={})
    assert sum(bool(tag.get("is_padding")) for tag in balanced.tags) == 2
    assert len(balanced) == 12


def test_rows_with_several_turns_cannot_go_in_reverse(queue, trainer):
    made = trainer(recipe="seeupo")
    batch, _ = ready(made)
    made.advantage_step.table.turn[:] = 1
    with pytest.raises(ConfigError, match="needs a row per turn"):
        made._update_actor(batch, {})


def test_a_critics_mini_batches_still_fit(queue, trainer):
    made = trainer("critic.enable=true", "critic.ppo_mini_batch_size=1", recipe="seeupo")
    made.tokenizer = SimpleNamespace(eos_token_id=EOS)
    made.actor_rollout_wg = type("Group", (), {"_dispatch_info": {"actor": [0, 1]}})()
    everything = fill(EPISODES)
    batch = batch_of(dict(zip(everything.keys[:8], everything.tags[:8], strict=True)))
    assert len(made._balance_batch(batch, metrics={})) % (2 * 4) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_rebel_carries_the_log_ratios_of_its_groups(queue, trainer, ranks):
    made = trainer("+turnkey/loss=rebel", "actor_rollout_ref.actor.ppo_epochs=2", recipe="grpo_steps")
    batch, policy = ready(made, ranks)
    rewards, means = read_rows(batch, "turnkey_rewards"), read_rows(batch, "turnkey_group_reward")
    assert (rewards["a_1_0"], rewards["a_3_0"], rewards["b_0_1"]) == (1.0, 0.0, 0.5)
    assert means["a_2_1"] == pytest.approx(1.25 / 3)
    assert means["b_1_0"] == pytest.approx(0.25)
    made._update_actor(batch, {})
    # two mini-batches of whole groups, twice
    assert [{key[0] for key in real(update["keys"])} for update in policy.updates] == [{"a"}, {"b"}] * 2
    assert all(update["info"]["epochs"] == 1 for update in policy.updates)
    for version, update in enumerate(policy.updates):
        check_group_log_ratios(batch, policy, update, version)


def check_group_log_ratios(batch: KVBatchMeta, policy: Policy, update: dict[str, Any], version: int) -> None:
    """The mean of the group less the trajectory's other rows, when the policy is at ``version``."""
    lengths = {key: len(row) for key, row in read(batch, "advantages").items()}
    keys = real(update["keys"])
    own = {key: sum(policy.log_prob(key, i, version) + 1.0 for i in range(lengths[key])) for key in keys}
    whole: dict[str, float] = {}
    for key in keys:
        whole[key[:3]] = whole.get(key[:3], 0.0) + own[key]
    mean = sum(whole.values()) / len(whole)
    for key in keys:
        assert update["turnkey_group_log_ratio"][key] == pytest.approx(mean - (whole[key[:3]] - own[key]), abs=1e-5)


def read_rows(batch: KVBatchMeta, name: str) -> dict[str, float]:
    return dict(zip(batch.keys, [row.item() for row in column(batch, name)], strict=True))


def test_staleness_counts_weight_versions(queue, trainer):
    made = trainer("+turnkey/loss=a3po", recipe="grpo_steps")
    made.global_steps = 4
    batch = advance(made, fill(EPISODES))  # whose rows were generated at version 1; step 4 begins with version 3
    assert set(read_rows(batch, "turnkey_staleness").values()) == {2.0}
    # A row that was generated across versions counts by its newest.
    across = [{"min_global_steps": 0, "max_global_steps": 3}, {"min_global_steps": 1, "max_global_steps": 2}]
    made_of = loss_inputs.Batch(made.advantage_step.steps, {}, across, 4, torch.ones(2, 1), rejects=False)
    assert loss_inputs.staleness(made_of).tolist() == [0.0, 1.0]


def nested_mask(batch: KVBatchMeta) -> torch.Tensor:
    return tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["response_mask"])["response_mask"]


def several_turns(versions: list[list[int | None]]) -> KVBatchMeta:
    """A row for each list, with a turn for each version and two masked tokens behind it; the rows themselves say 1."""
    for session, of_row in enumerate(versions):
        steps = [{"step": t, "reward": float(session), "version": v} for t, v in enumerate(of_row)]
        put("a", session, [row("1100" * len(steps), steps, 1.0)])
    return batch_of(tq.kv_list(PARTITION)[PARTITION])


def test_staleness_of_a_turn_is_that_of_its_own_weights(queue, trainer):
    made = trainer("+turnkey/loss=a3po", recipe="grpo_steps")
    made.global_steps = 4
    batch = advance(made, several_turns([[0, 3, None], [2]]))
    staleness = read(batch, "turnkey_staleness")
    mask = [1, 1, 0, 0]
    assert staleness["a_0_0"] == [3.0 * m for m in mask] + [0.0] * 4 + [
        2.0 * m for m in mask
    ]  # which says none: the row's
    assert staleness["a_1_0"] == [1.0 * m for m in mask]
    # One number per row, for a loss that takes no other.
    per_row = dataclasses.replace(made.advantage_step.loss, per_row=True)
    made_of = loss_inputs.Batch(made.advantage_step.steps, {}, batch.tags, 4, nested_mask(batch), rejects=False)
    assert loss_inputs.columns(per_row, made_of)["turnkey_staleness"].tolist() == [2.0, 2.0]


def test_records_without_versions_leave_the_staleness_to_the_rows(queue, trainer):
    made = trainer("+turnkey/loss=a3po", recipe="grpo_steps")
    made.global_steps = 4
    batch = advance(made, several_turns([[None, None], [None]]))
    assert set(read_rows(batch, "turnkey_staleness").values()) == {2.0}


def test_a_gap_in_the_only_turn_of_a_row_keeps_its_staleness(queue, trainer):
    made = trainer("+turnkey/loss=a3po", recipe="grpo_steps")
    made.global_steps = 4
    put("a", 0, [row("101", [{"step": 0, "reward": 1.0, "version": 2}], 1.0)])
    batch = advance(made, batch_of(tq.kv_list(PARTITION)[PARTITION]))
    assert read(batch, "turnkey_staleness")["a_0_0"] == [1.0, 0.0, 1.0]
