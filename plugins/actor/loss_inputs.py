"""Further columns of the rows that losses read: from the trainer to the loss.

verl calls a policy loss with fixed arguments. The trainer writes the further columns of a loss (its ``needs`` and
``accepts``) to the queue with the rows; inside the actor worker this module holds them while verl's loss function runs.

With ``turnkey.update.observation_coefficient`` the policy also learns to predict what the environment answers (ECHO,
arXiv:2605.24517). A conversation in one row holds the observations as context. Beside any policy loss, the actor
minimises

    coefficient x mean over the tokens of observations of -log pi(token | all before it)

The tokens of the chat template around an observation do not count, and neither do the first prompt and an observation
after the last turn, which is in no row. The mean is over the batch of an update, as in the code of prime-rl, whatever
the mini-batches, micro-batches and ranks; the paper's coefficient is 0.05.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses import LossSpec, turn_ids
from verl_turnkey.losses.registry import GROUP_LOG_RATIO, TEACHER, WEIGHT_SHARE, weighs, weight_share
from verl_turnkey.losses.turns import TURN, like, row_offsets
from verl_turnkey.plugins.actor.weighing import MINI_BATCHES
from verl_turnkey.plugins.credit.metrics import LEARNED
from verl_turnkey.plugins.credit.rows import OBSERVED, Rows, Runs
from verl_turnkey.plugins.verl_api import internals

_columns: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("turnkey_loss_inputs", default=None)

STALENESS = "staleness"


@dataclass(frozen=True)
class Batch:
    """The data that the columns are computed from."""

    table: Callable[[], Rows]
    """returns the table of steps; raises ConfigError without one"""
    extra: Mapping[str, Any]
    """the estimator's further columns, (S,) each"""
    tags: Sequence[Mapping[str, Any]]
    global_steps: int
    response_mask: torch.Tensor
    """(B, L) nested, as the agent loop wrote it"""
    rejects: bool
    """whether tokens may have been rejected since"""


def queue_name(name: str) -> str:
    """The column's name in the queue, with a prefix to avoid verl's names; a teacher's column has none."""
    return name if name in TEACHER else f"turnkey_{name}"


def staleness(batch: Batch) -> torch.Tensor:
    """(B,) weight versions between each row's rollout and the weights before this step's update: 0 on policy.

    The weights at the beginning of step s are version s - 1. A row that was generated across versions counts by its
    newest, which gives the narrowest clip range.
    """
    return torch.tensor([float(batch.global_steps - 1 - tag["max_global_steps"]) for tag in batch.tags])


def staleness_of_turns(batch: Batch) -> torch.Tensor | None:
    """(B, L) nested: staleness of each turn, by its own newest version; None if no record states one.

    A turn without a version in its record gets the staleness of its row.
    """
    try:
        rows = batch.table()
    except ConfigError:  # no table of steps
        return None
    if np.isnan(rows.version).all():
        return None
    of_row = staleness(batch).numpy()[rows.row]
    return rows.to_tokens(np.where(np.isnan(rows.version), of_row, batch.global_steps - 1 - rows.version))


def outcome(batch: Batch) -> torch.Tensor:
    """(B,) score of each row's trajectory; 0 for rows without steps (failed episodes, padding)."""
    return _per_row(batch, batch.table().steps.score)


def group_outcome(batch: Batch) -> torch.Tensor:
    """(B,) mean score over the trajectories of each row's group."""
    steps = batch.table().steps
    first = steps.first_rows
    size = np.bincount(steps.group[first], minlength=steps.n_groups)
    mean = np.bincount(steps.group[first], weights=steps.score[first], minlength=steps.n_groups) / size
    return _per_row(batch, mean[steps.group])


def _per_row(batch: Batch, per_step: np.ndarray) -> torch.Tensor:
    column = torch.zeros(len(batch.tags))
    column[torch.from_numpy(batch.table().row)] = torch.tensor(per_step, dtype=torch.float32)
    return column


PROVIDERS: dict[str, Callable[[Batch], torch.Tensor]] = {
    STALENESS: staleness,
    "rewards": outcome,
    "group_reward": group_outcome,
    # Before the first optimizer step all log-ratios are 0; update_order.py writes the later ones.
    GROUP_LOG_RATIO: lambda batch: torch.zeros(len(batch.tags)),
}
"""Inputs that the trainer computes; any other comes from the estimator (``Credit.extra``), one value per step."""


