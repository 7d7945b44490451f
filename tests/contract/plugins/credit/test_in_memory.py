"""The same rows in verl's queue and in the memory of verl's older trainer: the advantage step gives both the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from contract_tools import EOS, EPISODES, PARTITION, batch_of, put, read, row, write
from contract_tools import fill as fill_queue
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

from verl_turnkey.plugins.verl_api.in_memory import InMemory


def merged(mask: str, first: int, rewards: dict[str, float]) -> AgentLoopOutput:
    """A row of several turns from step ``first`` on; ``rewards`` by the state that the step began in."""
    made = row(mask, [{"step": first + t, "anchor": anchor} for t, anchor in enumerate(rewards)])
    for step, reward in zip(made.extra_fields["turnkey"]["steps"], rewards.values(), strict=True):
        step["reward"] = reward
    made.reward_score = sum(rewards.values())
    return made


#: Rows of several turns, between tokens that are not the model's; an episode of two rows; and a failed one.
MERGED = {
    0: [merged("0110010", 0, {"s": 0.5, "t": 0.5})],
    1: [merged("11011", 0, {"s": 0.0, "t": 0.25}), merged("1", 2, {"t": 0.0})],
    2: [row("0", "it died")],
}
TOKENS = ("response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values")


def of_token(key: str, position: int) -> float:
    """Any number; the same for a token in both places."""
    return -1.0 - 0.1 * ((sum(map(ord, key)) + position) % 7)


def fill() -> KVBatchMeta:
    """Failed episodes, a row per turn and merged rows, filled up with verl's padding, in another order."""
    fill_queue(EPISODES)
    for session, outputs in MERGED.items():
        put("c", session, outputs)
    batch = upsample_batch_to_divisible_size(batch_of(tq.kv_list(PARTITION)[PARTITION]), 8, EOS)
    batch.reorder(np.random.default_rng(3).permutation(len(batch)).tolist())
    for n, name in enumerate(("old_log_probs", "ref_log_prob", "values", "teacher_log_prob")):
        write(batch, name, lambda key, position, n=n: of_token(key, position + n))
    has = torch.tensor([key.startswith("c") for key in batch.keys])
    fields = TensorDict({"has_teacher": has}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)
    return batch


def older_batch(batch: KVBatchMeta) -> DataProto:
    """The rows as ``RayPPOTrainer`` holds them, padded further than the longest."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    lengths = data["response_mask"].offsets().diff()
    size = (len(batch), int(lengths.max()) + 2)
    columns = {name: data[name].to_padded_tensor(0, output_size=size) for name in (*TOKENS, "teacher_log_prob")}
    response = (torch.arange(size[1]) < lengths[:, None]).long()
    columns["attention_mask"] = torch.cat([torch.ones(len(batch), 4, dtype=torch.long), response], 1)
    columns["has_teacher"] = data["has_teacher"]
    objects = np.empty(len(batch), dtype=object)
    objects[:] = data.pop("extra_fields").tolist()
    uid = np.array([key.split("_")[0] for key in batch.keys], dtype=object)
    return DataProto.from_dict(tensors=columns, non_tensors={"extra_fields": objects, "uid": uid})


def older_step(made: Any, data: DataProto, metrics: dict[str, Any]) -> None:
    """What ``RayPPOTrainer.fit`` does between the log-probabilities and the updates."""
    algorithm = made.config.algorithm
    data.batch["token_level_scores"] = data.batch["token_level_rewards"] = data.batch["rm_scores"]
    if algorithm.use_kl_in_reward:
        data, kl = ray_trainer.apply_kl_penalty(data, made.kl_ctrl_in_reward, algorithm.kl_penalty)
        metrics.update(kl)
    if algorithm.rollout_correction.rollout_rs:
        data, correction = compute_rollout_correction_and_add_to_batch(data, algorithm.rollout_correction)
        metrics.update(correction)
    ray_trainer.compute_advantage(
        data,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=made.config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )


def lists(column: torch.Tensor) -> list[Any]:
    return [row.tolist() for row in column.unbind()]


RLSD = "turnkey.credit.modify=[{name: rlsd, decay_steps: 20}]"
REJECTION = [
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.8_1.3'",
]
RUNS = {
    "steps": ["gigpo"],
    "tokens of a teacher": ["grpo_steps", "turnkey.credit.norm=mean", RLSD, "turnkey.teacher.source=group_success"],
    "critic": ["turn_gae"],
    "kl": ["gigpo", "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=kl"],
    "rejection": ["gigpo", *REJECTION],
    "columns of a loss": ["gigpo", "+turnkey/loss=segment_mask", "turnkey.update.weight_by=episode"],
}


@pytest.mark.parametrize("run", RUNS)
def test_both_give_the_same_columns_and_metrics(queue, trainer, run):
    recipe, *overrides = RUNS[run]
    batch, of_queue, of_memory = fill(), {}, {}
    before = set(tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION).keys())
    data = older_batch(batch)
    tokens = data.batch["response_mask"].clone()
    in_queue = trainer(*overrides, recipe=recipe)
    written = set(in_queue._compute_advantage(batch, of_queue).fields) - before | {"response_mask"}
    made = trainer(*overrides, recipe=recipe)
    rows = InMemory(data, batch.keys, batch.tags, made.advantage_step.fields())
    made.advantage_step.of_rows(rows, of_memory, lambda: older_step(made, data, of_memory))

    assert {"advantages", "returns"} <= written <= {*rows.written}
    for name in written:
        for key, ours, theirs in zip(batch.keys, lists(rows.written[name]), read(batch, name).values(), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6), (name, key)
    credit = {name: value for name, value in of_queue.items() if name.startswith(("credit/", "episode/"))}
    assert credit.keys() - of_memory.keys() == {"episode/missing"}, "which the trainer counts in verl's replay buffer"
    del credit["episode/missing"]
    assert {name: of_memory[name] for name in credit} == pytest.approx(credit, nan_ok=True)
    assert made.advantage_step.real_rows == in_queue.advantage_step.real_rows == 13

    advantages = read(batch, "advantages")
    rejected = sum(map(sum, read(batch, "response_mask").values())) < int(tokens.sum())
    assert rejected == (run == "rejection")
    assert not any(advantages["a_0_0"] + advantages["c_2_0"]), "failed"
    assert any(advantages["c_0_0"]), "merged"
    padded = rows.put().batch["advantages"]
    assert padded.shape == data.batch["response_mask"].shape
    assert [row[: len(advantages[key])].tolist() for key, row in zip(batch.keys, padded, strict=True)] == [
        pytest.approx(advantages[key], abs=1e-6) for key in batch.keys
    ]
    assert sum(row[len(advantages[key]) :].abs().sum() for key, row in zip(batch.keys, padded, strict=True)) == 0
