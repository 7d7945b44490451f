"""Checkpoints: what a method remembers is in them; a run that stops writes one of its last step.

Resuming clears rows without prompts from the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq

from verl_turnkey.advantage import EstimatorSpec, Modification
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.trainer import credit_state


class Checkpoints:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`."""

    config: Any
    global_steps: int
    base_mode: str
    estimator: EstimatorSpec | None
    credit_params: Any
    credit_modify: Sequence[Modification]
    credit_state: Mapping[str, float]
    """``Credit.state`` of the newest batch: what the next one begins with"""
    _saved: int | None = None
    """the step of the newest checkpoint"""

    def _load_checkpoint(self) -> None:
        """verl's own, then clears the rows that the batch of that step left in the queue.

        verl writes a checkpoint when the prompts of the batch have left the queue, but its rows have not. Rows without
        prompts would never be sampled or cleared.
        """
        super()._load_checkpoint()  # type: ignore[misc]
        self._saved = self.global_steps
        if self.global_steps:
            self._load_credit_state()
        items = (tq.kv_list("train") or {}).get("train", {}) if self.base_mode != "sync" else {}
        prompts = {key for key, tag in items.items() if tag.get("is_prompt")}
        left = [key for key in items if key not in prompts and split_key(key)[0] not in prompts]
        if left:
            tq.kv_clear(keys=left, partition_id="train")

    def _load_credit_state(self) -> None:
        if self.estimator is None or not (names := self._remembering()):
            return
        folder = credit_state.resumed_folder(self.config, self.global_steps)
        found = credit_state.load(folder, self.estimator.name)
        if not isinstance(found, str):
            self.credit_state = found
        else:
            logger.warning("%s: %s remembers nothing of the steps before", found, " and ".join(names))

    def _remembering(self) -> list[str]:
        """Names of what is stateful under its parameters: the estimator, its modifiers."""
        own = [] if self.estimator is None else [(self.estimator, self.credit_params)]
        chosen = [*own, *((one.spec, one.params) for one in self.credit_modify)]
        return [spec.name for spec, params in chosen if spec.stateful and getattr(params, "remembers", True)]

    def _save_checkpoint(self) -> None:
        """verl's own, after the state of the method: verl's last file says that the checkpoint is complete."""
        if self.estimator is not None and self._remembering():
            folder = credit_state.folder_of(self.config, self.global_steps)
            credit_state.save(folder, self.estimator.name, self.credit_state)
        super()._save_checkpoint()  # type: ignore[misc]
        self._saved = self.global_steps

    def _save_stopping(self, step: int) -> None:
        """Write a checkpoint of ``step``, the last completed one, unless it exists or the run writes none.

        Weights and the method's state are the newest ones: updates of the step that stopped are in both.
        """
        if self.config.trainer.save_freq <= 0 or self._saved == step:
            return
        self.on_sample_end()  # verl saves after the servers have released their memory
        now, self.global_steps = self.global_steps, step
        try:
            self._save_checkpoint()
            logger.warning("wrote a checkpoint of step %d before stopping", step)
        finally:
            self.global_steps = now
