"""What some policy losses need beside verl's four tensors: from the trainer to the loss, by name.

verl calls a policy loss with fixed arguments. The trainer writes the further columns of a loss (its ``needs``) to the
queue, they travel with the rows, and inside the actor worker they wait here while verl's loss function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.workers.utils.padding import response_to_nested

from verl_turnkey.losses import LossSpec
from verl_turnkey.plugins import seams
from verl_turnkey.plugins.rows import Rows

_columns: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("turnkey_loss_inputs", default=None)

GROUP_LOG_RATIO = "group_log_ratio"


@dataclass(frozen=True)
class Batch:
    """What the providers read."""

    rows: Rows | None
    """the table of steps; None where there is none"""
    given: Mapping[str, Any]
    """the estimator's further columns, (S,) each"""
    tags: Sequence[Mapping[str, Any]]
    global_steps: int


def queue_name(name: str) -> str:
    """The column's name in the queue, where it meets verl's own."""
    return f"turnkey_{name}"


def wanted(spec: LossSpec | None) -> tuple[str, ...]:
    """The further columns of a loss."""
    return () if spec is None else (*spec.needs, *spec.accepts)


def staleness(batch: Batch) -> torch.Tensor:
    """(B,) weight versions between each row's rollout and the weights that this step makes: 1 on policy.

    The weights at the beginning of step s are version s - 1. A row that was generated across versions counts by its
    newest, the one that clips hardest.
    """
    return torch.tensor([float(batch.global_steps - tag["max_global_steps"]) for tag in batch.tags])


def outcome(batch: Batch) -> torch.Tensor:
    """(B,) score of each row's trajectory; 0 for rows of no trajectory."""
    rows = _table(batch)
    return _per_row(batch, rows.steps.score)


def group_outcome(batch: Batch) -> torch.Tensor:
    """(B,) mean score over the trajectories of each row's group."""
    steps = _table(batch).steps
    first = steps.first_rows
    size = np.bincount(steps.group[first], minlength=steps.n_groups)
    mean = np.bincount(steps.group[first], weights=steps.score[first], minlength=steps.n_groups) / size
    return _per_row(batch, mean[steps.group])


def no_log_ratio(batch: Batch) -> torch.Tensor:
    """(B,) zeros: nothing has moved before the first optimizer step (:mod:`.phases` writes the later ones)."""
    return torch.zeros(len(batch.tags))


def tool_share(batch: Batch) -> torch.Tensor:
    """(B,) the batch's tokens for each token in a row with a tool advantage, the same for all rows."""
    rows = _table(batch)
    has = np.bincount(rows.row, weights=batch.given["tool_advantages"] != 0, minlength=len(batch.tags)) > 0
    share = rows.steps.tokens.sum() / max(1, rows.steps.tokens[has[rows.row]].sum())
    return torch.full((len(batch.tags),), float(share))


def _table(batch: Batch) -> Rows:
    assert batch.rows is not None
    return batch.rows


def _per_row(batch: Batch, per_step: np.ndarray) -> torch.Tensor:
    column = torch.zeros(len(batch.tags))
    column[torch.from_numpy(_table(batch).row)] = torch.tensor(per_step, dtype=torch.float32)
    return column


PROVIDERS: dict[str, Callable[[Batch], torch.Tensor]] = {
    "staleness": staleness,
    "rewards": outcome,
    "group_reward": group_outcome,
    GROUP_LOG_RATIO: no_log_ratio,
    "tool_share": tool_share,
}
"""Inputs that the trainer knows; any other comes from the estimator (``Credit.extra``), one value per step."""


def need_table(names: Sequence[str]) -> bool:
    """Whether the table of steps is needed for these inputs."""
    return any(name != "staleness" for name in names)


def columns(names: Sequence[str], batch: Batch, response_mask: torch.Tensor) -> TensorDict:
    """The columns ``names`` as they go to the queue; ``response_mask`` (B, L) nested, as it came from there.

    What an estimator gives is written onto the tokens of each step's turn.
    """
    result: dict[str, torch.Tensor] = {}
    for name in names:
        if name in PROVIDERS:
            result[queue_name(name)] = PROVIDERS[name](batch)
        else:
            on_tokens = _table(batch).to_tokens(batch.given[name], response_mask.to_padded_tensor(0))
            result[queue_name(name)] = response_to_nested(on_tokens, response_mask)
    return TensorDict(result, batch_size=len(batch.tags))


def read(data: TensorDict, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The columns of a micro-batch as a loss takes them: (B,) or (B, L) each."""
    chosen = data.select(*map(queue_name, names)).to_padded_tensor() if names else {}
    return {name: chosen[queue_name(name)] for name in names}


def hand_over(worker: Any, names: Sequence[str]) -> None:
    """Run inside an actor worker: from now on the columns of each micro-batch are at the loss's hand."""
    if names:
        actor = seams.actor_worker(worker).actor
        # A partial with verl's keywords: whoever looks for the actor's config finds it where it was.
        actor.set_loss_fn(partial(_with_columns, actor.loss_fn, tuple(names), **actor.loss_fn.keywords))


def _with_columns(
    inner: Callable[..., Any], names: Sequence[str], model_output: Any, data: TensorDict, dp_group: Any = None, **_: Any
) -> Any:
    token = _columns.set(read(data, names))
    try:
        return inner(model_output=model_output, data=data, dp_group=dp_group)
    finally:
        _columns.reset(token)


def current() -> dict[str, torch.Tensor]:
    """The further inputs of the loss that is running: (B,) or (B, L) each."""
    return _columns.get() or {}
