"""verl's rows to the one table of steps, and credit back to tokens. Both rollout layouts go through here.

A row is one training sample under the key ``{uid}_{session}_{index}``: group = uid, trajectory = uid and session.
Its record (:mod:`verl_turnkey.advantage.record`) lists the steps that the row holds: one (a row per step) or one per
turn (a row per trajectory). Turns are runs of ones in the row's response mask. Rows without records:
:mod:`verl_turnkey.plugins.credit.unrecorded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch

from verl_turnkey.advantage import RecordError, StepBatch, validate_record
from verl_turnkey.losses.turns import turn_ids
from verl_turnkey.plugins.credit.row_turns import Found, at_turn_start, record_of, split_key, sum_by_turn, turn_counts
from verl_turnkey.plugins.credit.unrecorded import NO_TOKENS, derive


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
    reward_before_kl: np.ndarray
    """(S,) rewards as the agent loop gave them; ``steps.reward`` has verl's KL penalty in it"""
    recorded: bool
    """whether the agent loop told the steps, or they were derived"""
    failed: dict[str, str] = field(default_factory=dict)
    """trajectory -> reason, of the episodes that died; their masked rows are in no table"""

    def to_tokens(self, per_step: np.ndarray, response_mask: torch.Tensor) -> torch.Tensor:
        """Write one value per step, (S,), onto the tokens of its turn: (B, L) float32, zero elsewhere."""
        turns = int(self.turn_ids.max()) + 1 if self.turn_ids.numel() else 0
        table = torch.zeros(len(self.turn_ids), turns + 1)  # the last column serves turn id -1
        table[torch.from_numpy(self.row), torch.from_numpy(self.turn)] = torch.tensor(per_step, dtype=torch.float32)
        return table.gather(1, self.turn_ids % (turns + 1)) * response_mask


def failure(extra_fields: Any, has_tokens: bool) -> str | None:
    """Why this row is no part of an episode that was played; None when it is, or when its record does not say.

    ``has_tokens``: whether any token of the row is the model's, all there is to see without a record.
    """
    record = record_of(extra_fields)
    if record is None:
        return None if has_tokens else NO_TOKENS
    return record.get("failed") if isinstance(record, Mapping) else None


def read_rows(
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    extra_fields: Sequence[Mapping[str, Any]],
    response_mask: torch.Tensor,
    *,
    scores: torch.Tensor | None = None,
    kl: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    lists: Sequence[str] = (),
) -> Rows:
    """Build the table of steps from a batch.

    Args:
        keys, tags: the batch's keys and tags, B each; rows whose tag says ``is_padding`` are left out.
        extra_fields: B dicts; ``extra_fields[i]["turnkey"]`` is the record. Either all rows have one or none.
        response_mask: (B, L), as the agent loop wrote it (before any rejection).
        scores: (B, L) verl's rewards per token (``rm_scores``), read when the rows have no records.
        kl: (B, L) added to the reward of the turn that a token is in (verl's KL penalty, a negative one).
        values: (B, L) critic values, left-shifted as verl has them: the value at a token is the state before it.
        lists: see :func:`verl_turnkey.plugins.credit.unrecorded.derive`.

    Raises:
        RecordError: a malformed record, one whose steps do not match the row's turns, or one that is missing while
            other rows have theirs; names the row key.
    """
    ids = turn_ids(response_mask)
    real = [i for i, tag in enumerate(tags) if not tag.get("is_padding", False)]
    records = [record_of(extra_fields[i]) for i in real]
    recorded = not real or any(record is not None for record in records)
    if recorded:
        found = _read_records(keys, real, records, turn_counts(ids))
    else:
        assert scores is not None, "rows without records need scores"
        found = derive(keys, real, ids, scores, [tag["response_len"] for tag in tags], extra_fields, lists)
    row, turn = np.array(found.row, dtype=np.int64), np.array(found.turn, dtype=np.int64)
    single = np.bincount(row, minlength=len(keys)) == 1
    if single.any():  # the whole mask is the one turn
        only = torch.from_numpy(single)
        ids[only] = ids[only].clamp(max=0)
    columns = dict(found.columns)
    reward = np.asarray(columns.pop("reward"), dtype=np.float64)
    return Rows(
        steps=StepBatch(
            **columns,
            reward=reward if kl is None else reward + sum_by_turn(kl, ids, row, turn),
            tokens=sum_by_turn(ids >= 0, ids, row, turn),
            value=None if values is None else at_turn_start(values, ids, row, turn),
            text=found.extra.pop("text", None),
            extra=found.extra,
        ),
        row=row,
        turn=turn,
        turn_ids=ids,
        reward_before_kl=reward,
        recorded=recorded,
        failed=found.failed,
    )


