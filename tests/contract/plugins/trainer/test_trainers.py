"""Our trainers in the place of verl's three, and what only the asynchronous ones meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import transfer_queue as tq
from contract_tools import PARTITION, SEPARATE, Compose, Saves, advance, fill
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_separate_async
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.plugins.shutdown import channel
from verl_turnkey.plugins.trainer import starvation
from verl_turnkey.plugins.trainer.starvation import StarvedError
from verl_turnkey.plugins.trainer.trainer import (
    TurnkeyTrainerColocateAsync,
    TurnkeyTrainerSeparateAsync,
    TurnkeyTrainerSync,
)
from verl_turnkey.plugins.verl_api import internals

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
    assert made.advantage_step.estimator.name == "gigpo"
    assert made.advantage_step.params.gamma == 0.95
    assert made.batching.mini_batches("actor") == mini_batches


@pytest.fixture
def build(compose: Compose) -> Callable[..., Any]:
    """A trainer of any kind that has not started its workers."""

    def made(mode: str, *overrides: str) -> Any:
        overrides = (*(SEPARATE if mode == "separate_async" else ()), *overrides)
        config = compose("+turnkey=gigpo", f"trainer.v1.trainer_mode=turnkey_{mode}", *overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.global_steps = 1
        return trainer

    return made


@pytest.fixture
def signalled(ray_queue) -> Iterator[Callable[[str], None]]:
    """``signalled(name)``: the driver gets the signal."""
    yield lambda name: channel.put("signal", name)
    channel.delete("signal")


# --- groups that are lost before there is a batch ---------------------------------------------------------------------

AT_ONCE = "turnkey.env.patience=0"


def prompts(uids: list[str], status: str) -> None:
    tags = [{"is_prompt": True, "status": status, "global_steps": 1} for _ in uids]
    for uid, tag in zip(uids, tags, strict=True):
        tq.kv_put(key=uid, partition_id=PARTITION, tag=tag)


def endless(play: Callable[[str], Any], status: str = "finished", name: str = "group") -> Callable[[int], int]:
    """Ever more groups that go as ``play`` says; verl's own trainers would ask for them until the night is over."""
    total = 0

    def refill(number: int) -> int:
        nonlocal total
        total += number
        assert total < 50, "nobody stops this"
        uids = [f"{name}{total - i}" for i in range(number)]
        for uid in uids:
            play(uid)
        prompts(uids, status)
        return number

    return refill


def sample(trainer: Any, refill: Callable[[int], int]) -> KVBatchMeta:
    trainer.replay_buffer.refill_fn = trainer._add_prompts_to_generate = refill
    refill(4)
    return trainer.replay_buffer.sample(global_steps=1, partition_id=PARTITION, batch_size=4)[0]


def groups(batch: KVBatchMeta) -> set[str]:
    return {key.split("_")[0] for key in batch.keys}


def frozen(uid: str) -> None:
    fill({uid: ["the lake is frozen"] * 2})


def test_an_agent_loop_that_always_raises_stops_the_run(queue, build):
    with pytest.raises(StarvedError, match=r"groups of rollouts were lost.*raised.*agent-loop workers"):
        sample(build("colocate_async", AT_ONCE), endless(lambda uid: None, "failure"))


FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward")


def test_filtering_does_not_replace_dead_environments_for_ever(queue, build):
    with pytest.raises(StarvedError, match=r"step 1: all episodes of \d+ groups failed.*\n  the lake is frozen"):
        sample(build("colocate_async", *FILTERED, AT_ONCE), endless(frozen))


@pytest.mark.parametrize(
    ("mode", "lost"),
    [(mode, lost) for mode in ("sync", "colocate_async") for lost in (frozen, lambda uid: None)],  # None: no rows
)
def test_a_batch_of_failed_episodes_alone_is_asked_for_again(queue, build, mode, lost):
    """Twice: what was played in between gives the next failure its time anew."""
    trainer = build(mode, "turnkey.env.patience=0.01")
    for name in ("first", "second"):
        plays = iter([lost] * 4 + [lambda uid: fill({uid: [PLAYED, "it died"]})] * 4)
        batch = sample(trainer, endless(lambda uid, plays=plays: next(plays)(uid), name=name))
        assert sorted(batch.keys) == [f"{name}{i}_{session}_0" for i in range(5, 9) for session in range(2)]
        assert set(tq.kv_list(PARTITION)[PARTITION]) == set(batch.keys), "the lost rows are cleared"
        tq.kv_clear(keys=batch.keys, partition_id=PARTITION)


