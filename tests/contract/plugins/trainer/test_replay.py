"""Stored episodes and groups that are trained again, on verl's own steps of an update and a real TransferQueue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
from contract_tools import (
    PARTITION,
    SEPARATE,
    Compose,
    TwoRanks,
    advance,
    batch_of,
    make_record,
    make_step,
    output,
    put,
    read,
)
from verl.trainer.ppo.v1 import get_trainer_cls

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks.groups import check_groups
from verl_turnkey.plugins.checks.run import CheckedRun
from verl_turnkey.plugins.config.schema import turnkey_config

REPLAY, BUFFER = "turnkey.groups.replay=1", "turnkey.groups.buffer=8"
WRITTEN = {"uid", "session_id"}
"""the fields of a stored row that are its new group's"""


@pytest.fixture
def made(queue, compose: Compose) -> Any:
    def build(mode: str = "sync", *overrides: str) -> Any:
        batch = "actor_rollout_ref.actor.ppo_mini_batch_size=6" if mode == "separate_async" else "data.seed=1"
        overrides = (*(SEPARATE if mode == "separate_async" else ()), batch, *overrides)
        sizes = ("data.train_batch_size=12", "actor_rollout_ref.rollout.n=4", REPLAY)
        config = compose("+turnkey=grpo_steps", f"trainer.v1.trainer_mode=turnkey_{mode}", *sizes, *overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.global_steps, trainer.actor_rollout_wg = 1, TwoRanks()
        trainer.tokenizer = SimpleNamespace(eos_token_id=2)
        return trainer

    return build


def play(groups: dict[str, tuple[str, list[float | str]]], token: int = 7) -> Any:
    """A batch of ``group: (task, rewards or why the episode failed)``; each episode has two rows."""
    for group, (task, rewards) in groups.items():
        for session, reward in enumerate(rewards):
            if isinstance(reward, str):
                rows = [output(make_record([], failed=reward), 1, 0.0, masked=True)]
            else:
                steps = [make_step(step=t, reward=reward * t, anchor=f"{t}", success=reward >= 1) for t in (0, 1)]
                rows = [output(make_record([step]), 2 + t, reward) for t, step in enumerate(steps)]
            for i, row in enumerate(rows):
                row.response_ids = [token + i] * len(row.response_ids)
                row.response_logprobs = [-token / 8 - session] * len(row.response_ids)
            put(group, session, rows, {"turnkey_task": task})
    return batch_of(tq.kv_list(PARTITION)[PARTITION])


def fields(keys: list[str]) -> list[dict[str, Any]]:
    columns = []
    for key in keys:
        data = tq.kv_batch_get(keys=[key], partition_id=PARTITION)
        columns.append({name: data[name] for name in data.keys()})  # noqa: SIM118
    return columns


def plain(value: Any) -> Any:
    return value.unbind()[0].tolist() if isinstance(value, torch.Tensor) else list(value)


def step(trainer: Any, batch: Any, number: int) -> tuple[Any, dict[str, Any]]:
    """One step; its rows leave the queue as verl's loop has them leave."""
    trainer.global_steps, metrics = number, {}
    batch.extra_info["temperature"] = 0.7
    batch = trainer._balance_batch(batch, metrics)
    assert batch.extra_info["temperature"] == 0.7
    batch = advance(trainer, batch, metrics)
    return batch, metrics


def clear(batch: Any) -> None:
    tq.kv_clear(keys=batch.keys, partition_id=PARTITION)
    assert not tq.kv_list(PARTITION).get(PARTITION)


def real(batch: Any) -> dict[str, dict[str, Any]]:
    return {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")}


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_stored_episode_joins_the_group_and_leaves_with_it(made, mode):
    trainer = made(mode)
    first = play({"a": ("t", [1.0, 0.0, 0.0, "it died"]), "b": ("u", [1.0, 1.0])}, token=9)
    stored = dict(zip(["a_0_0", "a_0_1"], fields(["a_0_0", "a_0_1"]), strict=True))
    batch, metrics = step(trainer, first, 1)
    assert metrics["groups/replayed"] == 0
    assert metrics["groups/replay_tasks"] == 2
    clear(batch)

    whole = play({"c": ("t", [0.0] * 4), "d": ("u", [1.0, 0.0]), "e": ("new", [0.0, 0.0])})
    played = set(whole.keys)
    batch, metrics = step(trainer, whole, 3)
    added = sorted(set(real(batch)) - played)
    assert added == ["c_4_0", "c_4_1"]
    assert set(tq.kv_list(PARTITION)[PARTITION]) == set(batch.keys)
    for new, (_, old) in zip(fields(added), stored.items(), strict=True):
        assert plain(new["uid"]) == ["c"]
        assert plain(new["session_id"]) == [4]
        assert set(old) <= set(new)
        assert {name: plain(new[name]) for name in old.keys() - WRITTEN} == {
            name: plain(old[name]) for name in old.keys() - WRITTEN
        }
    advantages = {key: row[0] for key, row in read(batch, "advantages").items() if key.startswith("c_")}
    assert advantages == {
        key: pytest.approx(1.7889 if key.startswith("c_4") else -0.4472, abs=1e-4) for key in advantages
    }
    assert len(advantages) == 10
    assert metrics["groups/replayed"] == pytest.approx(1 / 3)
    assert metrics["groups/replay_age"] == 2
    # of the eight that were played
    assert metrics["episode/count"] == 8
    assert metrics["episode/success_rate"] == 1 / 8
    assert metrics["episode/composed_return/mean"] == 1 / 8
    assert trainer.advantage_step.real_rows == 18
    clear(batch)


def test_unsolved_ones_join_a_solved_group_and_old_ones_nothing(made):
    trainer = made("sync", "turnkey.groups.replay_age=2", "turnkey.groups.replay=2")
    clear(step(trainer, play({"a": ("t", [0.0, 0.0, 0.0])}), 1)[0])
    batch, _ = step(trainer, play({"b": ("t", [1.0, 1.0])}), 3)
    assert {key for key, tag in real(batch).items() if tag.get("replayed")} == {"b_2_0", "b_2_1", "b_3_0", "b_3_1"}
    clear(batch)
    # A replayed episode is as old as it was; that of step 3 is still young.
    batch, metrics = step(trainer, play({"c": ("t", [1.0]), "d": ("t", [0.0])}), 4)
    assert metrics["groups/replayed"] == 1 / 2
    assert {key[0] for key, tag in real(batch).items() if tag.get("replayed")} == {"d"}
    clear(batch)


def test_episodes_without_a_row_are_still_missed(made):
    trainer = made()
    clear(step(trainer, play({"a": ("t", [1.0, 0.0, 0.0, 0.0])}), 1)[0])
    trainer.rollout_counter._prompts, trainer.rollout_counter._sampled = 1, ["b"]
    batch, metrics = step(trainer, play({"b": ("t", [0.0, 0.0, 0.0])}), 2)
    assert metrics["groups/replayed"] == 1
    assert metrics["episode/missing"] == 1
    clear(batch)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_stored_group_joins_a_batch_once_and_leaves_with_it(made, mode):
    trainer = made(mode, "turnkey.groups.replay=0", "turnkey.groups.buffer=8")
    first = play({"a": ("t", [1.0, 0.0, "it died", 0.0]), "b": ("u", [1.0, 1.0])}, token=9)
    keys = [f"a_{session}_{row}" for session in (0, 1, 3) for row in (0, 1)]
    stored = dict(zip(keys, fields(keys), strict=True))
    batch, metrics = step(trainer, first, 1)
    assert (metrics["groups/drawn"], metrics["groups/buffer"]) == (0, 1)
    clear(batch)

    whole = play({"c": ("t", [0.0] * 4), "d": ("v", ["it died"] * 2), "e": ("w", [1.0, 0.0])})
    played = set(whole.keys)
    batch, metrics = step(trainer, whole, 3)
    # one group for two, since no other one is stored; without the episode that failed
    added = sorted(set(real(batch)) - played)
    assert added == [f"a-3_{session}_{row}" for session in (0, 1, 2) for row in (0, 1)]
    assert set(tq.kv_list(PARTITION)[PARTITION]) == set(batch.keys)
    for new, old in zip(fields(added), stored.values(), strict=True):
        assert plain(new["uid"]) == ["a-3"]
        assert {name: plain(new[name]) for name in old.keys() - WRITTEN} == {
            name: plain(old[name]) for name in old.keys() - WRITTEN
        }
    # the group's own: 1, 0 and 0 with mean 1/3 and deviation 0.5774
    advantages = {key: row[0] for key, row in read(batch, "advantages").items()}
    expected = {"a-3_0": 1.1547, "a-3_1": -0.5774, "a-3_2": -0.5774, "e_0": 0.7071, "e_1": -0.7071}
    for key, advantage in advantages.items():
        assert advantage == pytest.approx(expected.get(key.rsplit("_", 1)[0], 0.0), abs=1e-4)
    assert len(real(batch)) == len(played) + 6
    assert metrics["groups/drawn"] == pytest.approx(1 / 3)
    assert metrics["groups/replay_age"] == 2
    assert metrics["groups/buffer"] == 1  # e; what was drawn is gone, and not stored again
    assert metrics["episode/count"] == 8
    assert "groups/replayed" not in metrics
    clear(batch)
    batch, metrics = step(trainer, play({"f": ("t", [0.0, 0.0])}), 4)
    assert {key.split("_")[0] for key in real(batch)} == {"f", "e-4"}
    clear(batch)


def test_nothing_is_trained_twice_in_a_step_of_several_updates(made):
    """What an update stores may join from the next step on; the draws of two updates are not the same."""
    for key, expected in (("replay", "a_0"), ("buffer", "a-2")):
        trainer = made("separate_async", "turnkey.groups.replay=0", f"turnkey.groups.{key}=1")
        for update, group in enumerate("ab"):
            trainer.local_trigger_step = update
            rewards = [1.0, 0.0] if group == "a" else [0.0, 0.0]
            batch, _ = step(trainer, play({group: ("t", rewards)}), 1)
            assert {key.split("_")[0] for key in real(batch)} == {group}
            assert not any(tag.get("replayed") for tag in real(batch).values())
            clear(batch)
        batch, _ = step(trainer, play({"c": ("t", [0.0, 0.0])}), 2)
        assert sum(bool(tag.get("replayed")) for tag in real(batch).values()) == (2 if key == "replay" else 4)
        assert key == "replay" or {name.split("_")[0] for name in real(batch)} == {"c", expected}
        clear(batch)


def test_of_two_groups_of_a_task_one_gets_the_stored_episode(made):
    trainer = made()
    clear(step(trainer, play({"a": ("t", [1.0, 0.0])}), 1)[0])
    batch, metrics = step(trainer, play({"b": ("t", [0.0, 0.0]), "c": ("t", [0.0, 0.0])}), 2)
    assert metrics["groups/replayed"] == 1 / 2
    assert {key for key, tag in real(batch).items() if tag.get("replayed")} == {"b_2_0", "b_2_1"}
    clear(batch)


def test_a_stored_row_holds_no_more_memory_than_its_own(made):
    trainer = made()
    clear(step(trainer, play({"a": ("t", [1.0, 0.0, 0.0, 0.0])}), 1)[0])
    [task] = trainer.replay.memory._tasks
    [stored] = trainer.replay.memory.take(task, True, 2)
    tensors = [value for row in stored.rows for value in row.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 5
    assert all(value.untyped_storage().nbytes() == value.numel() * value.element_size() for value in tensors)


@pytest.mark.parametrize(("inputs", "stored"), [({"pixel_values": 1}, 0), ({"mm_token_type_ids": 1}, 1), ({}, 1)])
def test_episodes_with_images_are_passed_over_and_that_is_said(made, monkeypatch, inputs, stored):
    warned = []
    monkeypatch.setattr("verl_turnkey.plugins.trainer.replay.warn_once", warned.append)
    trainer = made()
    batch = play({"a": ("t", [1.0])})
    rows = trainer.replay.read
    read_rows = "verl_turnkey.plugins.trainer.replay._rows"
    monkeypatch.setattr(read_rows, lambda data: [{"multi_modal_inputs": inputs} for _ in range(data.batch_size[0])])
    assert len(rows(batch, {"a_0"})) == stored
    assert len(warned) == 1 - stored
    clear(batch)


def test_the_groups_that_differ_most_are_stored(made):
    trainer = made("sync", "turnkey.groups.replay=0", "turnkey.groups.buffer=1")
    rewards = {"a": ("t", [1.0, 0.9]), "b": ("u", [1.0, 0.0]), "c": ("v", [1.0, 0.8])}
    clear(step(trainer, play(rewards), 1)[0])
    batch, _ = step(trainer, play({"d": ("t", [0.0, 0.0])}), 2)
    assert {key.split("_")[0] for key in real(batch)} == {"d", "b-2"}
    clear(batch)


def test_none_is_the_default(made):
    trainer = made("sync", "turnkey.groups.replay=0")
    clear(step(trainer, play({"a": ("t", [1.0, 0.0])}), 1)[0])
    batch, metrics = step(trainer, play({"b": ("t", [0.0, 0.0])}), 2)
    assert not [key for key, tag in real(batch).items() if tag.get("replayed")]
    assert not [name for name in metrics if name.startswith("groups/")]
    assert trainer.replay.memory is None
    assert trainer.replay.buffer is None
    clear(batch)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("turnkey.groups.keep=0.5", "turnkey.groups.keep"),
        ("turnkey.groups.hint_high=0.5", "turnkey.groups.hint_high"),
        ("turnkey.groups.buffer=2 turnkey.groups.replay=2", "set one of them to 0"),
        ("algorithm.filter_groups.enable=true", "filter_groups"),
        ("turnkey.rollout.strategy=tree", "turnkey.rollout.strategy"),
        ("actor_rollout_ref.rollout.calculate_log_probs=false", "calculate_log_probs=true"),
    ],
)
@pytest.mark.parametrize("switch", [REPLAY, BUFFER])
def test_what_does_not_go_with_it_is_refused(compose, switch, line, named, monkeypatch):
    monkeypatch.setattr("verl_turnkey.plugins.checks.groups.check_hints", lambda *_: None)
    if switch == BUFFER and "hint" in line:
        line, named = "actor_rollout_ref.rollout.n=1", "rollout.n=1: raise it to 2"
    config = compose("+turnkey=grpo_steps", switch, *line.split())
    with pytest.raises(ConfigError, match=named):
        check_groups(CheckedRun(config, turnkey_config(config)))


@pytest.mark.parametrize("switch", [REPLAY, BUFFER])
def test_older_weights_without_correction_are_warned_of(compose, switch):
    config = compose("+turnkey=grpo_steps", switch, "actor_rollout_ref.rollout.calculate_log_probs=true")
    config.algorithm.rollout_correction.rollout_is = None
    config.algorithm.rollout_correction.bypass_mode = False
    with pytest.warns(UserWarning, match="rollout_is=token"):
        check_groups(CheckedRun(config, turnkey_config(config)))
    config.algorithm.rollout_correction.rollout_is = "token"
    check_groups(CheckedRun(config, turnkey_config(config)))
