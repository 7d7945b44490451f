"""Writes down what the critic's heads are fitted to in each update; loaded through ``turnkey.modules``."""

import os
from pathlib import Path

import torch

from verl_turnkey.plugins.verl_api.import_hooks import when_imported

OUT = Path(os.environ["TURNKEY_SPY"])
VALUES = ("values", "turnkey_value_high", "turnkey_value_term")
TARGETS = tuple(f"turnkey_target_{name}" for name in ("low", "high", "term"))
FIELDS = ("input_ids", "response_mask", *VALUES, *TARGETS)


def watch(module):
    import transfer_queue as tq

    cls = module.TurnkeyTrainerSync
    if hasattr(cls, "_spied_heads"):
        return
    cls._spied_heads, update = True, cls._update_critic

    def spied(self, batch, metrics):
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
        columns = {field: [row.clone() for row in data[field].unbind()] for field in FIELDS}
        padding = [bool(tag.get("is_padding")) for tag in batch.tags]
        torch.save({"keys": list(batch.keys), "padding": padding, **columns}, OUT / f"heads{self.global_steps}.pt")
        return update(self, batch, metrics)

    cls._update_critic = spied


when_imported("verl_turnkey.plugins.trainer.trainer", watch)
