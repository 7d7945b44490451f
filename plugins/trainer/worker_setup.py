"""What the trainer runs inside every training process, on every node, once it exists; and calls it makes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transfer_queue import KVBatchMeta

from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins import registries
from verl_turnkey.plugins.actor import loss
from verl_turnkey.plugins.verl_api import internals, ledger

# Fields that no worker computes with; everything else travels, also names that we do not know.
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
    """The process has loaded the plugin."""
    ledger.verify(("estimator",))


def configure(worker: Any, modules: Sequence[str], name: str, params: Any) -> None:
    """The loss ``name`` of ours, with its parameters; ``modules`` (``turnkey.modules``) may have registered it."""
    import_modules(modules)
    registries.register_losses()
    ledger.verify(("loss",), (name,))
    loss.use(worker, name, params)


class WorkerCalls:
    """A worker group whose calls on a batch send only fields that are used, and are prepared by ``before``.

    Everything else passes through. verl sends all fields, and forgets the choice with every write to the queue.
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