def test_an_exhausted_host_costs_its_episodes_and_not_the_run(queue, build):
    worn_out = str(EnvironmentFailure("restarts", "no more processes"))
    played = endless(lambda uid: fill({uid: [worn_out, PLAYED]}))
    made = build("colocate_async", AT_ONCE)
    batch = sample(made, played)
    metrics: dict[str, Any] = {}
    advance(made, batch, metrics)
    assert (metrics["episode/count"], metrics["episode/failed"]) == (8, 4)


@pytest.fixture
def clock(ray_queue, monkeypatch) -> list[float]:
    """The time, which passes where somebody sleeps, and the seconds of each sleep behind it."""
    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(starvation, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    return clock


def test_pauses_grow_until_patience_ends(clock):
    patience = starvation.Patience(seconds=20)
    for _ in range(2):
        for pause, attempt in ((2, 3), (4, 0), (8, 0), (3, 0)):  # and seconds that the attempt after it takes
            began = clock[0]
            patience.lose("a")
            assert clock[0] - began == pause
            clock[0] += attempt
        assert max(clock[1:]) <= starvation.LOOK_SECONDS
        with pytest.raises(StarvedError, match="the reason"):
            patience.lose("the reason")
        patience.restore()


def test_a_signal_ends_a_pause(clock, monkeypatch, signalled):
    sleep = starvation.time.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if clock[0] >= 104:
            signalled("SIGTERM")

    monkeypatch.setattr(starvation.time, "sleep", interrupted)
    patience = starvation.Patience(seconds=600)
    patience.lose("a")
    with pytest.raises(channel.StoppedError, match=r"^SIGTERM: the reason$"):
        patience.lose("the reason")
    assert clock[0] == 104, "of a pause until 106"


def test_a_signal_ends_a_step_whose_episodes_all_fail(starving, signalled):
    made, saves = starving("trainer.save_freq=20")
    signalled("SIGINT")
    with pytest.raises(channel.StoppedError, match=r"SIGINT: step 5: all 8 episodes of a batch failed"):
        made.step({}, {})
    assert saves.calls == ["sleep", "global_step_4 4"]


@pytest.fixture
def starving(queue, build, tmp_path) -> Callable[..., tuple[Any, Saves]]:
    """A trainer at step 5 all of whose episodes fail."""

    def made(*overrides: str) -> tuple[Any, Saves]:
        trainer = build("sync", AT_ONCE, f"trainer.default_local_dir={tmp_path}", *overrides)
        saves = Saves()
        trainer.checkpoint_manager = trainer.actor_rollout_wg = trainer.train_dataloader = saves
        trainer.curr_step_profile = False
        trainer.global_steps = 5
        refill = endless(frozen)
        trainer._add_batch_to_generate = lambda: refill(4)
        return trainer, saves

    return made


def test_a_run_that_can_play_nothing_saves_its_last_step_and_stops(starving, tmp_path):
    made, saves = starving("trainer.save_freq=20")
    with pytest.raises(StarvedError, match=r"step 5: all 8 episodes of a batch failed:\n  the lake is frozen"):
        made.step({}, {})
    assert saves.calls == ["sleep", "global_step_4 4"]  # the memory of the servers is free before anything is saved
    assert made.global_steps == 5
    resumed, saves = starving("trainer.save_freq=20")
    resumed._load_checkpoint()
    assert resumed.global_steps == 4
    resumed.global_steps += 1
    saves.calls.clear()
    with pytest.raises(StarvedError):
        resumed.step({}, {})
    assert saves.calls == [], "it is there already"


@pytest.mark.parametrize("saved", [False, True])
def test_nothing_is_saved_twice_or_unasked(starving, saved):
    made, saves = starving("trainer.save_freq=1" if saved else "trainer.save_freq=-1")
    if saved:
        made.global_steps = 4
        made._save_checkpoint()
        made.global_steps = 5
        saves.calls.clear()
    with pytest.raises(StarvedError):
        made.step({}, {})
    assert saves.calls == []


# --- group filtering --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["acc", "reward"])
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_groups_are_filtered_by_what_was_played(queue, build, mode, metric):
    made = build(mode, FILTERED[0], f"algorithm.filter_groups.metric={metric}")
    won, lost = PLAYED, OTHER
    kept = {"a": [won, lost, won, won], "b": [won, lost, "it died", "it died"], "c": [lost, won, "it died", won]}
    alike = {
        "d": [won] * 4,
        "e": [won, won, "it died", won],
        "f": [lost, lost, "it died", "it died"],
        "g": ["it died", "it died", "it died", won],
        "h": ["it died"] * 4,
    }
    fill(kept | alike)
    prompts([*kept, *alike], "finished")
    made.replay_buffer.refill_fn = lambda number: number
    batch, metrics = made.replay_buffer.sample(global_steps=1, partition_id=PARTITION, batch_size=3)
    assert groups(batch) == set(kept)
    assert metrics["training/filter_groups/evicted_samples"] == len(alike)


def test_a_metric_that_no_row_has_is_still_an_error(queue, build):
    made = build("colocate_async", FILTERED[0], "algorithm.filter_groups.metric=accuracy")
    fill({"a": [PLAYED, "it died"]})
    prompts(["a"], "finished")
    with pytest.raises(RuntimeError, match="missing DAPO metric 'accuracy'"):
        made.replay_buffer.sample(global_steps=1, partition_id=PARTITION, batch_size=1)


def test_groups_without_a_difference_are_replaced_as_long_as_verl_wants(queue, build):
    """More of them than may fail: they are no failures."""
    equal = endless(lambda uid: fill({uid: [OTHER, OTHER]}))

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


def alike(uid: str) -> None:
    fill({uid: [OTHER, OTHER]})


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize(
    ("limit", "batches", "words"),
    [
        ("algorithm.filter_groups.max_num_gen_batches=2", 2, "max_num_gen_batches=2"),
        (AT_ONCE, starvation.ALIKE, "longer than turnkey.env.patience=0 s"),
        (f"algorithm.filter_groups.max_num_gen_batches=-1 {AT_ONCE}", starvation.ALIKE, "turnkey.env.patience=0 s"),
    ],
)
def test_groups_that_all_end_alike_are_reported_and_stop_the_run(queue, build, caplog, mode, limit, batches, words):
    made = build(mode, *FILTERED, *limit.split())
    size = made.config.data.train_batch_size
    with pytest.raises(StarvedError, match=rf"dropped \d+ groups, .*\({batches} batches of {size}\).*none: .*{words}"):
        sample(made, endless(alike))
    assert f"(1 batch of {size}), and kept none. More tasks are played" in caplog.text


def test_a_signal_ends_a_step_that_keeps_no_group(queue, build, signalled):
    signalled("SIGINT")
    with pytest.raises(channel.StoppedError, match=r"SIGINT: step 1: group filtering dropped .* and kept none"):
        sample(build("colocate_async", *FILTERED), endless(alike))


def test_losses_of_another_step_do_not_count(queue, build):
    trainer = build("colocate_async", AT_ONCE)
    fill({f"good{i}": [PLAYED, OTHER] for i in range(8)})
    for step in (1, 2):
        prompts([f"lost{step}{i}" for i in range(8)], "failure")
        prompts([f"good{step * 4 - i}" for i in range(1, 5)], "finished")
        trainer.replay_buffer.refill_fn = lambda number: number
        batch, _ = trainer.replay_buffer.sample(global_steps=step, partition_id=PARTITION, batch_size=4)
        assert len({key.split("_")[0] for key in batch.keys}) == 4


def test_rows_left_by_the_batch_of_a_checkpoint_are_cleared(queue, build):
    fill({"trained": [PLAYED, OTHER], "waiting": [PLAYED, OTHER]})
    prompts(["waiting", "asked"], "finished")
    build("colocate_async", "trainer.resume_mode=disable")._load_checkpoint()
    left = set(tq.kv_list(PARTITION)[PARTITION])
    assert left == {"waiting", "asked", "waiting_0_0", "waiting_1_0", "waiting_1_1"}


# --- verl's own slip --------------------------------------------------------------------------------------------------


def test_verls_flush_does_not_end_a_run_without_hybrid_engine(caplog):
    """verl 0.9.1 logs with ``flush=``, which ends the run at the level INFO."""
    logger = trainer_separate_async.logger
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(TypeError, match="flush"):
            logger.info("standalone only", flush=True)
        with internals.logger_of(trainer_separate_async):
            trainer_separate_async.logger.info("standalone only", flush=True)
        assert trainer_separate_async.logger is logger
    finally:
        logger.setLevel(level)
