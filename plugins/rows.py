"""verl's rows to the one table of steps, and credit back to tokens. Both rollout layouts go through here.

A row is one training sample under the key ``{uid}_{session}_{index}``: group = uid, trajectory = uid and session.
Its record (:mod:`verl_turnkey.advantage.record`) lists the steps that the row holds: one (a row per step) or one per
turn (a row per trajectory). Turns are runs of ones in the row's response mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_turnkey.advantage import RecordError, StepBatch, validate_record

MISSING_RECORD = (
    "row {key} carries no turnkey record: its agent loop must set extra_fields['turnkey'] = "
    "verl_turnkey.advantage.make_record([make_step(...)]) on every output. Use the loop that does "
    "(actor_rollout_ref.rollout.agent.default_agent_loop=turnkey_env), or an estimator of verl's own."
)


@dataclass
class Rows:
    """The steps of a batch of rows and where each one came from.

    ``row`` and ``turn`` are (S,) int64: the position of a step's row in the batch, and of its turn in the row.
    """

    steps: StepBatch
    row: np.ndarray
    turn: np.ndarray
    turn_ids: torch.Tensor
    """(B, L) int64: turn of each response token, -1 off the model's own tokens"""
    env_reward: np.ndarray
    """(S,) the environment's rewards alone, without the row rewards"""
    failed: dict[str, str] = field(default_factory=dict)
    """trajectory -> reason, of the episodes that died; their masked rows are in no table"""

    def to_tokens(self, per_step: np.ndarray, response_mask: torch.Tensor) -> torch.Tensor:
        """Write one value per step, (S,), onto the tokens of its turn: (B, L) float32, zero elsewhere."""
        turns = int(self.turn_ids.max()) + 1 if self.turn_ids.numel() else 0
        table = torch.zeros(len(self.turn_ids), turns + 1)  # the last column serves turn id -1
        table[torch.from_numpy(self.row), torch.from_numpy(self.turn)] = torch.tensor(per_step, dtype=torch.float32)
        return table.gather(1, self.turn_ids % (turns + 1)) * response_mask


def split_key(key: str) -> tuple[str, str, int]:
    """``{uid}_{session}_{index}`` to (group, trajectory, index)."""
    group, session, index = key.rsplit("_", 2)
    return group, f"{group}_{session}", int(index)


def turn_ids(mask: torch.Tensor) -> torch.Tensor:
    """Number the runs of ones in each row of ``mask`` (B, L): 0, 1, ... on the runs, -1 elsewhere."""
    mask = mask.bool()
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return torch.where(mask, starts.cumsum(1) - 1, -1)


def record_of(extra_fields: Any) -> Any:
    """What an agent loop left as the record of a row, unchecked; None when it left nothing."""
    return extra_fields.get("turnkey") if isinstance(extra_fields, Mapping) else None


def failure(extra_fields: Any) -> str | None:
    """Why the episode of this row failed; None when it did not, or when its record does not say."""
    record = record_of(extra_fields)
    return record.get("failed") if isinstance(record, Mapping) else None


