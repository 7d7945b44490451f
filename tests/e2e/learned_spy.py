"""Writes down what a critic's heads are fitted to, and what the process reward model made of each batch.

Loaded through ``turnkey.modules``.
"""

import os
from pathlib import Path

import torch

from verl_turnkey.plugins.verl_api.import_hooks import when_imported

OUT = Path(os.environ["TURNKEY_SPY"])
VALUES = ("values", "turnkey_value_high", "turnkey_value_term")
TARGETS = tuple(f"turnkey_target_{name}" for name in ("low", "high", "term"))
HEADS = ("input_ids", "response_mask", *VALUES, *TARGETS)
SCORES = ("input_ids", "prompts", "response_mask", "old_log_probs", "turnkey_prm_score", "turnkey_prm_coef")


def _write(name, batch, fields):
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
    columns = {field: [row.clone() for row in data[field].unbind()] for field in fields if field in data}
    padding = [bool(tag.get("is_padding")) for tag in batch.tags]
    torch.save({"keys": list(batch.keys), "padding": padding, **columns}, OUT / f"{name}.pt")


def watch_heads(module):
    cls = module.TurnkeyTrainerSync
    if hasattr(cls, "_spied_heads"):
        return
    cls._spied_heads, update = True, cls._update_critic

    def spied(self, batch, metrics):
        _write(f"heads{self.global_steps}", batch, HEADS)
        return update(self, batch, metrics)

    cls._update_critic = spied


def watch_scores(module):
    cls = module.ProcessReward
    if hasattr(cls, "_spied"):
        return
    cls._spied, score = True, cls.before_advantage

    def spied(self, batch):
        metrics = score(self, batch)
        trainer = self._trainer
        _write(f"prm{trainer.global_steps}.{trainer.local_trigger_step}", batch, SCORES)
        return metrics

    cls.before_advantage = spied


when_imported("verl_turnkey.plugins.trainer.trainer", watch_heads)
when_imported("verl_turnkey.plugins.trainer.process_reward", watch_scores)
