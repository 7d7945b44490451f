"""Which of the trainer's forward passes measures the rank of hidden states: that of the old log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl_turnkey.advantage import Modification
from verl_turnkey.plugins.actor.hidden_rank import STRIDE, WINDOW
from verl_turnkey.plugins.credit.supplied import OF_RANK
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta


class RankPass:
    """Marks the pass for the workers; without a modifier that reads ranks it does nothing."""

    def __init__(self, modify: Sequence[Modification]) -> None:
        params: Any = next((modifier.params for modifier in modify if OF_RANK & {*modifier.columns}), None)
        self.measured = params is not None
        self._marks = {STRIDE: params.stride, WINDOW: params.window} if self.measured else {}
        self._waits = False

    @contextmanager
    def during(self, batch: KVBatchMeta) -> Iterator[None]:
        """While verl computes the old log-probabilities of ``batch``."""
        self._waits = self.measured
        try:
            yield
        finally:
            self._waits = False
            for name in self._marks:
                (batch.extra_info or {}).pop(name, None)

    def before_call(self, method: str, batch: KVBatchMeta) -> None:
        """Called before each worker call; the first one of :meth:`during` measures."""
        if self._waits and method == "compute_log_prob":
            self._waits = False
            batch.extra_info = (batch.extra_info or {}) | self._marks
