"""A trainer whose driver got a signal: a checkpoint where the step ends, then the end; what the watchdog looks at."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from contract_tools import PARTITION, SEPARATE, Compose, Saves, batch_of, kill
from transfer_queue.controller import TransferQueueController
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins.shutdown import channel
from verl_turnkey.plugins.shutdown.watchdog import Watchdog
from verl_turnkey.plugins.verl_api import queue as queue_access
from verl_turnkey.plugins.view.join import read

MODES = ("sync", "colocate_async", "separate_async")
Build = Callable[..., Any]


@pytest.fixture
def build(queue, compose: Compose, tmp_path: Path) -> Iterator[Build]:
    """A trainer before its fourth step that has not started its workers and saves below ``tmp_path``."""

    def made(mode: str, *overrides: str) -> Any:
        overrides = (
            *(SEPARATE if mode == "separate_async" else ()),
            f"trainer.default_local_dir={tmp_path}",
            *overrides,
        )
        config = compose("+turnkey=gigpo", f"trainer.v1.trainer_mode=turnkey_{mode}", *overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.checkpoint_manager = trainer.actor_rollout_wg = trainer.train_dataloader = Saves()
        trainer.agent_loop_manager = SimpleNamespace(agent_loop_workers=[])
        trainer.on_sample_end = lambda: None  # puts the servers to sleep
        trainer.global_steps, trainer.checkpointing.saved, trainer.timing_raw = 4, 1, {}
        return trainer

    yield made
    for entry in ("signal", "dead"):
        channel.delete(entry)


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own step ends at once."""
    monkeypatch.setattr(PPOTrainer, "step", lambda *_: batch_of({}))


def saved(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("global_step_*"))


@pytest.mark.parametrize("mode", MODES)
def test_the_step_ends_with_a_checkpoint_and_the_next_one_does_not_begin(
    build: Build, stepping, tmp_path: Path, mode: str
):
    trainer = build(mode, "trainer.save_freq=100")
    trainer.step({}, {})
    assert saved(tmp_path) == []
    channel.put("signal", "SIGTERM")
    trainer.step({}, {})
    assert saved(tmp_path) == ["global_step_4"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    calls = list(trainer.actor_rollout_wg.calls)
    trainer._save_checkpoint()  # verl's own turn, where save_freq has one here
    trainer.global_steps = 5
    with pytest.raises(
        channel.StoppedError, match=r"^SIGTERM: stopped after step 4; the newest checkpoint is global_step_4$"
    ):
        trainer.on_step_begin()
    assert trainer.actor_rollout_wg.calls == calls
    assert trainer.global_steps == 5


@pytest.mark.parametrize("mode", MODES)
def test_a_signal_after_the_step_still_saves_it(build: Build, tmp_path: Path, mode: str):
    """During validation, or the transfer of weights."""
    trainer = build(mode, "trainer.save_freq=100")
    trainer.global_steps = 5
    channel.put("signal", "SIGINT")
    with pytest.raises(channel.StoppedError, match=r"^SIGINT: stopped after step 4; .* is global_step_4$"):
        trainer.on_step_begin()
    assert saved(tmp_path) == ["global_step_4"]


@pytest.mark.parametrize(("step", "freq"), [(5, -1), (1, 100)])
def test_nothing_is_saved_unasked_or_before_the_first_step(
    build: Build, stepping, tmp_path: Path, step: int, freq: int
):
    trainer = build("sync", f"trainer.save_freq={freq}")
    trainer.global_steps, trainer.checkpointing.saved = step, 0
    channel.put("signal", "SIGTERM")
    if freq < 0:
        trainer.step({}, {})
    with pytest.raises(channel.StoppedError, match=rf"stopped after step {step - 1}; there is no checkpoint$"):
        trainer.on_step_begin()
    assert saved(tmp_path) == []


def test_progress_is_steps_their_phases_and_rollouts(build: Build):
    trainer = build("sync")
    seen = [trainer.shutdown.progress()]
    trainer.timing_raw["gen"] = 1.0
    seen.append(trainer.shutdown.progress())
    trainer.replay_buffer.partitions[PARTITION]["a_0_0"] = {}
    seen.append(trainer.shutdown.progress())
    trainer.replay_buffer.finished_keys[PARTITION].add("a")
    seen.append(trainer.shutdown.progress())
    trainer.global_steps += 1
    seen.append(trainer.shutdown.progress())
    assert len({str(progress) for progress in seen}) == len(seen)
    assert trainer.shutdown.progress() == seen[-1]


@ray.remote(num_cpus=0)
class Actor:
    pass


def looks_at(processes: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """What one look of the watchdog's says, with a minute for the answers."""
    return Watchdog(60, lambda: 1, lambda: processes, lambda _: None, look_seconds=120).examine()


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_every_kind_of_process_is_looked_at(build: Build, mode: str):
    trainer = build(mode)
    actors = [Actor.remote() for _ in range(6)]

    def group(actor: Any) -> Any:
        return SimpleNamespace(workers=[actor])

    def servers(actor: Any) -> Any:
        return SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[actor])])

    trainer.actor_rollout_wg, trainer.critic_wg = group(actors[0]), group(actors[1])
    trainer.agent_loop_manager.agent_loop_workers = [actors[2], actors[3]]
    trainer.llm_server_manager = servers(actors[4])
    names = ["process 0 of the trainer", "process 0 of the critic", "agent-loop worker 0", "agent-loop worker 1"]
    names += ["inference server 0"]
    if mode == "separate_async":
        trainer.standalone_server_manager = servers(actors[5])
        names += ["inference server 1"]
    processes = dict(trainer.shutdown.processes())
    assert list(processes) == names
    for actor in processes.values():
        kill(actor)
    dead, silent = looks_at(processes)
    assert (sorted(dead), silent) == (sorted(names), [])
    trainer.shutdown.died("a process died: inference server 0")
    assert channel.get("dead") == "a process died: inference server 0; the newest checkpoint is global_step_1"