def read_rows(
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    extra_fields: Sequence[Mapping[str, Any]],
    response_mask: torch.Tensor,
    *,
    row_reward: np.ndarray | None = None,
    values: torch.Tensor | None = None,
) -> Rows:
    """Build the table of steps from a batch.

    Args:
        keys, tags: the batch's keys and tags, B each; rows whose tag says ``is_padding`` are left out.
        extra_fields: B dicts; ``extra_fields[i]["turnkey"]`` is the record.
        response_mask: (B, L), as the agent loop wrote it (before any rejection).
        row_reward: (B,) added to the rewards of the row's steps, in equal shares (verl's KL penalty, a negative one).
        values: (B, L) critic values, left-shifted as verl has them: the value at a token is the state before it.

    Raises:
        RecordError: a missing or malformed record, or one whose steps do not match the row's turns; names the row key.
    """
    ids = turn_ids(response_mask)
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    extras: list[Mapping[str, float | str]] = []
    env_reward: list[float] = []
    group, trajectory, row, turn = [], [], [], []
    failed: dict[str, str] = {}
    turns_per_row = (ids.max(1).values + 1).tolist() if ids.numel() else [0] * len(keys)
    extra_rewards = None if row_reward is None else row_reward.tolist()

    for i, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if tag.get("is_padding", False):
            continue
        record = record_of(extra_fields[i])
        if record is None:
            raise RecordError(MISSING_RECORD.format(key=key))
        validate_record(record, key)
        row_group, row_trajectory, _ = split_key(key)
        if record["failed"] is not None:
            if turns_per_row[i]:
                raise RecordError(f"row {key}: a failed episode must be fully masked, but its response mask has ones")
            failed[row_trajectory] = record["failed"]
            continue
        steps = record["steps"]
        # A row per step may hold gaps in its one turn (a rejected token); a row per trajectory may not.
        if len(steps) > 1 and len(steps) != turns_per_row[i]:
            raise RecordError(
                f"row {key}: its record has {len(steps)} steps but its response mask has {turns_per_row[i]} runs of "
                "ones; each turn needs its own run, separated by at least one masked token"
            )
        share = 0.0 if extra_rewards is None else extra_rewards[i] / len(steps)
        for t, step in enumerate(steps):
            for name, column in columns.items():
                column.append(step[name])
            env_reward.append(step["reward"])
            columns["reward"][-1] += share
            extras.append(step["extra"])
            group.append(row_group)
            trajectory.append(row_trajectory)
            row.append(i)
            turn.append(t)

    # A column that nobody filled is not there: the estimators that need it say so.
    given = {name: column for name, column in columns.items() if not column or any(v is not None for v in column)}
    rows = np.asarray(row, dtype=np.int64)
    turns = np.asarray(turn, dtype=np.int64)
    single = np.bincount(rows, minlength=len(keys)) == 1
    if single.any():  # the whole mask is the one turn
        only = torch.from_numpy(single)
        ids[only] = ids[only].clamp(max=0)
    return Rows(
        steps=StepBatch(
            group=group,
            trajectory=trajectory,
            tokens=_tokens_per_turn(ids, rows, turns),
            value=None if values is None else _value_at_turn_start(values, ids, rows, turns),
            extra=_extra_columns(extras),
            **given,
        ),
        row=rows,
        turn=turns,
        turn_ids=ids,
        env_reward=np.asarray(env_reward, dtype=np.float64),
        failed=failed,
    )


_COLUMNS = ("step", "reward", "anchor", "action", "valid", "penalty", "terminated", "truncated", "success")


def _extra_columns(extras: list[Mapping[str, float | str]]) -> dict[str, list[float | str]]:
    names = sorted({name for extra in extras for name in extra})
    lacking = [name for name in names if not all(name in extra for extra in extras)]
    # A column that only some steps have cannot be read by an estimator; leaving it out makes `needs` name it.
    return {name: [extra[name] for extra in extras] for name in names if name not in lacking}


def _tokens_per_turn(ids: torch.Tensor, rows: np.ndarray, turns: np.ndarray) -> np.ndarray:
    if not len(rows):
        return np.zeros(0, dtype=np.int64)
    width = int(max(ids.max(), turns.max())) + 2  # a turn without a token has no id of its own
    counts = torch.zeros(len(ids), width, dtype=torch.int64)
    counts.scatter_add_(1, ids + 1, torch.ones_like(ids))
    return counts.numpy()[rows, turns + 1]


def _value_at_turn_start(values: torch.Tensor, ids: torch.Tensor, rows: np.ndarray, turns: np.ndarray) -> np.ndarray:
    if not len(rows):
        return np.zeros(0)
    first = (ids[rows] == torch.from_numpy(turns)[:, None]).int().argmax(1)
    return values[torch.from_numpy(rows), first].double().numpy()
