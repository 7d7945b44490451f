"""What the trainer runs in every process before training, and a wrapper of its calls to worker groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins import registries
from verl_turnkey.plugins.actor import hidden_rank, observations, weighing
from verl_turnkey.plugins.checks import probe
from verl_turnkey.plugins.config import scorers
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit.extra_fields import FIELDS as EXTRA_FIELDS
from verl_turnkey.plugins.credit.supplied import OF_RANK
from verl_turnkey.plugins.gateway import process as agents
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.trainer.advantage_step import AdvantageStep
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, fields_of

Hook = Callable[[str, KVBatchMeta], None]
"""called with the method of a worker group and the batch"""

# Fields that no worker computes with; all others are sent, including unknown ones.
NOT_FOR_WORKERS = frozenset(
    (
        *EXTRA_FIELDS,
        *(scorers.OUT, scorers.COEFFICIENT, scorers.SCORE),
        "data_source",
        "extra_info",
        "interaction_kwargs",
        "metrics",
        "prompt",
        "raw_prompt",
        "reward_model",
        "tools_kwargs",
        "turnkey_task",
    )
)


def set_up_training(trainer: PPOTrainer, turnkey: TurnkeyConfig, advantage_step: AdvantageStep) -> None:
    """Check that every training process, on every node, has loaded the plugin; give them loss and weights."""
    workers = trainer.actor_rollout_wg.workers
    ray.get([worker.__ray_call__.remote(registries.verify) for worker in workers])
    if advantage_step.loss is not None:
        chosen = (turnkey.modules, advantage_step.loss.name, advantage_step.loss_params)
        ray.get([worker.__ray_call__.remote(registries.configure, *chosen) for worker in workers])
    if OF_RANK & {column for modifier in advantage_step.modify for column in modifier.columns}:
        ray.get([worker.__ray_call__.remote(hidden_rank.install) for worker in workers])
    if turnkey.update.weight_by != "token":
        weighed = trainer.use_critic and not advantage_step.heads  # heads learn at one token of a turn each
        weigh(workers, trainer.critic_wg.workers if weighed else [])
    if coefficient := turnkey.update.observation_coefficient:
        ray.get([worker.__ray_call__.remote(observations.learn, coefficient) for worker in workers])


def set_up_rollouts(trainer: PPOTrainer, turnkey: TurnkeyConfig, manager: Any) -> list[Any]:
    """The agent-loop workers of ``manager``, after the probe on every node and the checks in each worker."""
    loop = trainer.config.actor_rollout_ref.rollout.agent.default_agent_loop
    if loop == "turnkey_env" and turnkey.env.probe and (file := probe.task_file(trainer.config)):
        probe.probe_nodes(turnkey, file)
    workers = internals.loop_workers(manager)
    if not workers:
        logger.warning(
            "the agent-loop manager %s has no agent_loop_workers: they are not checked before the first step; "
            "metrics of hosts, reasons of failed validation episodes and the log's last episodes are missing",
            type(manager).__name__,
        )
    ray.get([worker.__ray_call__.remote(loop_worker.prepare) for worker in workers])
    if loop == "turnkey_agent":
        ray.get([worker.__ray_call__.remote(agents.prepare) for worker in workers])
    return workers


def wrap_groups(trainer: PPOTrainer, before: Hook, after: Hook, of_critic: frozenset[str] = frozenset()) -> None:
    """Replace each worker group by a :class:`WorkerCalls`; roles that share a group share the wrapper.

    ``of_critic``: fields that only the critic's workers compute with.
    """
    wrappers: dict[int, WorkerCalls] = {}
    for name in ("actor_rollout_wg", "ref_policy_wg", "critic_wg"):
        if (group := getattr(trainer, name, None)) is not None:
            kept = frozenset() if name == "critic_wg" else of_critic
            setattr(trainer, name, wrappers.setdefault(id(group), WorkerCalls(group, before, after, without=kept)))


def weigh(actors: Sequence[Any], critics: Sequence[Any]) -> None:
    """Make the losses of both roles use token weights; actor and critic may be the same processes."""
    calls = [worker.__ray_call__.remote(weighing.weigh_actor) for worker in actors]
    ray.get(calls + [worker.__ray_call__.remote(weighing.weigh_critic) for worker in critics])


def _nothing(method: str, batch: KVBatchMeta) -> None:
    pass


class WorkerCalls:
    """Wraps a worker group: calls on a batch send only the fields that workers use; ``before`` and ``after`` run around
    each call.

    All other attributes are the group's. verl sends all fields, and every write to the queue resets a selection.
    """

    METHODS = frozenset({"compute_log_prob", "compute_ref_log_prob", "infer_batch", "update_actor", "train_mini_batch"})

    def __init__(
        self,
        group: Any,
        before: Hook = _nothing,
        after: Hook = _nothing,
        *,
        also: frozenset[str] = frozenset(),
        without: frozenset[str] = frozenset(),
    ) -> None:
        """``also``: fields for this group that other workers do not compute with; ``without``: the other way round."""
        self._group, self._before, self._after = group, before, after
        self._left_out = (NOT_FOR_WORKERS | without) - also

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._group, name)
        if name not in self.METHODS:
            return attribute

        def call(batch: KVBatchMeta) -> Any:
            batch.fields = [field for field in fields_of(batch) if field not in self._left_out]
            self._before(name, batch)
            result = attribute(batch)
            self._after(name, batch)
            return result

        return call
