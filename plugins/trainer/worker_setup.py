"""What the trainer runs in every process before training, a wrapper of its calls to worker groups, critics of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins import register
from verl_turnkey.plugins.actor import hidden_rank, loss_inputs, weighing
from verl_turnkey.plugins.checks import data, probe
from verl_turnkey.plugins.config import scorers
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit.rows import EXTRA_FIELDS
from verl_turnkey.plugins.credit.trainer_columns import OF_RANK, target_field, value_field
from verl_turnkey.plugins.critic.worker import critic_with
from verl_turnkey.plugins.gateway import process as agents
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.prm.worker import of_response
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.trainer.advantage_step import AdvantageStep
from verl_turnkey.plugins.trainer.checkpointing import check_writable
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, fields_of, partition_of

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
    """Check that all training processes have loaded the plugin and can write; give them loss and weights."""
    workers = trainer.actor_rollout_wg.workers
    ray.get([worker.__ray_call__.remote(register.verify) for worker in workers])
    check_writable(trainer)
    if advantage_step.loss is not None:
        chosen = (turnkey.modules, advantage_step.loss.name, advantage_step.loss_params)
        ray.get([worker.__ray_call__.remote(register.configure, *chosen) for worker in workers])
    if OF_RANK & {column for modifier in advantage_step.modify for column in modifier.columns}:
        ray.get([worker.__ray_call__.remote(hidden_rank.install) for worker in workers])
    if turnkey.update.weight_by != "token":
        weighed = trainer.use_critic and not advantage_step.heads  # heads learn at one token of a turn each
        weigh(workers, trainer.critic_wg.workers if weighed else [])
    if coefficient := turnkey.update.observation_coefficient:
        ray.get([worker.__ray_call__.remote(loss_inputs.learn_observations, coefficient) for worker in workers])


def set_up_rollouts(trainer: PPOTrainer, turnkey: TurnkeyConfig, manager: Any) -> list[Any]:
    """The agent-loop workers of ``manager``, after the probe on every node and the checks in each worker."""
    loop = trainer.config.actor_rollout_ref.rollout.agent.default_agent_loop
    if loop == "turnkey_env" and turnkey.env.probe and (file := data.task_file(trainer.config)):
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


def dealing(manager: Any) -> internals.Dealing:
    """``manager``, whose workers take turns, and which marks prompts of a validation for our loops."""
    return internals.Dealing(manager, VALIDATION)


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


class WorkerCalls:
    """Wraps a worker group: calls on a batch send only the fields that workers use; ``before`` and ``after`` run around
    each call.

    All other attributes are the group's. verl sends all fields, and every write to the queue resets a selection.
    """

    METHODS = frozenset({"compute_log_prob", "compute_ref_log_prob", "infer_batch", "update_actor", "train_mini_batch"})

    def __init__(
        self,
        group: Any,
        before: Hook = lambda method, batch: None,
        after: Hook = lambda method, batch: None,
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


class ValueHeads:
    """The worker of the critic and its fields; with a method that reads one value it does nothing."""

    def __init__(self, trainer: PPOTrainer, step: AdvantageStep) -> None:
        self._trainer, self._heads = trainer, step.heads
        self.further = [value_field(step.heads, head) for head in step.heads[1:]]
        """fields of the values after the first, which has verl's field"""

    @property
    def fields(self) -> frozenset[str]:
        """The fields that only the critic's workers compute with."""
        return frozenset((*self.further, *map(target_field, self._heads)))

    def join(self) -> None:
        """Replace verl's critic class, before verl creates the workers."""
        if self._heads:
            self._trainer.role_worker_mapping[Role.Critic] = ray.remote(critic_with(self._heads))

    def computed(self, batch: KVBatchMeta) -> None:
        """After verl's pass: cut the further values to the responses, as verl does with its own."""
        if self._heads:
            data = partition_of(batch).read(batch.keys, [*self.further, "response_mask"])
            cut = {name: of_response(data[name], data["response_mask"], shift=1) for name in self.further}
            partition_of(batch).write(batch.keys, cut)
            batch.fields = None  # an earlier selection would hide the new fields
