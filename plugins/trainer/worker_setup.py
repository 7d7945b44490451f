"""What the trainer runs inside every training process, on every node, once it exists; and calls it makes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transfer_queue import KVBatchMeta

from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins import registries
from verl_turnkey.plugins.actor import loss
from verl_turnkey.plugins.verl_api import ledger


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
    """A worker group whose calls on a batch are prepared first; everything else passes through."""

    METHODS = frozenset({"compute_log_prob", "compute_ref_log_prob", "infer_batch", "update_actor", "train_mini_batch"})

    def __init__(self, group: Any, before: Callable[[str, KVBatchMeta], None]) -> None:
        self._group = group
        self._before = before

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._group, name)
        if name not in self.METHODS:
            return attribute

        def call(batch: KVBatchMeta) -> Any:
            self._before(name, batch)
            return attribute(batch)

        return call
