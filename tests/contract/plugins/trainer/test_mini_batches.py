"""Which rows each optimizer step sees, through verl's own balancing on a real TransferQueue."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
from contract_tools import PARTITION, advance, fill
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_turnkey.plugins.trainer.worker_setup import WorkerCalls

EOS = 2
WON = [{"reward": 0.0, "anchor": "s"}, {"reward": 1.0, "anchor": "t"}]
LOST = [{"reward": 0.0, "anchor": f"s{t}"} for t in range(6)]


class Workers:
    """Stands in the place of the worker groups: keeps what each call got, and answers in the queue."""

    def __init__(self, ranks: int) -> None:
        self._dispatch_info = {"actor": list(range(ranks))}
        self.calls: dict[str, dict[str, Any]] = {}
        self.futures: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(batch: KVBatchMeta) -> Any:
            self.calls[name] = {"keys": list(batch.keys), **batch.extra_info}
            column = {"infer_batch": "values"}.get(name, "log_probs")
            lengths = [tag["seq_len"] for tag in batch.tags]
            rows = torch.nested.as_nested_tensor([torch.zeros(n) for n in lengths], layout=torch.jagged)
            fields = TensorDict({column: rows}, batch_size=len(batch))
            tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)
            return self if name in ("infer_batch", "train_mini_batch", "update_actor") else batch

        return call

    def __len__(self) -> int:
        return 0

    def get(self) -> dict[str, Any]:
        return {"metrics": {"mfu": 0.0}}

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.get()[name]


def on_ranks(made: Any, ranks: int) -> Workers:
    workers = Workers(ranks)
    made.tokenizer = SimpleNamespace(eos_token_id=EOS)
    made.actor_rollout_wg = made.critic_wg = WorkerCalls(workers, made._before_call)
    return workers


def mini_batches(keys: list[str], ranks: int, number: int) -> list[list[str]]:
    """As verl cuts them: each rank's part, front to back."""
    share = len(keys) // ranks
    size = share // number
    assert size * number * ranks == len(keys)
    return [
        [key for rank in range(ranks) for key in keys[rank * share + k * size : rank * share + (k + 1) * size]]
        for k in range(number)
    ]


@pytest.fixture
def by_length(queue) -> KVBatchMeta:
    """Eight groups of eight episodes of which half are won, in two turns; these finish first."""
    batch = fill({f"g{i}": [WON, LOST] * 4 for i in range(8)})
    batch.reorder(sorted(range(len(batch)), key=lambda i: int(batch.keys[i].split("_")[1]) % 2))
    return batch


def copy(batch: KVBatchMeta) -> KVBatchMeta:
    return KVBatchMeta(keys=list(batch.keys), tags=batch.tags, partition_id=PARTITION)


def won(key: str) -> bool:
    return key.startswith("g") and int(key.split("_")[1]) % 2 == 0


def test_a_mini_batch_is_a_sample_of_the_batch_and_not_of_those_that_finished_together(by_length, trainer):
    made = trainer("turnkey.update.mini_batches=4", "critic.enable=true")
    workers = on_ranks(made, 2)
    batch = advance(made, made._balance_batch(by_length, metrics={}))
    made._update_critic(batch, {})
    made._update_actor(batch, {})
    for call in ("train_mini_batch", "update_actor"):
        keys = workers.calls[call]["keys"]
        assert workers.calls[call]["num_mini_batch"] == 4
        for part in mini_batches(keys, 2, 4):
            # a quarter of all rows; of 64 that are drawn, this many lie within four standard deviations
            assert 0.03 < sum(map(won, part)) / len(part) < 0.47


def test_rows_are_dealt_the_same_after_a_resume_and_otherwise_in_each_update(by_length, trainer):
    def dealt(step: int, update: int, batch: KVBatchMeta) -> list[str]:
        made = trainer("turnkey.update.mini_batches=4")
        on_ranks(made, 2)
        made.global_steps, made.local_trigger_step = step, update
        return made._balance_batch(batch, metrics={}).keys

    backwards = copy(by_length)
    backwards.reorder(list(range(len(backwards)))[::-1])
    first = dealt(7, 0, copy(by_length))
    assert dealt(7, 0, backwards) == first
    assert len({tuple(dealt(*at, copy(by_length))) for at in ((7, 1), (8, 0))} | {tuple(first)}) == 3


def test_the_balance_of_the_ranks_is_verls(by_length, trainer):
    metrics: dict[str, float] = {}
    made = trainer()
    on_ranks(made, 2)
    made._balance_batch(by_length, metrics=metrics)
    assert metrics["global_seqlen/balanced_max"] - metrics["global_seqlen/balanced_min"] <= 2


def test_too_few_rows_make_fewer_mini_batches_each_with_something_to_train(queue, trainer, caplog):
    made = trainer("turnkey.update.mini_batches=4", "critic.enable=true")
    workers = on_ranks(made, 2)
    episodes = [[{"reward": float(i % 2), "anchor": "s"}] for i in range(3)]
    batch = fill({"g": [*episodes, "it died"], "h": [*episodes[:2], "it died", "it died"]})
    with caplog.at_level(logging.WARNING):
        batch = advance(made, made._balance_batch(batch, metrics={}))
        assert len(batch) == 8
        made._update_critic(batch, {})
        made._update_actor(batch, {})
    played = {"g_0_0", "g_1_0", "g_2_0", "h_0_0", "h_1_0"}
    for call in ("train_mini_batch", "update_actor"):
        number = workers.calls[call]["num_mini_batch"]
        assert number == 2  # three rows on a rank at least, but three do not divide its four
        assert workers.calls[call]["global_batch_size"] == pytest.approx(5 / 2)
        for part in mini_batches(workers.calls[call]["keys"], 2, number):
            assert played & set(part)
    assert "5 rows to train on 2 ranks are too few for 4 mini-batches, the actor takes 2" in caplog.text


def test_the_reference_policys_call_leaves_the_critics_adapter_alone(queue, trainer):
    """With LoRA the reference is the actor without its adapter; the critic has one of its own."""
    made = trainer("critic.enable=true", "actor_rollout_ref.actor.use_kl_loss=true")
    made.ref_in_actor = True
    workers = on_ranks(made, 1)
    batch = made._balance_batch(fill({"g": [WON, LOST]}), metrics={})
    batch = made._compute_ref_log_prob(batch, {})
    assert workers.calls["compute_log_prob"]["no_lora_adapter"] is True
    made._compute_values(batch, {})
    assert "no_lora_adapter" not in workers.calls["infer_batch"]
