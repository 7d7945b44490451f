"""verl's own validation, with real rows in the queue: lost episodes are no lost games."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import transfer_queue as tq
from contract_tools import Worker
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.advantage import make_step
from verl_turnkey.plugins.notices import Failures
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.episode import Episode, Generated, PlayedStep, Prompt, RowBuilder
from verl_turnkey.plugins.shutdown import channel
from verl_turnkey.plugins.trainer import starvation
from verl_turnkey.plugins.trainer.starvation import StarvedError
from verl_turnkey.plugins.trainer.validation import validation_metrics, without_missing

LENGTH = 10
REASON = "EnvironmentFailure: environment failure (timeout): step of 'Lake' took longer than 30 s"
HOST_DIED = "EnvironmentFailure: environment failure (host): the host of 'Lake' is gone"
FAILED = {"dead": REASON, "host died": HOST_DIED}
NO_PATIENCE = "turnkey.env.patience=0"


def step(t: int, won: bool) -> PlayedStep:
    last = won and t == LENGTH - 1
    return PlayedStep(
        prompt=Prompt([5, 6]),
        turn=Generated([7], None, "go", {"min_global_steps": 1, "max_global_steps": 1}, -1, 0.0),
        record=make_step(step=t, reward=float(last), terminated=last, success=won, composed_reward=float(last)),
        observation="ice",
        answer="ice",
        invalid=None,
        unparsed=False,
        seconds=0.0,
        extra={},
        next_extra={},
    )


def rows(outcome: str) -> list[Any]:
    maker = RowBuilder(eos=2, log_probs=False)
    if outcome in FAILED:
        return maker.failed(FAILED[outcome], 1)
    won = outcome == "won"
    return maker.played(Episode([step(t, won) for t in range(LENGTH)], success=won))


@pytest.fixture
def worker(ray_queue) -> Any:
    """An agent-loop worker, as far as it is asked why episodes failed."""

    @ray.remote(num_cpus=0)
    class AgentLoopWorker:
        def fail(self) -> None:
            loop_worker._process = SimpleNamespace(failures=Failures())
            loop_worker._process.failures.add(REASON)

    made = AgentLoopWorker.remote()
    ray.get(made.fail.remote())
    return made


@pytest.fixture
def validate(queue, trainer, tokenizer, worker) -> Callable[..., dict[str, float]]:
    """``validate({data source: [[outcome, ...], ...]})``: verl's metrics of tasks whose episodes end as told.

    ``later``: how they end when the validation is played again, and again; the last for good.
    """

    def run(tasks: dict[str, list[list[str]]], *overrides: str, later: Sequence[Any] = ()) -> dict[str, float]:
        rounds = [
            [(source, outcomes) for source, of in sources.items() for outcomes in of] for sources in (tasks, *later)
        ]
        flat = rounds[0]
        (number,) = {len(outcomes) for sources in rounds for _, outcomes in sources}
        made = trainer(f"actor_rollout_ref.rollout.val_kwargs.n={number}", *overrides)

        def play(batch: TensorDict) -> None:
            now = rounds.pop(0) if len(rounds) > 1 else rounds[0]
            for uid, (source, outcomes) in zip(batch["uid"], now, strict=True):
                for session, outcome in enumerate(outcomes):
                    row = {"uid": uid, "session_id": session, "global_steps": 1, "data_source": source}
                    asyncio.run(Worker()._agent_loop_postprocess(rows(outcome), True, **row))
                tq.kv_put(key=uid, partition_id="val", tag={"status": "finished"})

        made.tokenizer, made.curr_step_profile = tokenizer, False
        made.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
        made.agent_loop_manager = SimpleNamespace(generate_sequences=play, agent_loop_workers=[worker])
        made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[worker])
        sources = np.array([source for source, _ in flat], dtype=object)
        made.val_dataloader = [{"raw_prompt": np.array(["?"] * len(flat), dtype=object), "data_source": sources}]
        return made._validate()

    return run


def test_dead_environments_are_a_share_and_no_short_games(validate, caplog):
    metrics = validate({"lake": [["won"]] * 6 + [["dead"]] * 4})
    assert metrics["val-core/lake/acc/mean@1"] == pytest.approx(0.6)
    assert metrics["val-aux/lake/acc_success_only/mean@1"] == 1.0
    assert metrics["val-aux/lake/failed/mean@1"] == pytest.approx(0.4)
    assert metrics["val-aux/lake/episode_length/mean@1"] == LENGTH
    assert metrics["val-aux/lake/env_return/mean@1"] == 1.0
    assert metrics["val-aux/lake/reward/mean@1"] == 1.0
    assert metrics["val-aux/num_turns/min"] == 2 * LENGTH
    [record] = caplog.records
    assert record.getMessage() == f"4 of 10 validation episodes failed; latest reasons:\n  {REASON}"


def test_tasks_with_fewer_played_episodes_stay_on_the_same_curve(validate):
    metrics = validate({"lake": [["won", "lost"], ["won", "dead"], ["lost", "lost"]], "sea": [["won", "won"]] * 3})
    names = {name for name in metrics if "/mean@" in name}
    assert all(name.endswith("/mean@2") for name in names)
    assert metrics["val-core/lake/acc/mean@2"] == pytest.approx(2 / 6)
    assert metrics["val-aux/lake/acc_success_only/mean@2"] == pytest.approx(2 / 5)
    assert metrics["val-aux/lake/reward/mean@2"] == pytest.approx(2 / 5)
    assert metrics["val-aux/lake/failed/mean@2"] == pytest.approx(1 / 6)
    assert metrics["val-aux/lake/episode_length/mean@2"] == LENGTH
    assert metrics["val-core/sea/acc/mean@2"] == 1.0
    assert metrics["val-aux/sea/failed/mean@2"] == 0.0


@pytest.mark.parametrize(("dead", "warns"), [(0, False), (1, False), (2, True)])
def test_a_warning_above_a_twentieth(validate, caplog, dead, warns):
    metrics = validate({"lake": [["lost"]] * (20 - dead) + [["dead"]] * dead})
    assert metrics["val-aux/lake/failed/mean@1"] == pytest.approx(dead / 20)
    assert metrics["val-core/lake/acc/mean@1"] == 0.0
    assert ("validation episodes failed" in caplog.text) is warns


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The seconds of each sleep between attempts. No test waits for them: the clock moves by these alone."""
    waited: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append)
    monkeypatch.setattr(starvation, "time", clock)
    return waited


