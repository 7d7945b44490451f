"""Which episodes each optimizer step sees, as verl's workers cut a batch, on a real TransferQueue."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
from contract_tools import PARTITION, advance, fill, read
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_turnkey.plugins.actor.weighing import MINI_BATCHES
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
    made.actor_rollout_wg = made.critic_wg = WorkerCalls(workers, made.actor_update.before_call)
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


ROLES = {"train_mini_batch": "critic", "update_actor": "actor"}
NUMBERS = [
    pytest.param(["turnkey.update.mini_batches=4"], {"critic": 4, "actor": 4}, id="both four"),
    pytest.param(["critic.ppo_mini_batch_size=1"], {"critic": 4, "actor": 2}, id="the critic twice as many"),
    pytest.param(
        ["data.train_batch_size=6", "critic.ppo_mini_batch_size=3", "algorithm.adv_estimator=grpo"],
        {"critic": 2, "actor": 3},
        id="neither divides the other, under grpo",
    ),
]


@pytest.mark.parametrize(("overrides", "numbers"), NUMBERS)
def test_a_mini_batch_is_a_sample_of_whole_episodes_and_not_of_those_that_finished_together(
    by_length, trainer, overrides, numbers
):
    made = trainer("critic.enable=true", *overrides)
    workers = on_ranks(made, 2)
    metrics: dict[str, float] = {}
    batch = advance(made, made._balance_batch(by_length, metrics), metrics)
    made._update_critic(batch, {})
    made._update_actor(batch, {})
    for call, role in ROLES.items():
        keys = workers.calls[call]["keys"]
        assert workers.calls[call]["num_mini_batch"] == workers.calls[call][MINI_BATCHES] == numbers[role]
        seen: dict[str, int] = {}
        for number, part in enumerate(mini_batches(keys, 2, numbers[role])):
            real = [key for key in part if key.startswith("g")]
            # a quarter of all rows is of won episodes, which are half of them
            assert 0.1 < sum(map(won, real)) / len(real) < 0.4
            for key in real:
                assert seen.setdefault(key.rsplit("_", 1)[0], number) == number
        assert len(seen) == 64
    assert metrics["dealing/padding"] < 0.1
    assert 0.9 < metrics["dealing/rank_tokens/min"] <= 1 <= metrics["dealing/rank_tokens/max"] < 1.1
    assert 0.8 < metrics["dealing/mini_batch_tokens/min"] <= 1 <= metrics["dealing/mini_batch_tokens/max"] < 1.2


def test_the_mean_advantage_of_each_mini_batch(queue, trainer):
    """From what is in the queue, by the rows that verl's workers would cut."""
    made = trainer("critic.enable=true", "critic.ppo_mini_batch_size=1")  # four parts, two steps of the actor
    on_ranks(made, 2)
    start, end = {"reward": 0.0, "anchor": "s"}, {"anchor": "t"}
    group = {f"g{i}": [[start] * t + [end | {"reward": float(t % 3 == 0)}] for t in range(i, i + 4)] for i in range(4)}
    metrics: dict[str, float] = {}
    batch = advance(made, made._balance_batch(fill(group), metrics), metrics)
    advantages, mask = read(batch, "advantages"), read(batch, "response_mask")
    means = [
        sum(sum(advantages[key]) for key in part) / sum(sum(mask[key]) for key in part)
        for part in mini_batches(batch.keys, 2, 2)
    ]
    assert metrics["dealing/advantage/min"] == pytest.approx(min(means), abs=1e-6)
    assert metrics["dealing/advantage/max"] == pytest.approx(max(means), abs=1e-6)
    assert max(means) - min(means) > 1e-3


def test_means_over_rows_are_those_of_the_real_rows_on_any_number_of_ranks(queue, trainer):
    """Neither padding nor failed episodes count. verl's engine averages the losses of the ranks."""
    made = trainer("turnkey.update.mini_batches=2")
    workers = on_ranks(made, 2)
    batch = made._balance_batch(fill({"g": [WON, LOST, "it died"], "h": [WON, LOST, WON]}), metrics={})
    batch = advance(made, batch)
    made._update_actor(batch, {})
    call, total = workers.calls["update_actor"], 0.0
    mask = read(batch, "response_mask")
    loss = {key: [float(len(key) + i * i) for i in range(len(row))] for key, row in mask.items()}
    for part in mini_batches(call["keys"], 2, 2):
        for rank in range(2):
            rows = part[rank * len(part) // 2 : (rank + 1) * len(part) // 2]
            pad = torch.nn.utils.rnn.pad_sequence
            total += agg_loss(
                pad([torch.tensor(loss[key]) for key in rows], batch_first=True),
                pad([torch.tensor(mask[key]) for key in rows], batch_first=True),
                "seq-mean-token-sum",
                dp_size=2,
                global_batch_size=call["global_batch_size"],
            ).item() / (2 * call["num_mini_batch"])
    real = [key for key in mask if any(mask[key])]
    assert len(real) == 18 < len(mask)
    assert total == pytest.approx(sum(sum(loss[key]) for key in real) / len(real))


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


def test_ranks_and_metrics_are_those_of_verls_own(by_length, trainer):
    made = trainer()
    on_ranks(made, 2)
    ours: dict[str, float] = {}
    made._balance_batch(copy(by_length), metrics=ours)
    assert made.batching.ranks == 2
    assert ours["global_seqlen/balanced_max"] - ours["global_seqlen/balanced_min"] <= 8
    verls: dict[str, float] = {}
    PPOTrainerSync._balance_batch(made, copy(by_length), metrics=verls)
    assert set(verls) == {name for name in ours if not name.startswith("dealing/")}
    assert {type(verls[name]) for name in verls} == {type(ours[name]) for name in verls}


def test_too_few_episodes_make_fewer_mini_batches_each_with_something_to_train(queue, trainer, caplog):
    made = trainer("turnkey.update.mini_batches=4", "critic.enable=true")
    workers = on_ranks(made, 2)
    episodes = [[{"reward": float(i % 2), "anchor": "s"}] for i in range(2)]
    batch = fill({"g": [*episodes, "it died"], "h": [episodes[0], "it died", "it died"]})
    with caplog.at_level(logging.WARNING):
        batch = advance(made, made._balance_batch(batch, metrics={}))
        made._update_critic(batch, {})
        made._update_actor(batch, {})
    played = {"g_0_0", "g_1_0", "h_0_0"}
    for call in ROLES:
        number = workers.calls[call]["num_mini_batch"]
        assert number == 3
        assert workers.calls[call]["global_batch_size"] == pytest.approx(3 / 3)
        for part in mini_batches(workers.calls[call]["keys"], 2, number):
            assert played & set(part)
    assert "too few episodes to train for 4 mini-batches of whole episodes, the actor takes 3" in caplog.text


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
