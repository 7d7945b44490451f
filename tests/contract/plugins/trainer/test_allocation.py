"""How often each prompt is asked for, through verl's own submission, TransferQueue and checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transfer_queue as tq
from contract_tools import (
    PARTITION,
    SEPARATE,
    Compose,
    Saves,
    Worker,
    advance,
    batch_of,
    make_record,
    make_step,
    output,
    put,
)
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu

from verl_turnkey.plugins.trainer.groups import TaskHistory

MODES = ("sync", "colocate_async", "separate_async")
FILE = "turnkey_groups.json"
SIZES = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


@pytest.fixture
def build(queue, compose: Compose, tmp_path: Path) -> Any:
    def made(mode: str, *overrides: str, rule: str = "variance") -> Any:
        overrides = (*(SEPARATE if mode == "separate_async" else ()), f"turnkey.groups.allocation={rule}", *overrides)
        where = (f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=1")
        config = compose("+turnkey=gigpo", f"trainer.v1.trainer_mode=turnkey_{mode}", *SIZES, *where, *overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.checkpoint_manager = trainer.train_dataloader = Saves()
        trainer.actor_rollout_wg = Saves()
        trainer.actor_rollout_wg._dispatch_info = {"actor": [0, 1]}
        trainer.tokenizer = SimpleNamespace(eos_token_id=2)
        trainer.global_steps = 1
        return trainer

    return made


def prompts(step: int, tasks: str) -> Any:
    """As verl's data loader collates them: the tasks are told apart by ``index`` alone."""
    columns = {
        "uid": [f"{task}{step}" for task in tasks],
        "index": [ord(task) for task in tasks],
        "data_source": ["x"] * len(tasks),
        "raw_prompt": [[{"role": "user", "content": "go"}]] * len(tasks),
        "turnkey_hint": [None if task == "e" else "look behind the door" for task in tasks],
    }
    arrays = {name: np.empty(len(tasks), dtype=object) for name in columns}
    for name, values in columns.items():
        arrays[name][:] = values
    batch = tu.get_tensordict(arrays)
    tu.assign_non_tensor_data(batch, "global_steps", step)
    return batch


def share(uid: str) -> float:
    """How many of a task's episodes are solved, of any number; d is learned in the second step."""
    return 1.0 if uid[0] == "d" and uid[1] > "1" else {"a": 0.5, "b": 1.0, "d": 0.25}.get(uid[0], 0.0)


def played(score: float) -> dict[str, Any]:
    return make_record([make_step(step=0, reward=score, anchor="s")])


def play(batch: Any) -> dict[str, int]:
    """Each prompt as often as it says, through verl's own worker; returns how often."""
    rollouts: dict[str, int] = {}

    async def session(self: Any, *_: Any, session_id: int, **prompt: Any) -> None:
        rollouts[prompt["uid"]] = rollouts.get(prompt["uid"], 0) + 1

    worker = type("Counting", (Worker,), {"_run_agent_loop": session})()
    rollout = {"n": 4, "val_kwargs": SimpleNamespace(n=1)}
    worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(**rollout)))
    fields = {name: tu.get(batch, name) for name in batch.keys()}  # noqa: SIM118
    for i, uid in enumerate(fields["uid"]):
        prompt = {n: v[i] for n, v in fields.items() if n != "global_steps"} | {"global_steps": 1}
        asyncio.run(worker._run_prompt(dict(prompt), {}, trajectory={"validate": False}))
        of_task = {
            name: prompt[name]
            for name in ("index", "data_source", "raw_prompt", "turnkey_hint_share")
            if name in prompt
        }
        for number in range(rollouts[uid]):
            score = float(number < round(share(uid) * rollouts[uid]))
            lost = uid[0] == "f" and of_task.get("turnkey_hint_share", 0) > 0  # its hint does not fit into the prompt
            record = make_record([], failed="PromptTooLongError: too long") if lost else played(score)
            put(uid, number, [output(record, 2, score, masked=lost)], of_task)
    return rollouts


def step(trainer: Any, number: int, tasks: str = "abcd") -> tuple[dict[str, int], dict[str, float]]:
    """One step up to its advantages: how often each task was played, and the metrics."""
    rollouts: dict[str, int] = {}
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=lambda batch: rollouts.update(play(batch)))
    trainer._submit_batch_to_rollout(prompts(number, tasks))
    items = tq.kv_list(PARTITION)[PARTITION]
    batch = batch_of({key: tag for key, tag in items.items() if not tag.get("is_prompt")})
    trainer.rollout_counter._sampled, trainer.rollout_counter._prompts = list(rollouts), len(tasks)
    metrics: dict[str, float] = {}
    batch = advance(trainer, trainer._balance_batch(batch, metrics), metrics)
    tq.kv_clear(keys=list(tq.kv_list(PARTITION)[PARTITION]), partition_id=PARTITION)
    return {uid[0]: n for uid, n in rollouts.items()}, metrics


