"""Weights of tokens in the losses: ``turnkey.update.weight_by`` and ``turnkey.update.importance``.

``weight_by``: the trainer computes the weights over the batch of one update, before the update, and they go to the
queue with the rows. Inside a worker they replace ``loss_agg_mode`` while verl's loss function runs: policy loss,
entropy, KL and value loss are averaged with them, independently of the split into mini-batches, micro-batches and
ranks.

``importance``: weights of the rollout's policy, in verl's column ``rollout_is_weights``, by which verl multiplies every
policy loss. The trainer writes it after verl's advantage step, in which verl itself can give a weight to single tokens
or to whole rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDict

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses.clipping import importance_weights, units_of
from verl_turnkey.losses.turns import Turns, like, row_offsets, turn_ids
from verl_turnkey.plugins.config.training import UpdateConfig
from verl_turnkey.plugins.credit.rows import Rows, split_key
from verl_turnkey.plugins.verl_api import internals


def token_weights(by: str, keys: Sequence[str], turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The weight of each token, (B, L) jagged like ``mask``, float32. They sum to 1; tokens outside the mask have 0.

    ::

        1 / (units  x tokens of the unit)                                by="step" or "episode"
        1 / (tasks  x episodes of the task x tokens of the episode)      by="task"

    Units without a token in the mask do not count: failed episodes, padding, fully rejected steps.

    Args:
        keys: keys of the rows, B, which name the task and the episode of each.
        turn: (B, L) jagged int64, the number of each token's turn, in its row or in the batch, before any rejection.
        mask: (B, L) jagged, the tokens that the loss trains, after any rejection.
    """
    trained = mask.values().bool()
    row = torch.repeat_interleave(torch.arange(len(keys)), row_offsets(mask).diff().cpu())[trained]
    if by == "step":
        width = int(turn.values().max()) + 1 if len(trained) else 1
        units, unit = (row * width + turn.values()[trained]).unique(return_inverse=True)
        group = torch.zeros(len(units), dtype=torch.int64)
    else:
        rows, place = row.unique(return_inverse=True)
        names = [split_key(keys[int(i)])[:2] for i in rows.tolist()]  # (task, episode)
        episodes = {episode: i for i, episode in enumerate(dict.fromkeys(names))}
        unit = torch.tensor([episodes[name] for name in names], dtype=torch.int64)[place]
        tasks = {task: i for i, task in enumerate(dict.fromkeys(task for task, _ in episodes))}
        group = torch.tensor([tasks[task] if by == "task" else 0 for task, _ in episodes], dtype=torch.int64)
    # Groups weigh alike, the units within a group, and the tokens within a unit. By step or episode: one group.
    in_group = torch.bincount(group)
    share = 1 / (len(in_group) * in_group[group] * torch.bincount(unit)).double()
    weight = torch.zeros(len(trained), dtype=torch.float64)
    weight[trained] = share[unit]
    return like(weight.float(), mask)


BINDINGS = ("verl.trainer.ppo.core_algos", "verl.workers.utils.losses")


@contextmanager
def weighed(weight: torch.Tensor, mini_batches: int) -> Iterator[None]:
    """Inside this context ``agg_loss`` returns the weighted sum over tokens, whatever its ``loss_agg_mode``.

    Args:
        weight: (B, L), the micro-batch's part of weights that sum to 1 over the whole batch.
        mini_batches: number of mini-batches of the batch. The weights of one sum to about 1 / ``mini_batches``, so its
            loss is multiplied by this number.
    """
    verls: Any = importlib.import_module(BINDINGS[0])
    original = verls.agg_loss

    def agg_loss(
        loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str, dp_size: int = 1, **_: Any
    ) -> torch.Tensor:
        # verl multiplies token-sum by dp_size, because gradients are averaged over the ranks.
        scaled = loss_mat * (weight * mini_batches)
        return original(loss_mat=scaled, loss_mask=loss_mask, loss_agg_mode="token-sum", dp_size=dp_size)

    with ExitStack() as stack:
        for name in BINDINGS:
            stack.enter_context(patch(f"{name}.agg_loss", agg_loss))
        yield


COLUMN = "turnkey_weight"

#: Entry of a batch's ``extra_info``: the number of mini-batches that an update cuts it into.
MINI_BATCHES = "turnkey_mini_batches"


def weight_columns(
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
    with weighed(weight, int(data[MINI_BATCHES])):
        yield


IMPORTANCE_FIELDS = ("rollout_log_probs", "old_log_probs")
"""fields of the queue that the weights are computed from"""


def importance_columns(
    options: UpdateConfig, response_mask: torch.Tensor, now: Mapping[str, torch.Tensor], table: Rows | None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The weights as a column of the queue, and metrics; neither without ``importance``.

    ``importance_outside=clear_mask`` also writes both masks, without the units outside the bounds: the losses read
    ``response_mask``, the number of tokens that verl divides by is that of ``loss_mask``.

    Args:
        response_mask: (B, L) nested, as the agent loop wrote it: it defines the turns, and all of their tokens count.
        now: :data:`IMPORTANCE_FIELDS`, and the mask as the queue has it, which a rejection may have changed.
        table: the table of steps; None: every run of ones is a turn.

    Raises:
        ConfigError: the rows have no log-probabilities of the rollout.
    """
    if options.importance is None:
        return {}, {}
    if missing := [name for name in IMPORTANCE_FIELDS if name not in now]:
        raise ConfigError(
            f"turnkey.update.importance={options.importance} compares old_log_probs with rollout_log_probs, but the "
            f"rows have no {' and no '.join(missing)}: let the agent loop return response_logprobs in each output, or "
            "set turnkey.update.importance=null"
        )
    turns = Turns.of(response_mask) if table is None else table.turns
    units = units_of(options.importance, response_mask, turns)
    log_ratio = like(now["old_log_probs"].values().double() - now["rollout_log_probs"].values().double(), units.index)
    weight, inside = importance_weights(
        log_ratio,
        units,
        ratio=options.importance_ratio,
        outside=options.importance_outside,
        high=options.importance_high,
        low=options.importance_low,
    )
    written = {"rollout_is_weights": units.spread(weight.float())}
    if options.importance_outside == "clear_mask":
        mask = now["response_mask"]
        kept = like(mask.values() * units.spread(inside.to(mask.dtype)).values(), mask)
        written |= {"response_mask": kept, "loss_mask": kept}
    return written, _importance_metrics(units, weight, inside)


def _importance_metrics(units: Turns, weight: torch.Tensor, inside: torch.Tensor) -> dict[str, float]:
    """Of the units with a token; shares of units and of tokens outside the bounds."""
    used = units.tokens > 0
    tokens, weight, inside = units.tokens[used].double(), weight[used], inside[used]
    if not len(weight):
        return {}
    return {
        "importance/weight/mean": weight.mean().item(),
        "importance/weight/min": weight.min().item(),
        "importance/weight/max": weight.max().item(),
        "importance/outside": 1 - inside.double().mean().item(),
        "importance/outside_tokens": (tokens[~inside].sum() / tokens.sum()).item(),
        # Kish: the number of equally weighted units with the variance of these, as a share of their number.
        "importance/effective": (weight.sum().square() / (len(weight) * weight.square().sum()).clamp(min=1e-30)).item(),
    }
