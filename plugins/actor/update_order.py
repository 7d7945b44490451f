"""The order of an update: bins of about equal work, and updates on parts of a batch, by turn or by group."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import calculate_workload
from verl.workers.utils.padding import response_from_nested, response_to_nested

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses import LossSpec
from verl_turnkey.losses.clipping import accumulated_ratio
from verl_turnkey.plugins.actor.loss_inputs import GROUP_LOG_RATIO, queue_name
from verl_turnkey.plugins.config.training import UpdateConfig
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, part_of, partition_of


def even(weights: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each item: bins with equal numbers of items and about equal sums of ``weights``.

    ``bins`` divides the number of items. From the heaviest item down, each goes to the lightest bin that has room.
    """
    room = len(weights) // bins
    bin_of = np.zeros(len(weights), dtype=np.int64)
    order = np.argsort(-weights, kind="stable")
    lightest = [(0.0, number, room) for number in range(bins)]
    for i, weight in zip(order.tolist(), weights[order].tolist(), strict=True):
        total, number, left = lightest[0]
        bin_of[i] = number
        if left > 1:
            heapq.heapreplace(lightest, (total + weight, number, left - 1))
        else:
            heapq.heappop(lightest)
    return bin_of


Metrics = dict[str, Any]


class Calls(NamedTuple):
    """The trainer's functions that a phase calls."""

    log_probs: Callable[[KVBatchMeta], Any]
    """runs the actor's forward pass over the rows, and writes ``log_probs`` to the queue"""
    update: Callable[[KVBatchMeta, int], Metrics]
    """one update on the rows, of which the given number are not padding; returns verl's metrics"""


class Phase:
    """Some rows of a batch, filled up with its padding rows to a multiple of ``dp_size``.

    ``steps`` (n,) are positions in the table of steps, ``rows`` of the batch. Everything that is read or written is in
    the order of ``steps``.
    """

    def __init__(self, batch: KVBatchMeta, table: Rows, steps: np.ndarray, dp_size: int, calls: Calls) -> None:
        self.steps, self.calls = steps, calls
        rows = table.row[steps].tolist()
        padding = [i for i, tag in enumerate(batch.tags) if tag.get("is_padding", False)]
        chosen = rows + padding[: -len(rows) % dp_size]
        if len(chosen) % dp_size:
            raise RuntimeError(f"{len(rows)} rows and {len(padding)} padding rows for {dp_size} data-parallel ranks")
        self.real = part_of(batch, rows)
        lengths = torch.tensor([batch.tags[i]["seq_len"] for i in chosen])
        rank = even(calculate_workload(lengths).numpy(), dp_size)
        self.filled = part_of(batch, [chosen[i] for i in rank.argsort(kind="stable")])

    def read(self, *fields: str) -> TensorDict:
        """Columns of the real rows, nested."""
        return partition_of(self.real).read(self.real.keys, [*fields, "response_mask"])

    def write(self, **columns: torch.Tensor) -> None:
        """Columns of the real rows: (n,), or (n, L) nested."""
        partition_of(self.real).write(self.real.keys, columns)

    def log_probs(self) -> torch.Tensor:
        """(n, L) nested: log-probabilities under the policy as it is now."""
        self.calls.log_probs(self.filled)
        data = self.read("log_probs")
        return response_from_nested(data["log_probs"], data["response_mask"])

    def scale_advantages(self, factor: torch.Tensor) -> None:
        """Multiply the advantages of each row by ``factor`` (n,)."""
        data = self.read("advantages")
        scaled = data["advantages"].to_padded_tensor(0.0) * factor[:, None]
        self.write(advantages=response_to_nested(scaled.float(), data["response_mask"]))

    def update(self) -> Metrics:
        return self.calls.update(self.filled, len(self.real.keys))


def compares_groups(loss: LossSpec | None) -> bool:
    """Whether ``loss`` needs the log-ratios of its groups before each optimizer step."""
    return loss is not None and loss.compares_groups


