"""verl's own manager of agent-loop workers deals prompts to all of them, also one by one, and marks validation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils

from verl_turnkey.plugins.log.writer import UNNAMED, read_segments
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.verl_api import internals


@ray.remote(num_cpus=0)
class Worker:
    """Notes the prompts it is given; of its configuration, only the name of the agent loop."""

    def __init__(self) -> None:
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "mine"}}}})
        self.prompts: list[int] = []
        self.marked: list[bool] = []

    def generate_sequences(self, prompts: TensorDict) -> None:
        self.prompts += prompts["prompt"].tolist()
        self.marked.append(VALIDATION in prompts and prompts[VALIDATION])

    def seen(self) -> list[int]:
        return self.prompts

    def marks(self) -> list[bool]:
        return self.marked


def test_every_worker_gets_its_part_of_the_refills(ray_queue, trainer, monkeypatch):
    manager: Any = AgentLoopManagerTQ.__new__(AgentLoopManagerTQ)  # its construction starts model servers
    workers = manager.agent_loop_workers = [Worker.remote() for _ in range(4)]
    sizes = [1, 1, 1, 5, 4, 1]

    def fit(self: PPOTrainer, manager: Any) -> None:
        start = 0
        for size in sizes:
            prompts = torch.arange(start, start + size)
            manager.generate_sequences(TensorDict({"prompt": prompts}, batch_size=[size]))
            start += size

    monkeypatch.setattr(PPOTrainer, "fit", fit)
    trainer().fit(manager)
    # One by one; 5 are dealt by twos and so to three of four; each call goes on where the last one ended.
    assert ray.get([worker.seen.remote() for worker in workers]) == [
        [0, 5, 6, 10],
        [1, 7, 11],
        [2, 8, 12],
        [3, 4, 9],
    ]


class Manager:
    """A user's own (``agent_loop_manager_class``), with nothing but what verl calls; takes no further attributes."""

    __slots__ = ("marked", "prompts")

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.marked: list[bool] = []

    @classmethod
    async def create(cls, **_: Any) -> Manager:
        return cls()

    def generate_sequences(self, prompts: TensorDict) -> None:
        self.prompts += prompts["prompt"].tolist()
        self.marked.append(VALIDATION in prompts and prompts[VALIDATION])


def train_and_validate(manager: Any) -> None:
    for validate in (False, True):
        batch = TensorDict({"prompt": torch.arange(2)}, batch_size=[2])
        if validate:
            tensordict_utils.assign_non_tensor_data(batch, "validate", True)
        manager.generate_sequences(batch)


def test_a_manager_of_ones_own_needs_no_workers(ray_queue, trainer, monkeypatch, caplog, tmp_path: Path):
    manager, steps = Manager(), []

    def fit(self: PPOTrainer, manager: Any) -> None:
        train_and_validate(manager)
        self.hosts.ask()
        steps.append(self.hosts.read())
        self.log.flush()
        self.log.keep()
        steps.append([*dict(self.shutdown.processes())])

    monkeypatch.setattr(PPOTrainer, "fit", fit)
    made = trainer(f"turnkey.log.trajectories={tmp_path}")
    made.actor_rollout_wg = SimpleNamespace(workers=[])
    made.llm_server_manager = None
    monkeypatch.setattr("verl_turnkey.plugins.verl_api.internals.server_managers", lambda trainer: [])
    made.fit(manager)
    assert manager.prompts == [0, 1, 0, 1]
    assert manager.marked == [False, True]
    assert steps == [{}, ["TransferQueue's controller"]]
    assert "the agent-loop manager Manager has no agent_loop_workers" in caplog.text


@ray.remote(num_cpus=0)
class Player:
    """A worker of a user's own, which knows nothing of verl."""


class Owner(Manager):
    """Not verl's manager, with workers under verl's name that nobody may rearrange."""

    __slots__ = ("players",)

    def __init__(self) -> None:
        super().__init__()
        self.players = (Player.remote(), object())

    @property
    def agent_loop_workers(self) -> tuple[Any, ...]:
        return self.players


class Verls(AgentLoopManagerTQ):
    """A subclass of verl's, which adds to what its workers are asked."""

    def __init__(self) -> None:  # verl's starts model servers
        self.agent_loop_workers, self.batches = [Worker.remote(), Worker.remote()], 0

    def generate_sequences(self, prompts: TensorDict) -> None:
        self.batches += 1
        super().generate_sequences(prompts)


@pytest.mark.parametrize("kind", [Owner, Verls])
def test_a_manager_of_ones_own_keeps_its_workers(ray_queue, trainer, monkeypatch, kind):
    manager: Any = kind()
    workers = manager.agent_loop_workers

    def fit(self: PPOTrainer, manager: Any) -> None:
        self.agent_loop_manager = manager
        for start in range(3):
            manager.generate_sequences(TensorDict({"prompt": torch.arange(start, start + 1)}, batch_size=[1]))
        assert len(internals.loop_workers(manager)) == (1 if kind is Owner else 2)

    monkeypatch.setattr(PPOTrainer, "fit", fit)
    trainer().fit(manager)
    if kind is Owner:
        assert (manager.prompts, manager.agent_loop_workers) == ([0, 1, 2], workers)
    else:
        assert manager.batches == 3
        assert ray.get([worker.seen.remote() for worker in workers]) == [[0, 2], [1]]


def test_an_episode_can_tell_that_it_is_of_a_validation_and_the_log_of_which_start(
    ray_queue, trainer, monkeypatch, tmp_path: Path
):
    """As verl's validation asks for episodes, after a checkpoint of step 3 was loaded."""
    manager: Any = AgentLoopManagerTQ.__new__(AgentLoopManagerTQ)
    (worker,) = manager.agent_loop_workers = [Worker.remote()]
    monkeypatch.setattr(PPOTrainer, "fit", lambda self, manager: train_and_validate(manager))
    made = trainer(f"turnkey.log.trajectories={tmp_path}/log")
    made.global_steps, made.actor_rollout_wg = 3, SimpleNamespace(workers=[])
    made.fit(manager)
    assert ray.get(worker.marks.remote()) == [False, True]
    assert read_segments(tmp_path / "log")[UNNAMED]["resumed_from"] == 3
