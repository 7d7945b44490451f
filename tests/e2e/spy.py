"""Looks over the trainer's shoulder: writes down what is in the queue before and after each update.

Loaded through ``turnkey.modules``; it touches nothing in the processes of drivers and environment hosts.
"""

import errno
import os
from pathlib import Path

import torch

from verl_turnkey.plugins.log import writer
from verl_turnkey.plugins.verl_api.import_hooks import when_imported

OUT = Path(os.environ["TURNKEY_SPY"])
FREEZE_AFTER = int(os.environ.get("TURNKEY_SPY_FREEZE_AFTER", "1000000"))


def _refuse(folder, *below):
    raise PermissionError(errno.EACCES, "Permission denied", str(folder))


if os.environ.get("TURNKEY_READ_ONLY"):  # of a node that has mounted the log for reading
    writer.private = _refuse


def _rows(batch, *fields):
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
    return {field: data[field].unbind() for field in fields}


def _log_probs(trainer, batch):
    """The batch's tokens under the actor's weights as they are now."""
    import transfer_queue as tq
    from verl.workers.utils.padding import response_from_nested

    trainer.actor_update.log_probs(batch)
    fields = ["log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    return response_from_nested(data["log_probs"], data["response_mask"]).unbind()


def watch(trainer):
    for cls in (
        trainer.TurnkeyTrainerSync,
        trainer.TurnkeyTrainerColocateAsync,
        trainer.TurnkeyTrainerSeparateAsync,
    ):
        if not hasattr(cls, "_spied"):
            _spy_on(cls)


def _spy_on(cls):
    cls._spied = True
    update_actor, end_of_step = cls._update_actor, cls.on_step_end

    def _update_actor(self, batch, metrics):
        optional = ["values", "returns"] if self.use_critic else []
        optional += ["ref_log_prob"] if self.use_reference_policy else []
        loss = self.advantage_step.loss
        optional += ["turnkey_staleness"] if loss is not None and "staleness" in loss.needs else []
        taught = ["teacher_log_prob", "has_teacher"] if self.config.turnkey.teacher.source else []
        learned = ["turnkey_observation"] if self.config.turnkey["update"]["observation_coefficient"] else []
        optional += [*taught, *learned]
        fields = ["responses", "advantages", "old_log_probs", "rollout_log_probs", "response_mask", "rm_scores"]
        fields += optional
        before = _rows(batch, *fields)
        under_actor = _log_probs(self, batch)
        batch = update_actor(self, batch, metrics)
        tags = list(batch.tags)
        torch.save(
            {
                "keys": list(batch.keys),
                "padding": [bool(tag.get("is_padding")) for tag in tags],
                "versions": [(tag["min_global_steps"], tag["max_global_steps"]) for tag in tags],
                "advantages": before["advantages"],
                "responses": before["responses"],
                "mask": before["response_mask"],
                "rm_scores": before["rm_scores"],
                "values": before.get("values"),
                "returns": before.get("returns"),
                "staleness": before.get("turnkey_staleness"),
                "rollout": before["rollout_log_probs"],
                "old": before["old_log_probs"],
                "reference": before.get("ref_log_prob"),
                **{name: before[name] for name in (*taught, *learned)},
                "before": under_actor,
                "after": _log_probs(self, batch),
                "advantages_after": _rows(batch, "advantages")["advantages"],  # updates in phases weigh them
            },
            OUT / f"step{self.global_steps}.{self.local_trigger_step}.pt",
        )
        return batch

    def on_step_end(self):
        if self.global_steps <= FREEZE_AFTER:
            end_of_step(self)

    cls._update_actor, cls.on_step_end = _update_actor, on_step_end


when_imported("verl_turnkey.plugins.trainer.trainer", watch)