@pytest.fixture
def saved(monkeypatch) -> list[int]:
    """Steps of which a checkpoint was written."""
    steps: list[int] = []
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: steps.append(self.global_steps))
    return steps


def test_a_host_that_dies_costs_a_validation_its_time(validate, pauses, saved, caplog):
    """One host for all: its open episodes are most of those of the validation, which is played again."""
    died = {"lake": [["won"], ["host died"], ["host died"], ["host died"]]}
    whole = {"lake": [["won"], ["won"], ["lost"], ["won"]]}
    metrics = validate(died, "trainer.save_freq=5", later=[died, whole])
    assert metrics["val-core/lake/acc/mean@1"] == pytest.approx(0.75)
    assert metrics["val-aux/lake/failed/mean@1"] == 0.0
    assert sum(pauses) == 2 + 4
    assert saved == []
    assert caplog.text.count("3 of 4 validation episodes failed; latest reasons:") == 2
    assert not tq.kv_list("val").get("val")  # nothing of the attempts is left for the next


def test_failures_that_last_as_long_as_the_patience_stop_the_run(validate, pauses, saved):
    """A fault of the environment's own ends in the same way, after a checkpoint of the step, which is trained."""
    dead = {"lake": [["won"], ["dead"], ["dead"]]}
    with pytest.raises(StarvedError, match=r"2 of 3 validation episodes failed; latest reasons:\n  .*30 s"):
        validate(dead, "trainer.save_freq=5", "turnkey.env.patience=10")
    assert sum(pauses) == 2 + 4 + 4
    assert saved == [1]


def test_a_signal_stops_a_validation_that_would_be_repeated(validate, pauses, saved):
    channel.put("signal", "SIGTERM")
    try:
        with pytest.raises(channel.StoppedError, match=r"^SIGTERM: 2 of 3 validation episodes failed"):
            validate({"lake": [["won"], ["dead"], ["dead"]]}, "trainer.save_freq=5", "turnkey.env.patience=10")
    finally:
        channel.delete("signal")
    assert (pauses, saved) == ([], [1])


def test_half_are_not_most(validate, pauses, saved):
    validate({"lake": [["won"], ["dead"]]}, "trainer.save_freq=5", NO_PATIENCE)
    assert (pauses, saved) == ([], [])


def test_runs_without_checkpoints_write_none_when_they_stop(validate, saved):
    with pytest.raises(StarvedError):
        validate({"lake": [["dead"]]}, "trainer.save_freq=-1", NO_PATIENCE)
    assert saved == []


SOURCES = ["Lake", "Lake", "Lake", "Grid"]
TASKS = ["a", "a", "b", "c"]
INFOS = {
    "acc": [1.0, None, 0.0, 1.0],
    "episode_length": [4.0, None, 10.0, 7.0],
    "failed": [0.0, 1.0, 0.0, 0.0],
    "env_return": [0.5, 0.25, 0.0, 1.0],
}


def test_a_failed_episode_has_no_length_and_is_not_solved():
    infos = without_missing(SOURCES, TASKS, INFOS)
    lake = infos["Lake"]
    assert (lake["acc"]["mean@2"], lake["acc"]["mean@1"]) == (0.5, 0.0)
    assert lake["acc_success_only"]["mean@1"] == pytest.approx((1.0 + 0.0) / 2)
    assert lake["episode_length"]["mean@1"] == pytest.approx((4 + 10) / 2)
    assert lake["failed"]["mean@2"] == 0.5
    assert lake["env_return"]["mean@2"] == pytest.approx((0.5 + 0.25) / 2)
    assert infos["Grid"]["episode_length"]["mean@1"] == 7


def test_verls_own_counts_are_passed_on_where_it_takes_them():
    expected = {("Lake", "a"): 2}

    def newest(sources, uids, infos, turns, expected_acc_counts=None):
        return {"given": expected_acc_counts}

    def older(sources, uids, infos, turns):
        from verl.trainer.ppo.v1 import trainer_base

        return trainer_base.process_validation_metrics(sources, uids, infos)["Grid"]["episode_length"]

    assert validation_metrics(newest, SOURCES, TASKS, INFOS, [1], expected) == {"given": expected}
    assert validation_metrics(older, SOURCES, TASKS, INFOS, [1], None)["mean@1"] == 7
