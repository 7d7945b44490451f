"""Whose weights the teacher has, in each of verl's trainers, and what is in the queue when a pass fails.

The workers are a stand-in whose policy is one number: the log-probability of a token is minus that number, and minus a
hundredth of the number of ids in its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transfer_queue as tq
from contract_tools import PARTITION, SEPARATE, Compose, batch_of, read
from hinted import TEMPLATE, chat, played, put_all
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.rollout.merging import merge_rows
from verl_turnkey.plugins.teacher.column import PARTITION as TEACHERS
from verl_turnkey.plugins.trainer.worker_setup import WorkerCalls

TEACHER = ("turnkey.teacher.source=task_skill", f"turnkey.teacher.template='{TEMPLATE}'")


class Policy:
    """Stands in the place of a worker group."""

    def __init__(self, weights: float) -> None:
        self.weights, self.saved = weights, dict[int, float]()
        self._dispatch_info = {"actor": [0]}
        self.infos: list[dict[str, Any]] = []
        self.fails = False

    def save_model_to_cpu(self, number: int) -> None:
        self.saved[number] = self.weights

    def restore_model_from_cpu(self, number: int) -> None:
        self.weights = self.saved[number]

    def clear_cpu_model(self, number: int) -> None:
        del self.saved[number]

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        if self.fails and batch.partition_id != PARTITION:
            raise RuntimeError("a rank died")
        self.infos.append(dict(batch.extra_info))
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
        rows = [torch.full((len(ids),), -self.weights - len(ids) / 100) for ids in data["input_ids"].unbind()]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields = TensorDict({"log_probs": nested, "entropy": nested.clone()}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return batch

    compute_ref_log_prob = compute_log_prob


@pytest.fixture
def build(compose: Compose, tokenizer: Any) -> Callable[..., Any]:
    def made(mode: str, *overrides: str) -> Any:
        overrides = (*(SEPARATE if mode == "separate_async" else ()), *TEACHER, *overrides)
        config = compose("+turnkey=gigpo", f"trainer.v1.trainer_mode=turnkey_{mode}", *overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.global_steps, trainer.tokenizer, trainer.ref_in_actor = 1, tokenizer, False
        trainer.actor_rollout_wg = WorkerCalls(
            Policy(2.0), trainer.actor_update.before_call, trainer.further_passes.after_call
        )
        trainer.ref_policy_wg = WorkerCalls(
            Policy(7.0), trainer.actor_update.before_call, trainer.further_passes.after_call
        )
        return trainer

    return made


def fill(tokenizer: Any, merged: bool = False) -> KVBatchMeta:
    rows = {("g", s): played(tokenizer, chat(tokenizer, "task"), ["A", "B"], s == 0) for s in range(2)}
    put_all({key: merge_rows(r) if merged else r for key, r in rows.items()}, {"g": {"skill": "go", "mine": "left"}})
    batch = batch_of(tq.kv_list(PARTITION)[PARTITION])
    batch.extra_info["temperature"] = 1.0
    return batch


def gaps(batch: KVBatchMeta) -> set[float]:
    old, teacher = read(batch, "old_log_probs"), read(batch, "teacher_log_prob")
    return {round(t - o, 4) for key in old for t, o in zip(teacher[key], old[key], strict=True)}


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_the_teacher_has_the_weights_of_the_old_log_probabilities(queue, build, tokenizer, mode):
    made = build(mode)
    batch, policy = fill(tokenizer), made.actor_rollout_wg._group
    length = len(tokenizer.encode(TEMPLATE.replace("{text}", "go")))
    made.local_trigger_step = 0
    made._compute_old_log_prob(batch, {})
    assert gaps(batch) == {-length / 100}
    if mode == "separate_async":
        policy.weights, made.local_trigger_step = 3.0, 1  # after the first update of the step
        made._compute_old_log_prob(batch, {})
        assert gaps(batch) == {-length / 100}
        assert policy.weights == 3.0
        assert all(value > -3.0 for row in read(batch, "old_log_probs").values() for value in row)
    assert len(policy.infos) == (4 if mode == "separate_async" else 2)


def test_a_reference_teacher_is_the_reference_policy(queue, build, tokenizer):
    made = build("sync", "turnkey.teacher.weights=ref")
    batch = fill(tokenizer)
    made._compute_old_log_prob(batch, {})
    length = len(tokenizer.encode(TEMPLATE.replace("{text}", "go")))
    assert gaps(batch) == {round(2.0 - 7.0 - length / 100, 4)}
    assert len(made.ref_policy_wg._group.infos) == len(made.actor_rollout_wg._group.infos) == 1


@pytest.mark.parametrize("weights", ["old", "ref"])
def test_with_an_adapter_the_reference_is_the_actor_without_it(queue, build, tokenizer, weights):
    made = build("sync", f"turnkey.teacher.weights={weights}")
    made.ref_in_actor = True
    batch = fill(tokenizer)
    made._compute_old_log_prob(batch, {})
    olds, teachers = made.actor_rollout_wg._group.infos
    assert teachers.get("no_lora_adapter", False) == (weights == "ref")
    assert "no_lora_adapter" not in olds
    assert teachers["calculate_entropy"] is False
    made._compute_ref_log_prob(batch, {})
    assert len(made.actor_rollout_wg._group.infos) == 3, "no pass behind other calls"


def test_nothing_is_left_in_the_queue_when_a_pass_fails(queue, build, tokenizer):
    made = build("sync")
    made.actor_rollout_wg._group.fails = True
    batch = fill(tokenizer)
    with pytest.raises(RuntimeError, match="a rank died"):
        made._compute_old_log_prob(batch, {})
    assert not TEACHERS.tags()


def test_a_text_per_turn_is_refused_for_rows_with_several_turns(queue, build, tokenizer):
    made = build("sync", "turnkey.teacher.source=next_observation")
    made._compute_old_log_prob(batch := fill(tokenizer), {})
    has_text = read(batch, "has_teacher")
    assert has_text == {key: key.endswith("_0") for key in has_text}, "the last turn has no next observation"
    tq.kv_clear(keys=batch.keys, partition_id=PARTITION)
    with pytest.raises(ConfigError, match=r"row g_._0 holds 2 turns.*layout=steps"):
        made._compute_old_log_prob(fill(tokenizer, merged=True), {})


FUNCTION = """
def text(row):
    if row.episode.success:
        raise ValueError("no text for winners")
    return f"{row.data['skill']} {len(row.others)} {row.episode.turns}"