@pytest.mark.parametrize("mode", MODES)
def test_tasks_of_uncertain_outcome_are_played_more_often_at_the_same_total(build, mode):
    trainer = build(mode)
    first, metrics = step(trainer, 1)
    assert first == dict.fromkeys("abcd", 4)
    assert (metrics["groups/known"], metrics["groups/episodes/min"], metrics["groups/episodes/max"]) == (0, 4, 4)
    second, metrics = step(trainer, 2)
    # above two each, eight by weights 1, 0.01, 0.01, 0.75, and at most six of a task
    assert second == {"a": 6, "b": 2, "c": 2, "d": 6}
    assert (metrics["groups/known"], metrics["groups/episodes/min"], metrics["groups/episodes/max"]) == (1, 2, 6)
    assert metrics["episode/count"] == 16
    assert metrics["episode/missing"] == 0
    third, metrics = step(trainer, 3, "abe")
    assert sum(third.values()) == 12
    assert metrics["groups/known"] == pytest.approx(2 / 3)


def test_a_single_prompt_in_the_place_of_another_is_played_n_times(build):
    trainer = build("colocate_async")
    step(trainer, 1)
    assert step(trainer, 2, "a")[0] == {"a": 4}
    assert len(trainer.allocation.histories) == 4
    assert Counter(history.episodes for history in trainer.allocation.histories.values()) == {8.0: 1, 4.0: 3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["variance", "prior"])
def test_a_resumed_run_divides_as_an_unbroken_one(build, tmp_path: Path, mode: str, rule: str):
    unbroken = build(mode, rule=rule)
    expected = [step(unbroken, number)[0] for number in (1, 2, 3, 4)]
    broken = build(mode, rule=rule)
    assert [step(broken, number)[0] for number in (1, 2)] == expected[:2]
    broken.global_steps = 2
    broken._save_checkpoint()
    resumed = build(mode, "trainer.resume_mode=auto", rule=rule)
    resumed._load_checkpoint()
    assert resumed.allocation.histories == broken.allocation.histories != {}
    assert [step(resumed, number)[0] for number in (3, 4)] == expected[2:]
    assert expected[2] != expected[0]


def test_a_checkpoint_without_what_was_seen_is_warned_of(build, tmp_path: Path, caplog):
    trainer = build("sync")
    step(trainer, 1)
    trainer._save_checkpoint()
    held = json.loads((tmp_path / "global_step_1" / FILE).read_text())
    assert held["method"] == "allocation"
    assert len(held["state"]) == 4 * 4
    (tmp_path / "global_step_1" / FILE).unlink()
    resumed = build("sync", "trainer.resume_mode=auto")
    resumed._load_checkpoint()
    assert resumed.allocation.histories == {}
    assert "turnkey.groups has no history of the tasks played before" in caplog.text


def test_a_run_without_allocation_asks_and_writes_nothing(build, tmp_path: Path):
    trainer = build("sync", rule="even")
    assert step(trainer, 1)[0] == dict.fromkeys("abcd", 4)
    trainer._save_checkpoint()
    assert trainer.allocation.histories == {}
    assert not (tmp_path / "global_step_1" / FILE).exists()


def test_what_was_left_out_of_the_update_is_remembered(build):
    trainer = build("sync", "turnkey.groups.keep=0.25")
    _, metrics = step(trainer, 1)
    assert metrics["episode/count"] == 4
    assert sorted(history.solved for history in trainer.allocation.histories.values()) == [0, 1, 2, 4]
    assert all(isinstance(history, TaskHistory) for history in trainer.allocation.histories.values())


@pytest.mark.parametrize("mode", MODES)
def test_every_other_group_of_a_task_that_nobody_solves_has_a_hint(build, tmp_path: Path, mode: str):
    hints = ("turnkey.groups.hint_low=0.2", "turnkey.groups.hint_high=0.6", "trainer.resume_mode=auto")
    trainer, hinted = build(mode, *hints, rule="even"), []
    for number in range(1, 6):
        if number == 3:
            trainer.global_steps = 2
            trainer._save_checkpoint()
            trainer = build(mode, *hints, rule="even")
            trainer._load_checkpoint()
        shares: dict[str, float] = {}
        put_in = trainer.allocation.allot

        def allot(batch: Any, put_in: Any = put_in, shares: dict[str, float] = shares) -> None:
            put_in(batch)
            shares |= dict(zip(tu.get(batch, "uid"), tu.get(batch, "turnkey_hint_share"), strict=True))

        trainer.allocation.allot = allot
        played, metrics = step(trainer, number)
        trainer.allocation.allot = put_in
        assert played == dict.fromkeys("abcd", 4)
        hinted.append({uid[0]: round(float(share), 6) for uid, share in shares.items() if share})
        assert metrics["groups/hinted"] == len(hinted[-1]) / 4
    assert hinted == [{}, {"c": 0.6}, {}, {"c": 0.6}, {}]
    assert sorted(history.episodes for history in trainer.allocation.histories.values()) == [12, 20, 20, 20]


def test_a_task_without_a_hint_is_not_taken_for_one_with_it(build):
    trainer = build("sync", "turnkey.groups.hint_high=0.5", rule="even")
    hinted = [step(trainer, number, "ce")[1]["groups/hinted"] for number in range(1, 5)]
    assert hinted == [0, 0.5, 0, 0.5]  # c alone
    assert sorted(history.episodes for history in trainer.allocation.histories.values()) == [8, 16]


def test_a_hint_that_its_episodes_fail_of_is_not_shown_again_at_once(build):
    trainer = build("sync", "turnkey.groups.hint_high=0.5", rule="even")
    hinted = [step(trainer, number, "af")[1]["groups/hinted"] for number in range(1, 5)]
    assert hinted == [0, 0.5, 0, 0.5]
