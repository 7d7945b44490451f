"""Our trainers in the place of verl's three, and what only the asynchronous ones meet."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import transfer_queue as tq
from contract_tools import PARTITION, Compose, advance, fill, read
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_separate_async
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.plugins import seams
from verl_turnkey.plugins.metrics import combine
from verl_turnkey.plugins.trainer import (
    TurnkeyTrainerColocateAsync,
    TurnkeyTrainerSeparateAsync,
    TurnkeyTrainerSync,
)

SEPARATE = [
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]
PLAYED = [{"reward": 1.0, "anchor": "s", "success": True}]
OTHER = [{"reward": 0.0, "anchor": "s"}, {"reward": 0.0, "anchor": "t"}]


@pytest.mark.parametrize(
    ("cls", "mode", "buffer", "overrides", "mini_batches"),
    [
        (TurnkeyTrainerSync, "sync", ReplayBuffer, [], 2),
        (TurnkeyTrainerColocateAsync, "colocate_async", ReplayBufferAsync, [], 2),
        (TurnkeyTrainerSeparateAsync, "separate_async", ReplayBufferAsync, SEPARATE, 1),
    ],
)
def test_trainers_take_the_place_of_verls(compose: Compose, cls, mode, buffer, overrides, mini_batches):
    config = compose("+turnkey=gigpo", f"trainer.v1.trainer_mode=turnkey_{mode}", *overrides)
    assert get_trainer_cls(config.trainer.v1.trainer_mode) is cls
    made = cls(config)
    assert made.trainer_mode == config.trainer.v1.trainer_mode == mode
    assert type(made.replay_buffer) is buffer
    assert made.replay_buffer.poll_interval == 0.05
    assert made.estimator.name == "gigpo"
    assert made.credit_params.gamma == 0.95
    assert made._mini_batches("actor") == mini_batches


@pytest.fixture
def build(compose: Compose) -> Callable[..., Any]:
    """A trainer of either asynchronous kind that has not started its workers."""

    def made(mode: str, *overrides: str) -> Any:
        overrides = (*(SEPARATE if mode == "separate_async" else ()), *overrides)
        config = compose("+turnkey=gigpo", f"trainer.v1.trainer_mode=turnkey_{mode}", *overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.global_steps = 1
        return trainer

    return made


# --- groups that are lost before there is a batch ---------------------------------------------------------------------


def prompts(uids: list[str], status: str) -> None:
    tags = [{"is_prompt": True, "status": status, "global_steps": 1} for _ in uids]
    for uid, tag in zip(uids, tags, strict=True):
        tq.kv_put(key=uid, partition_id=PARTITION, tag=tag)


def endless(play: Callable[[str], None], status: str) -> Callable[[int], int]:
    """Ever more groups that go as ``play`` says; verl's own trainers would ask for them until the night is over."""
    asked = 0

    def refill(number: int) -> int:
        nonlocal asked
        asked += number
        assert asked < 50, "nobody stops this"
        uids = [f"group{asked - i}" for i in range(number)]
        for uid in uids:
            play(uid)
        prompts(uids, status)
        return number

    return refill


def sample(trainer: Any, refill: Callable[[int], int]) -> KVBatchMeta:
    trainer.replay_buffer.refill_fn = refill
    refill(4)
    return trainer.replay_buffer.sample(global_steps=1, partition_id=PARTITION, batch_size=4)[0]


def test_an_agent_loop_that_always_raises_stops_the_run(queue, build):
    with pytest.raises(RuntimeError, match=r"groups of rollouts were lost.*raised.*agent-loop workers"):
        sample(build("colocate_async"), endless(lambda uid: None, "failure"))


FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward")


def test_filtering_does_not_replace_dead_environments_for_ever(queue, build):
    with pytest.raises(RuntimeError, match=r"all episodes of \d+ groups failed.*\n  the lake is frozen"):
        sample(
            build("colocate_async", *FILTERED), endless(lambda uid: fill({uid: ["the lake is frozen"] * 2}), "finished")
        )


def test_filtering_does_not_hide_a_host_without_processes(queue, build):
    worn_out = str(EnvironmentFailure("restarts", "no more processes"))
    with pytest.raises(RuntimeError, match=r"step 1: .*no more processes"):
        sample(build("colocate_async", *FILTERED), endless(lambda uid: fill({uid: [worn_out] * 2}), "finished"))


