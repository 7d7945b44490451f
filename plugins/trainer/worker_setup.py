"""What the trainer runs in every training process before training, and the wrapper of its calls to worker groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from transfer_queue import KVBatchMeta

from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins import registries
from verl_turnkey.plugins.actor import loss, weighing
from verl_turnkey.plugins.verl_api import internals, ledger

# Fields that no worker computes with; all others are sent, unknown names included.
NOT_FOR_WORKERS = frozenset(
    (
        "data_source",
        "extra_fields",
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


def verify(worker: Any) -> None:
    """Check that the process has loaded the plugin."""
    ledger.verify(("estimator",))


def configure(worker: Any, modules: Sequence[str], name: str, params: Any) -> None:
    """Set the parameters of our loss ``name``, which one of ``modules`` (``turnkey.modules``) may register."""
    import_modules(modules)
    registries.register_losses()
    ledger.verify(("loss",), (name,))
    loss.use(worker, name, params)


def weigh(actors: Sequence[Any], critics: Sequence[Any]) -> None:
    """Make the losses of both roles take token weights; actor and critic may be the same processes."""
    calls = [worker.__ray_call__.remote(weighing.weigh_actor) for worker in actors]
    ray.get(calls + [worker.__ray_call__.remote(weighing.weigh_critic) for worker in critics])


class WorkerCalls:
    """Wraps a worker group: calls on a batch send only the fields that workers use; ``before`` runs before each call.

    All other attributes are the group's. verl sends all fields, and resets a selection with every write to the queue.
    """

    METHODS = frozenset({"compute_log_prob", "compute_ref_log_prob", "infer_batch", "update_actor", "train_mini_batch"})

    def __init__(self, group: Any, before: Callable[[str, KVBatchMeta], None]) -> None:
        self._group = group
        self._before = before

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._group, name)
        if name not in self.METHODS:
            return attribute

        def call(batch: KVBatchMeta) -> Any:
            batch.fields = [field for field in internals.queue_fields(batch) if field not in NOT_FOR_WORKERS]
            self._before(name, batch)
            return attribute(batch)

        return call
