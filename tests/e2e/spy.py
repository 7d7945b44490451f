"""Looks over the trainer's shoulder: writes down what is in the queue before and after each update.

Loaded through ``turnkey.modules``; it touches nothing in the processes of drivers and environment hosts.
"""

import os
from pathlib import Path

import torch

from verl_turnkey.plugins.hooks import when_imported

OUT = Path(os.environ["TURNKEY_SPY"])
FREEZE_AFTER = int(os.environ.get("TURNKEY_SPY_FREEZE_AFTER", "1000000"))


def _rows(batch, *fields):
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
    return {field: data[field].unbind() for field in fields}


def watch(trainer):
    cls = trainer.TurnkeyTrainerSync
    if hasattr(cls, "_spied"):
        return
    cls._spied = True
    update_actor, end_of_step = cls._update_actor, cls.on_step_end

    def _update_actor(self, batch, metrics):
        values = ["values"] if self.use_critic else []
        before = _rows(batch, "advantages", "old_log_probs", "response_mask", "rm_scores", *values)
        batch = update_actor(self, batch, metrics)
        tags = list(batch.tags)
        self._compute_old_log_prob(batch, {})  # the same tokens under the new weights
        after = _rows(batch, "old_log_probs", "advantages")
        torch.save(
            {
                "keys": list(batch.keys),
                "padding": [bool(tag.get("is_padding")) for tag in tags],
                "advantages": before["advantages"],
                "mask": before["response_mask"],
                "rm_scores": before["rm_scores"],
                "values": before.get("values"),
                "before": before["old_log_probs"],
                "after": after["old_log_probs"],
                "advantages_after": after["advantages"],  # updates in phases weigh them
            },
            OUT / f"step{self.global_steps}.pt",
        )
        return batch

    def on_step_end(self):
        if self.global_steps <= FREEZE_AFTER:
            end_of_step(self)

    cls._update_actor, cls.on_step_end = _update_actor, on_step_end


when_imported("verl_turnkey.plugins.trainer", watch)