async def late(row):
    return row.episode.name


def broken(row):
    raise KeyError("skill")
"""


def test_a_function_of_the_user_gives_the_text(queue, build, tokenizer, tmp_path, caplog):
    (tmp_path / "mine.py").write_text(FUNCTION)
    made = build("sync", f"turnkey.teacher.source={tmp_path}/mine.py:text")
    metrics: dict[str, Any] = {}
    made._compute_old_log_prob(batch := fill(tokenizer), metrics)
    assert metrics["teacher/text_errors"] == metrics["teacher/rows_with_text"] == 2
    assert {key for key, has in read(batch, "has_teacher").items() if has} == {"g_1_0", "g_1_1"}
    ids = TEMPLATE.replace("{text}", "go 1 ['A', 'B']")
    assert metrics["teacher/text_tokens"] == 2 * len(tokenizer.encode(ids))
    assert "no text for winners" in caplog.text
    made = build("sync", f"turnkey.teacher.source={tmp_path}/mine.py:late")
    made._compute_old_log_prob(batch, metrics)
    assert metrics["teacher/rows_with_text"] == 4
    made = build("sync", f"turnkey.teacher.source={tmp_path}/mine.py:broken")
    with pytest.raises(RuntimeError, match=r"raised an error for all 4 rows.*KeyError"):
        made._compute_old_log_prob(batch, metrics)
