"""What some policy losses need beside verl's four tensors: from the trainer to the loss, by name.

verl calls a policy loss with fixed arguments. The trainer writes the further columns of a loss (its ``needs``) to the
queue, they travel with the rows, and inside the actor worker they wait here while verl's loss function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from tensordict import TensorDict
from verl.workers.utils.padding import response_to_nested

from verl_turnkey.plugins import seams
from verl_turnkey.plugins.rows import Rows

_columns: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("turnkey_loss_inputs", default=None)

GROUP_LOG_RATIO = "group_log_ratio"


def staleness(rows: Rows, tags: Sequence[Mapping[str, Any]], global_steps: int) -> torch.Tensor:
    """(B,) weight versions between each row's rollout and the weights that this step makes: 1 on policy.

    The weights at the beginning of step s are version s - 1. A row that was generated across versions counts by its
    newest, the one that clips hardest.
    """
    return torch.tensor([float(global_steps - tag["max_global_steps"]) for tag in tags])


def outcome(rows: Rows, tags: Sequence[Mapping[str, Any]], global_steps: int) -> torch.Tensor:
    """(B,) score of each row's trajectory; 0 for rows of no trajectory."""
    return _per_row(rows, rows.steps.score, len(tags))


def group_outcome(rows: Rows, tags: Sequence[Mapping[str, Any]], global_steps: int) -> torch.Tensor:
    """(B,) mean score over the trajectories of each row's group."""
    steps = rows.steps
    first = torch.from_numpy(steps.first_rows.copy())
    group, score = torch.from_numpy(steps.group.copy()), torch.from_numpy(steps.score.copy())
    size = torch.bincount(group[first], minlength=steps.n_groups)
    mean = torch.zeros(steps.n_groups, dtype=score.dtype).index_add(0, group[first], score[first]) / size
    return _per_row(rows, mean[group].numpy(), len(tags))


def no_log_ratio(rows: Rows, tags: Sequence[Mapping[str, Any]], global_steps: int) -> torch.Tensor:
    """(B,) zeros: nothing has moved before the first optimizer step (:mod:`.phases` writes the later ones)."""
    return torch.zeros(len(tags))


def _per_row(rows: Rows, per_step: Any, size: int) -> torch.Tensor:
    column = torch.zeros(size)
    column[torch.from_numpy(rows.row)] = torch.tensor(per_step, dtype=torch.float32)
    return column


PROVIDERS: dict[str, Callable[[Rows, Sequence[Mapping[str, Any]], int], torch.Tensor]] = {
    "staleness": staleness,
    "rewards": outcome,
    "group_reward": group_outcome,
    GROUP_LOG_RATIO: no_log_ratio,
}
"""Inputs that the trainer knows; any other comes from the estimator (``Credit.extra``), one value per step."""


def columns(
    needs: Sequence[str],
    rows: Rows,
    given: Mapping[str, Any],
    tags: Sequence[Mapping[str, Any]],
    response_mask: torch.Tensor,
    global_steps: int,
) -> TensorDict:
    """The columns that a loss ``needs``, as they go to the queue.

    Args:
        given: the estimator's further columns, (S,) each; written onto the tokens of each turn.
        response_mask: (B, L) nested, as it came from the queue.
    """
    result: dict[str, torch.Tensor] = {}
    for name in needs:
        if name in PROVIDERS:
            result[name] = PROVIDERS[name](rows, tags, global_steps)
        else:
            on_tokens = rows.to_tokens(given[name], response_mask.to_padded_tensor(0))
            result[name] = response_to_nested(on_tokens, response_mask)
    return TensorDict(result, batch_size=len(tags))


def hand_over(worker: Any, needs: Sequence[str]) -> None:
    """Run inside an actor worker: from now on the columns ``needs`` of each micro-batch are at the loss's hand."""
    actor = seams.actor_worker(worker).actor
    inner = actor.loss_fn

    def with_columns(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
        chosen = data.select(*needs).to_padded_tensor()
        token = _columns.set({name: chosen[name] for name in needs})
        try:
            return inner(model_output=model_output, data=data, dp_group=dp_group)
        finally:
            _columns.reset(token)

    actor.set_loss_fn(with_columns)


def current() -> dict[str, torch.Tensor]:
    """The further inputs of the loss that is running: (B,) or (B, L) each."""
    return _columns.get() or {}