def test_a_server_that_dies_before_the_first_weights_reach_it_ends_the_run(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    trainer = build("sync", "turnkey.stop.patience=600", f"turnkey.log.trajectories={tmp_path}/log")
    del trainer.agent_loop_manager  # which verl makes later
    server = Actor.remote()
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[server])])
    ray.kill(server)
    monkeypatch.setattr(Watchdog.__init__, "__defaults__", (2.0,))

    def update_weights(*_: Any) -> None:
        until = time.monotonic() + 120
        while channel.get("dead") is None and time.monotonic() < until:
            time.sleep(0.1)

    trainer.checkpoint_manager = SimpleNamespace(update_weights=update_weights)
    trainer.on_init_end()
    assert re.match(
        r"a process died: inference server 0: .*; the newest checkpoint is global_step_1", channel.get("dead")
    )


@pytest.fixture
def controller(ray_queue, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A controller of the queue's, beside the one of this session, which other tests need."""
    monkeypatch.setattr(queue_access, "NAMESPACE", "another_queue")
    made = TransferQueueController.options(name=queue_access.CONTROLLER, namespace="another_queue", num_cpus=0).remote()
    ray.get(made.__ray_ready__.remote())
    yield made
    ray.kill(made)


def test_the_queues_controller_is_looked_at(build: Build):
    """Every call to the queue waits for it without end."""
    trainer = build("sync")
    trainer.shutdown.watchdog(None)
    name, actor = list(trainer.shutdown.processes())[-1]
    assert name == "TransferQueue's controller"
    assert actor == ray.get_actor("TransferQueueController", namespace="transfer_queue")
    assert looks_at({name: actor}) == ({}, [])


def test_a_dead_controller_of_the_queue_is_named(build: Build, controller: Any):
    trainer = build("sync")
    trainer.shutdown.watchdog(None)
    kill(controller)
    dead, silent = looks_at(dict(trainer.shutdown.processes()))
    assert ([*dead], silent) == (["TransferQueue's controller"], [])
    assert queue_access.controller() is None


def test_what_was_played_before_a_process_died_is_in_the_log(build: Build, tmp_path: Path):
    """By rollout workers and by the trainer, whose own thread waits for the dead one for ever."""
    trainer = build("sync", f"turnkey.log.trajectories={tmp_path}/log")
    row = {"train_step": [4], "value": [1.0]}

    def plays(actor: Any, folder: str, row: dict[str, Any]) -> None:
        from types import SimpleNamespace

        from verl_turnkey.plugins.log.writer import UNNAMED, Tables
        from verl_turnkey.plugins.rollout import worker

        log = Tables(folder, UNNAMED, "player", seconds=600)
        worker._process = SimpleNamespace(log=log)
        log.put("steps", 4, row)

    player, dead = Actor.remote(), Actor.remote()
    ray.get(player.__ray_call__.remote(plays, f"{tmp_path}/log", row | {"name": ["played"]}))
    kill(dead)
    trainer.log.tables.put("steps", 4, row | {"name": ["trained"]})
    trainer.agent_loop_manager.agent_loop_workers = [dead, player]
    trainer.shutdown.died("a process died: agent-loop worker 0")
    assert sorted(read(tmp_path / "log", "steps")["name"]) == ["played", "trained"]