def _read_records(keys: Sequence[str], real: Sequence[int], records: Sequence[Any], turns: Sequence[int]) -> Found:
    """The steps of the rows ``real`` as their ``records`` say; ``turns``: number of turns in each row of the batch."""
    if any(record is None for record in records):
        _raise_missing([keys[i] for i in real], records)
    found, group, trajectory = Found(), [], []
    steps: list[Mapping[str, Any]] = []
    for i, record in zip(real, records, strict=True):
        _check_row(keys[i], record, turns[i])
        row_group, row_trajectory, _ = split_key(keys[i])
        if record["failed"] is not None:
            found.failed[row_trajectory] = record["failed"]
        held = record["steps"]
        steps += held
        group += [row_group] * len(held)
        trajectory += [row_trajectory] * len(held)
        found.row += [i] * len(held)
        found.turn += range(len(held))
    found.columns = {"group": group, "trajectory": trajectory, **_columns(steps)}
    found.extra = _extra_columns(steps)
    return found


def _raise_missing(keys: Sequence[str], records: Sequence[Any]) -> NoReturn:
    without = next(key for key, record in zip(keys, records, strict=True) if record is None)
    other = next(key for key, record in zip(keys, records, strict=True) if record is not None)
    raise RecordError(
        f"row {without} carries no turnkey record, row {other} does: either every output of an agent loop sets "
        "extra_fields['turnkey'] (a failed one make_record([], failed=reason)), or none does"
    )


def _check_row(key: str, record: Any, turns: int) -> None:
    """The border of trust: records come from users' loops too."""
    validate_record(record, key)
    if record["failed"] is not None and turns:
        raise RecordError(f"row {key}: a failed episode must be fully masked, but its response mask has ones")
    # A row per step may hold gaps in its one turn (a rejected token); a row per trajectory may not.
    if (held := len(record["steps"])) > 1 and held != turns:
        raise RecordError(
            f"row {key}: its record has {held} steps but its response mask has {turns} runs of ones; each "
            "turn needs its own run, separated by at least one masked token"
        )


_COLUMNS = ("step", "anchor", "action", "valid", "penalty", "terminated", "truncated", "success")


def _columns(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns of a StepBatch. One that nobody filled is not there: the estimators that need it say so."""
    columns = {name: [step[name] for step in steps] for name in _COLUMNS}
    columns["reward"] = [step.get("composed_reward", step["reward"]) for step in steps]
    return {name: column for name, column in columns.items() if not column or any(v is not None for v in column)}


def _extra_columns(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The further columns, of the names that all steps have.

    A turn without an action brought nothing about: what it lacks is 0 or None. Any other gap leaves the column out, so
    that ``needs`` names it: no estimator could read it.
    """
    columns: dict[str, list[Any]] = {}
    for name in sorted({name for step in steps for name in step["extra"]}):
        if all(name in step["extra"] or step["action"] is None for step in steps):
            blank = None if any(isinstance(step["extra"].get(name), str) for step in steps) else 0.0
            columns[name] = [step["extra"].get(name, blank) for step in steps]
    return columns
