"""``turnkey.update.weight_by``: the weights of tokens, from the trainer to the losses of actor and critic.

The trainer computes them over the batch of one update, before the update, and writes them to the queue with the rows.
Inside a worker they replace ``loss_agg_mode`` while verl's loss function runs: policy loss, entropy, KL and value loss
are averaged with them, independently of the split into mini-batches, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_turnkey.losses.turns import turn_ids
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.credit.weights import token_weights
from verl_turnkey.plugins.verl_api import aggregation, internals

COLUMN = "turnkey_weight"

#: Entry of a batch's ``extra_info``: the number of mini-batches that an update cuts it into.
MINI_BATCHES = "turnkey_mini_batches"


def write(batch: KVBatchMeta, by: str, response_mask: torch.Tensor, table: Rows | None) -> KVBatchMeta:
    """Write the weights to the rows of ``batch`` in the queue.

    Args:
        by: ``turnkey.update.weight_by``; nothing is written for ``token``.
        response_mask: (B, L) nested, as the agent loop wrote it: it defines the turns. The tokens that are trained are
            those of the mask in the queue, which a rejection may have changed.
        table: the table of steps; None: every run of ones is a step.
    """
    if by == "token":
        return batch
    rows = {"keys": batch.keys, "partition_id": batch.partition_id}
    mask = tq.kv_batch_get(**rows, select_fields=["response_mask"])["response_mask"]
    turn = turn_ids(response_mask) if table is None else table.turns.index
    weight = token_weights(by, batch.keys, turn, mask)
    return tq.kv_batch_put(**rows, fields=TensorDict({COLUMN: weight}, batch_size=len(batch.keys)))


def weigh_actor(process: Any) -> None:
    """Run inside a process of the actor: its losses take the weights from now on."""
    _weigh(internals.actor_worker(process).actor)


def weigh_critic(process: Any) -> None:
    """Run inside a process of the critic: its loss takes the weights from now on."""
    _weigh(internals.critic_worker(process))


def _weigh(worker: Any) -> None:
    # Keep verl's keywords on the partial: other code reads the configuration from them.
    worker.set_loss_fn(partial(_run, worker.loss_fn, **worker.loss_fn.keywords))


def _run(inner: Callable[..., Any], model_output: Any, data: TensorDict, dp_group: Any = None, **_: Any) -> Any:
    if COLUMN not in data:
        raise RuntimeError(f"the rows have no column {COLUMN}, which the trainer writes with turnkey.update.weight_by")
    with applied(data):
        return inner(model_output=model_output, data=data, dp_group=dp_group)


@contextmanager
def applied(data: TensorDict) -> Iterator[None]:
    """Inside this context the losses' means are weighted by the column of this micro-batch, if it has one."""
    if COLUMN not in data:
        yield
        return
    weight = data.select(COLUMN).to_padded_tensor()[COLUMN]
    with aggregation.weighed(weight, data[MINI_BATCHES]):
        yield
