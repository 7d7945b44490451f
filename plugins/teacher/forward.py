"""Further forward passes of the actor, over rows of our own.

verl computes the old log-probabilities with the weights that the batch is trained from; ``separate_async`` puts these
in place for that call alone. So the passes run right after this call, not after the trainer's method around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.utils.padding import response_from_nested

from verl_turnkey.plugins.teacher.splice import Row
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, Partition

PARTITION = Partition("turnkey_teacher")
"""of the queue, for the rows of these passes; the replay buffer does not read it"""
MODEL_INPUTS = (
    *("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask", "attention_mask"),
    "multi_modal_inputs",
)


class AfterOldLogProbs:
    """Runs ``passes`` once verl has put ``log_probs`` into the queue; each takes the batch and returns metrics."""

    def __init__(self, *passes: Callable[[KVBatchMeta], dict[str, float]]) -> None:
        self._passes = passes
        self._metrics: dict[str, Any] | None = None
        """of the step whose old log-probabilities are being computed"""

    @contextmanager
    def during(self, metrics: dict[str, Any]) -> Iterator[None]:
        """While verl computes the old log-probabilities of a batch."""
        self._metrics = metrics
        try:
            yield
        finally:
            self._metrics = None

    def after_call(self, method: str, batch: KVBatchMeta) -> None:
        """Called after each worker call; the passes' own calls come here, too."""
        if method == "compute_log_prob" and self._metrics is not None:
            metrics, self._metrics = self._metrics, None
            for score in self._passes:
                metrics.update(score(batch))


class Forward:
    """The log-probabilities of rows under the weights of the old log-probabilities, or of the reference policy."""

    def __init__(self, trainer: Any, weights: Literal["old", "ref"] = "old") -> None:
        self._trainer, self._weights = trainer, weights
        self._config: DictConfig = trainer.config

    @property
    def _of_reference(self) -> bool:
        """Whether the rows go to the group of the reference policy."""
        return self._weights == "ref" and not self._trainer.ref_in_actor

    def multiple(self) -> int:
        """The number of rows must be a multiple of this: ranks get equally many, in whole fixed micro-batches."""
        part = self._config.actor_rollout_ref["ref" if self._of_reference else "rollout"]
        ranks = internals.data_parallel_size(self._trainer.actor_rollout_wg)
        return ranks if part.log_prob_use_dynamic_bsz else ranks * int(part.log_prob_micro_batch_size_per_gpu)

    def log_probs(self, rows: dict[str, Row]) -> dict[str, torch.Tensor]:
        """Log-probabilities (L,) of the response tokens of each row, by its key."""
        keys = [*rows]
        lengths = [len(row["input_ids"]) for row in rows.values()]
        ranks = internals.data_parallel_size(self._trainer.actor_rollout_wg)
        workload = calculate_workload(torch.tensor(lengths)).tolist()
        by_rank: Any = get_seqlen_balanced_partitions(workload, k_partitions=ranks, equal_size=True)
        keys = [keys[j] for indices in by_rank for j in indices]
        tags = [{"status": "success", "seq_len": len(rows[key]["input_ids"])} for key in keys]
        try:
            batch = PARTITION.write_rows(keys, [rows[key] for key in keys], tags)
            batch.extra_info = {
                "calculate_entropy": False,
                "compute_loss": False,
                "temperature": self._config.actor_rollout_ref.rollout.temperature,
            }
            if self._of_reference:
                self._trainer.ref_policy_wg.compute_ref_log_prob(batch)
            else:
                if self._weights == "ref":
                    batch.extra_info["no_lora_adapter"] = True
                self._trainer.actor_rollout_wg.compute_log_prob(batch)
            data = PARTITION.read(keys, ["log_probs", "response_mask"])
        finally:
            PARTITION.clear(keys)
        answers = response_from_nested(data["log_probs"], data["response_mask"])
        return dict(zip(keys, answers.unbind(), strict=True))


def rows_of(column: Any) -> list[Any]:
    """The rows of a field of the queue."""
    return list(column.unbind()) if isinstance(column, torch.Tensor) else column.tolist()


def joined(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """One tensor of the rows' tokens; None where no row has any."""
    present = [row for row in rows if row is not None]
    return torch.cat(present) if present else None