def all_columns(spec: LossSpec, params: Any, batch: Batch, now: Mapping[str, torch.Tensor]) -> TensorDict:
    """The further columns of a loss, and the share of its weights if it has any.

    ``now``: (B, L) nested, verl's columns of the rows in the queue.
    """
    inputs = columns(spec, batch)
    if weighs(spec, params):
        # Computed before the update and over the whole batch: independent of the split into mini-batches.
        share = weight_share(
            spec,
            params,
            old_log_prob=now["old_log_probs"].to_padded_tensor(0.0),
            advantages=now["advantages"].to_padded_tensor(0.0),
            response_mask=now["response_mask"].to_padded_tensor(0),
            extra=read(inputs.copy().update({name: now[name] for name in TEACHER if name in now}), spec.inputs),
        )
        assert share is not None
        inputs[queue_name(WEIGHT_SHARE)] = torch.full((len(batch.tags),), float(share))
    return inputs


def columns(spec: LossSpec, batch: Batch) -> TensorDict:
    """The columns that a loss needs, and those that it accepts if available, for the queue.

    The columns of an estimator are copied to the tokens of each step's turn, and so is the staleness of a turn, except
    for a loss that takes one number per row.
    """
    result: dict[str, torch.Tensor] = {}
    for name in spec.inputs:
        if name == STALENESS and not spec.per_row and (of_turns := staleness_of_turns(batch)) is not None:
            result[queue_name(name)] = of_turns
        elif name in PROVIDERS:
            try:
                result[queue_name(name)] = PROVIDERS[name](batch)
            except ConfigError:  # no table of steps
                if name in spec.needs:
                    raise
        elif name in batch.extra:
            result[queue_name(name)] = batch.table().to_tokens(batch.extra[name])
        elif name == TURN and batch.rejects:
            result[queue_name(name)] = turn_ids(batch.response_mask)
    return TensorDict(result, batch_size=len(batch.tags))


def read(data: TensorDict, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The columns among ``names`` that the rows have, as a loss takes them: (B,) or (B, L) each."""
    present = {name: queue_name(name) for name in names if queue_name(name) in data}
    padded = data.select(*present.values()).to_padded_tensor() if present else {}
    return {name: padded[column] for name, column in present.items()}


def hand_over(worker: Any, names: Sequence[str]) -> None:
    """Run inside an actor worker: makes the columns of each micro-batch available to the loss."""
    if names:
        internals.wrap_loss(internals.actor_worker(worker).actor, _with_columns, tuple(names))


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


def observation_columns(
    coefficient: float,
    extra_fields: Sequence[Mapping[str, Any]],
    tags: Sequence[Mapping[str, Any]],
    response_mask: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What the trainer writes to the queue, and metrics; neither with a coefficient of 0.

    Args:
        extra_fields, tags: of the batch's B rows; those whose tag says ``is_padding`` are left out.
        response_mask: (B, L) nested, as the agent loop wrote it.
    """
    if not coefficient:
        return {}, {}
    runs, offsets = Runs.of(response_mask), row_offsets(response_mask).tolist()
    observed = torch.zeros(offsets[-1])
    for row, fields in enumerate(extra_fields):
        turns: Sequence[Sequence[Sequence[int]]] = fields.get(OBSERVED) or ()
        if tags[row].get("is_padding", False) or len(turns) != runs.count[row]:
            continue
        for turn, spans in enumerate(turns, start=int(runs.first[row])):
            for first, end in spans:
                if runs.start[turn] + first >= offsets[row]:  # else it is in the prompt
                    observed[runs.start[turn] + first : runs.start[turn] + end] = 1
    number = observed.sum()
    return {LEARNED: like(observed / number.clamp(min=1), response_mask)}, {"rows/observation_tokens": number.item()}


def learn_observations(process: Any, coefficient: float) -> None:
    """Run inside a process of the actor: its loss has the term from now on."""
    internals.wrap_loss(internals.actor_worker(process).actor, _with_observations, coefficient)


def _with_observations(
    inner: Callable[..., Any],
    coefficient: float,
    model_output: Mapping[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    **_: Any,
) -> Any:
    loss, metrics = inner(model_output=model_output, data=data, dp_group=dp_group)
    share = data.select(LEARNED).to_padded_tensor()[LEARNED]
    log_prob = torch.where(share > 0, no_padding_2_padding(model_output["log_probs"], data), 0.0)
    # verl adds up the losses of micro-batches and averages gradients over the ranks.
    cross_entropy = -(share * log_prob).sum() * (int(data[MINI_BATCHES]) * data["dp_size"])
    metrics["actor/observation_loss"] = Metric(value=cross_entropy.detach(), aggregation=AggregationType.SUM)
    return loss + coefficient * cross_entropy, metrics