def reverse_turns(
    batch: KVBatchMeta, table: Rows, dp_size: int, calls: Calls, options: UpdateConfig, current: bool
) -> Metrics:
    """SeeUPO: one phase per turn number, the last first; returns the metrics of all phases.

    ::

        M_t = ratio_t A        A: the estimator's advantages; ratio_T = 1 for each trajectory
        update turn t with M_t
        ratio_{t-1} = clip(ratio_t clip(exp(mean over the turn's tokens of log pi_new - log pi_old)))     Eq 8

    ``old_policy="turn"``: pi_old is the policy right before the turn's update, as in the released code, and each turn
    starts at ratio 1. ``"iteration"``: the one at the beginning of the step, as in the paper. All turns share one set
    of weights, so the product of the ratios is not the ratio of the final policy to the first, and the paper's proof of
    monotonic improvement, which has a policy per turn, does not carry over in either reading.

    ``current``: whether the batch's old log-probabilities are those of the current policy. Turn numbers without a model
    token are skipped.

    Raises:
        ConfigError: a row holds several turns.
    """
    if table.turn.size and table.turn.max() > 0:
        raise ConfigError(
            "turnkey.update.order=reverse_turns needs a row per turn, but the agent loop gives rows with several: set "
            "turnkey.rollout.layout=steps (with the loop turnkey_env), or turnkey.update.order=batch"
        )
    ratio = torch.ones(table.steps.n_trajectories)
    trajectory = torch.from_numpy(table.steps.trajectory.copy())
    numbers = np.unique(table.steps.step[table.steps.tokens > 0])[::-1]
    updates: list[tuple[Metrics, int]] = []
    for done, number in enumerate(numbers):
        at = np.flatnonzero(table.steps.step == number)
        phase = Phase(batch, table, at, dp_size, calls)
        if not (current and done == 0) and options.old_policy == "turn":
            phase.write(old_log_probs=phase.log_probs())
        old = phase.read("old_log_probs")
        phase.scale_advantages(ratio[trajectory[at]])
        updates.append((phase.update(), len(at)))
        if done + 1 < len(numbers):
            before, mask = (old[name].to_padded_tensor(0) for name in ("old_log_probs", "response_mask"))
            after = phase.log_probs().to_padded_tensor(0.0)
            clip = {"clip_low": options.ratio_clip, "clip_high": options.ratio_clip}
            ratio[trajectory[at]] = accumulated_ratio(ratio[trajectory[at]], before, after, mask, **clip)
    return _means(updates) | {
        "actor/phases": float(len(numbers)),
        "actor/accumulated_ratio/mean": ratio.mean().item(),
        "actor/accumulated_ratio/max": ratio.max().item(),
        "actor/accumulated_ratio/min": ratio.min().item(),
    }


def group_log_ratios(
    batch: KVBatchMeta, table: Rows, dp_size: int, calls: Calls, mini_batches: int, epochs: int, current: bool
) -> Metrics:
    """REBEL: before each optimizer step the log-ratios of its groups are computed under the current policy.

    A mini-batch holds whole groups. A trajectory's log-ratio is the sum over all its rows, while a loss sees one row:
    each row is given its group's mean minus the log-ratio of the trajectory's other rows. If ``current``, as above,
    all log-ratios are 0 before the first step.
    """
    steps = table.steps
    parts = np.array_split(np.arange(steps.n_groups), min(mini_batches, steps.n_groups))
    updates: list[tuple[Metrics, int]] = []
    moved = not current
    _, rows = np.unique(table.row, return_index=True)  # one step of each row; a row may hold several
    for _ in range(epochs):
        for groups in parts:
            at = rows[np.isin(steps.group[rows], groups)]
            phase = Phase(batch, table, at, dp_size, calls)
            if moved:
                phase.write(**{queue_name(GROUP_LOG_RATIO): _group_log_ratio(phase, table)})
            updates.append((phase.update(), len(at)))
            moved = True
    return _means(updates)


def _group_log_ratio(phase: Phase, table: Rows) -> torch.Tensor:
    now = phase.log_probs().to_padded_tensor(0.0)
    data = phase.read("old_log_probs")
    mask = data["response_mask"].to_padded_tensor(0).bool()
    log_ratio = torch.where(mask, now - data["old_log_probs"].to_padded_tensor(0.0), 0.0).sum(1).double().numpy()
    _, trajectory = np.unique(table.steps.trajectory[phase.steps], return_inverse=True)
    groups, group = np.unique(table.steps.group[phase.steps], return_inverse=True)
    whole = np.bincount(trajectory, weights=log_ratio)
    group_of = np.zeros(len(whole), dtype=np.int64)
    group_of[trajectory] = group
    mean = np.bincount(group_of, weights=whole, minlength=len(groups)) / np.bincount(group_of, minlength=len(groups))
    return torch.tensor(mean[group] - (whole[trajectory] - log_ratio), dtype=torch.float32)


def _means(updates: Sequence[tuple[Metrics, int]]) -> Metrics:
    """verl's metrics of several updates, each with its number of rows, as means weighted by rows."""
    sums: dict[str, float] = defaultdict(float)
    numbers: dict[str, int] = defaultdict(int)
    for metrics, rows in updates:
        for name, value in metrics.items():
            sums[name] += float(value) * rows
            numbers[name] += rows
    return {name: total / numbers[name] for name, total in sums.items()}
