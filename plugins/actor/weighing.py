"""``turnkey.update.weight_by``: the weights of tokens, from the trainer to the losses of actor and critic.

The trainer computes them over the batch of one update, before the update, and they go to the queue with the rows.
Inside a worker they replace ``loss_agg_mode`` while verl's loss function runs: policy loss, entropy, KL and value loss
are averaged with them, independently of the split into mini-batches, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from verl_turnkey.losses.turns import turn_ids
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.credit.weights import token_weights
from verl_turnkey.plugins.verl_api import aggregation, internals

COLUMN = "turnkey_weight"

#: Entry of a batch's ``extra_info``: the number of mini-batches that an update cuts it into.
MINI_BATCHES = "turnkey_mini_batches"


def columns(
    keys: Sequence[str], by: str, response_mask: torch.Tensor, now: Mapping[str, torch.Tensor], table: Rows | None
) -> dict[str, torch.Tensor]:
    """The weights of the rows ``keys`` as a column of the queue; none for ``token``.

    Args:
        by: ``turnkey.update.weight_by``.
        response_mask: (B, L) nested, as the agent loop wrote it: it defines the turns.
        now: the mask as the queue has it, which a rejection may have changed: the tokens that are trained.
        table: the table of steps; None: every run of ones is a step.
    """
    if by == "token":
        return {}
    turn = turn_ids(response_mask) if table is None else table.turns.index
    return {COLUMN: token_weights(by, keys, turn, now["response_mask"])}


def weigh_actor(process: Any) -> None:
    """Run inside a process of the actor: its losses take the weights from now on."""
    internals.wrap_loss(internals.actor_worker(process).actor, _run)


def weigh_critic(process: Any) -> None:
    """Run inside a process of the critic: its loss takes the weights from now on."""
    internals.wrap_loss(internals.critic_worker(process), _run)


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
    with aggregation.weighed(weight, int(data[MINI_BATCHES])):
        yield
