"""Writes down what the process reward model made of each batch; loaded through ``turnkey.modules``."""

import os
from pathlib import Path

import torch

from verl_turnkey.plugins.verl_api.import_hooks import when_imported

OUT = Path(os.environ["TURNKEY_SPY"])
FIELDS = ("input_ids", "prompts", "response_mask", "old_log_probs", "turnkey_prm_score", "turnkey_prm_coef")


def watch(module):
    import transfer_queue as tq

    cls = module.ProcessReward
    if hasattr(cls, "_spied"):
        return
    cls._spied, score = True, cls.before_advantage

    def spied(self, batch):
        metrics = score(self, batch)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
        columns = {field: [row.clone() for row in data[field].unbind()] for field in FIELDS if field in data}
        trainer = self._trainer
        seen = {"keys": list(batch.keys), "padding": [bool(tag.get("is_padding")) for tag in batch.tags], **columns}
        torch.save(seen, OUT / f"prm{trainer.global_steps}.{trainer.local_trigger_step}.pt")
        return metrics

    cls.before_advantage = spied


when_imported("verl_turnkey.plugins.trainer.process_reward", watch)