def test_groups_without_a_difference_are_replaced_as_long_as_verl_wants(queue, build):
    """More of them than may fail: they are no failures."""
    equal = endless(lambda uid: fill({uid: [OTHER, OTHER]}), "finished")

    def refill(number: int) -> int:
        try:
            return equal(number)
        except AssertionError:
            uids = [f"good{i}" for i in range(4)]
            fill({uid: [PLAYED, OTHER] for uid in uids})
            prompts(uids, "finished")
            return number

    batch = sample(build("colocate_async", *FILTERED), refill)
    assert {key.split("_")[0] for key in batch.keys} == {"good0", "good1", "good2", "good3"}


def test_losses_of_another_step_do_not_count(queue, build):
    trainer = build("colocate_async")
    fill({f"good{i}": [PLAYED, OTHER] for i in range(8)})
    for step in (1, 2):
        prompts([f"lost{step}{i}" for i in range(7)], "failure")
        prompts([f"good{step * 4 - i}" for i in range(1, 5)], "finished")
        trainer.replay_buffer.refill_fn = lambda number: number
        batch, _ = trainer.replay_buffer.sample(global_steps=step, partition_id=PARTITION, batch_size=4)
        assert len({key.split("_")[0] for key in batch.keys}) == 4


def test_rows_left_by_the_batch_of_a_checkpoint_are_cleared(queue, build):
    fill({"trained": [PLAYED, OTHER], "waiting": [PLAYED, OTHER]})
    prompts(["waiting", "asked"], "finished")
    build("colocate_async", "trainer.resume_mode=disable")._load_checkpoint()
    assert {key.split("_")[0] for key in tq.kv_list(PARTITION)[PARTITION]} == {"waiting", "asked"}


# --- several updates in a step ----------------------------------------------------------------------------------------


def parts(*episodes: dict[str, list[Any]]) -> list[KVBatchMeta]:
    """A batch for each, as they are sampled one after the other."""
    batches = []
    for each in episodes:
        known = set(tq.kv_list(PARTITION).get(PARTITION, {}))
        batch = fill(each)
        new = [i for i, key in enumerate(batch.keys) if key not in known]
        batches.append(
            KVBatchMeta(keys=[batch.keys[i] for i in new], tags=[batch.tags[i] for i in new], partition_id=PARTITION)
        )
    return batches


def test_an_update_of_which_all_episodes_failed_is_left_out(queue, build):
    made = build("separate_async", "critic.enable=true")
    updates: list[str] = []
    made.actor_rollout_wg = made.critic_wg = type("Group", (), {"__getattr__": lambda _, name: updates.append(name)})()
    dead, alive = parts({"a": ["it died", "it died"]}, {"b": [PLAYED, OTHER]})
    found: list[dict[str, float]] = []
    for made.local_trigger_step, batch in enumerate((dead, alive)):
        metrics = {"actor/entropy": float("nan") if batch is dead else 0.5}
        batch = advance(made, batch, metrics)
        found.append(metrics)
        if batch.keys[0].startswith("a"):
            made._update_critic(batch, {})
            made._update_actor(batch, {})
            assert updates == []
            for name in ("advantages", "returns"):
                assert read(batch, name) == {"a_0_0": [0.0], "a_1_0": [0.0]}
        else:
            assert any(any(row) for row in read(batch, "advantages").values())
    combined = combine(made._updates)
    assert (combined["episode/count"], combined["episode/failed"]) == (4, 2)
    assert combined["episode/success_rate"] == 0.25
    assert "actor/entropy" not in found[0]
    assert "actor/entropy" in found[1]


def test_a_step_of_which_all_episodes_failed_stops_the_run(queue, build):
    made = build("separate_async")
    first, second = parts({"a": ["it died", "it died"]}, {"b": ["it burnt"]})
    advance(made, first)
    made.local_trigger_step = 1
    with pytest.raises(RuntimeError, match=r"all 3 episodes of step 1 failed:\n  it burnt\n  it died"):
        advance(made, second)


# --- verl's own slip --------------------------------------------------------------------------------------------------


def test_verls_flush_does_not_end_a_run_without_hybrid_engine(caplog):
    """verl logs with ``flush=``, which ends the run at the level INFO. When it no longer does, the seam can go."""
    assert "flush=True" in inspect.getsource(trainer_separate_async.PPOTrainerSeparateAsync._setup)
    logger = trainer_separate_async.logger
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(TypeError, match="flush"):
            logger.info("standalone only", flush=True)
        with seams.logger_of(trainer_separate_async):
            trainer_separate_async.logger.info("standalone only", flush=True)
        assert trainer_separate_async.logger is logger
    finally:
        logger.setLevel(level)
