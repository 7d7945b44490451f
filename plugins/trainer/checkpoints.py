"""Resuming: rows without prompts are cleared from the queue; a run that stops writes a checkpoint of its last step."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq

from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.notices import logger


class Checkpoints:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`."""

    config: Any
    global_steps: int
    base_mode: str
    _saved: int | None = None
    """the step of the newest checkpoint"""

    def _load_checkpoint(self) -> None:
        """verl's own, then clears the rows that the batch of that step left in the queue.

        verl writes a checkpoint when the prompts of the batch have left the queue, but its rows have not. Rows without
        prompts would never be sampled or cleared.
        """
        super()._load_checkpoint()  # type: ignore[misc]
        self._saved = self.global_steps
        items = (tq.kv_list("train") or {}).get("train", {}) if self.base_mode != "sync" else {}
        prompts = {key for key, tag in items.items() if tag.get("is_prompt")}
        left = [key for key in items if key not in prompts and split_key(key)[0] not in prompts]
        if left:
            tq.kv_clear(keys=left, partition_id="train")

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()  # type: ignore[misc]
        self._saved = self.global_steps

    def _save_stopping(self, step: int) -> None:
        """Write a checkpoint of ``step``, the last completed one, unless it exists or the run writes none."""
        if self.config.trainer.save_freq <= 0 or self._saved == step:
            return
        self.on_sample_end()  # verl saves after the servers have released their memory
        now, self.global_steps = self.global_steps, step
        try:
            self._save_checkpoint()
            logger.warning("wrote a checkpoint of step %d before stopping", step)
        finally:
            self.global_steps = now
