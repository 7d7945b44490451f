"""Builds the table of steps from verl's rows, in any layout, and writes credit back to their tokens.

A row is one training sample under the key ``{uid}_{session}_{index}``: group = uid, trajectory = uid and session, with
the branch of its record behind a dot where the rollout forked (``{uid}_{session}.{branch}``).
Its record (:mod:`verl_turnkey.advantage.record`) lists the steps that the row holds: one step, or several consecutive
ones (merged steps, or a row per trajectory), each of which is a turn. Turns are runs of ones in the row's response
mask. Rows without records: :mod:`verl_turnkey.plugins.credit.unrecorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch

from verl_turnkey.advantage import RecordError, StepBatch, validate_record
from verl_turnkey.losses.turns import Turns, like
from verl_turnkey.plugins.credit.row_turns import ParsedRows, Runs, branch_name, record_of, split_key
from verl_turnkey.plugins.credit.supplied import Column, values_before
from verl_turnkey.plugins.credit.unrecorded import NO_TOKENS, derive

REPLAYED = "replayed"
"""tag in verl's queue of the rows of an episode that was played in an earlier step"""


@dataclass
class Rows:
    """The steps of a batch of rows, and the position of each.

    ``row`` and ``turn`` are (S,) int64: the position of a step's row in the batch, and of its turn in the row.
    """

    steps: StepBatch
    row: np.ndarray
    turn: np.ndarray
    runs: Runs
    """of the response mask"""
    of_run: np.ndarray
    """the step that each run is of, S for none"""
    turns: Turns
    """the response tokens of each step: ``index`` is jagged like the response mask, and S on tokens of no step"""
    reward: np.ndarray | None
    """(S,) the environment's rewards; None: the steps do not come from records"""
    reward_before_kl: np.ndarray
    """(S,) composed rewards as the agent loop gave them; ``steps.reward`` has verl's KL penalty in it, and the scores
    of a process reward model that are part of the reward"""
    kl: np.ndarray | None
    """(S,) verl's KL penalty in ``steps.reward``, a negative one; None: there is none"""
    version: np.ndarray
    """(S,) float64: the newest weights version that wrote a step's tokens, nan where its record does not say"""
    branch: np.ndarray
    """(S,) int64: the branch of its rollout that a step is of; 0 where none forked"""
    recorded: bool
    """whether the steps come from records; else they are derived from mask and rewards"""
    failed: dict[str, str] = field(default_factory=dict)
    """trajectory -> reason, of failed episodes, which have no steps in the table"""

    def to_tokens(self, per_step: np.ndarray) -> torch.Tensor:
        """Write one value per step, (S,), onto the tokens of its turn: jagged float32, zero elsewhere."""
        return self.runs.spread(np.append(per_step, 0.0)[self.of_run].astype(np.float32), 0.0)

    def tokens_of_steps(self, per_token: np.ndarray) -> torch.Tensor:
        """Write one value per token of a step, (T,) in the order of ``turns.index``: jagged float32, zero elsewhere."""
        index = self.turns.index.values()
        flat = torch.zeros(len(index), dtype=torch.float32)
        flat[index < self.turns.n] = torch.from_numpy(per_token.astype(np.float32))
        return like(flat, self.turns.index)


def failure(extra_fields: Any, has_tokens: bool) -> str | None:
    """Why the episode of this row failed; None if it was played, or if its record is malformed.

    ``has_tokens``: whether any token of the row is the model's. Without a record an episode without tokens has failed.
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
    supply: Mapping[str, Column] | None = None,
    heads: Callable[[Turns, np.ndarray, Mapping[str, Any]], Mapping[str, np.ndarray]] | None = None,
    before: Collection[str] = (),
) -> Rows:
    """Build the table of steps from a batch. All tensors are jagged, with the rows' numbers of response tokens.

    Args:
        keys, tags: the batch's keys and tags, B each; rows whose tag says ``is_padding`` are left out.
        extra_fields: B dicts; ``extra_fields[i]["turnkey"]`` is the record. Either all rows have one or none.
        response_mask: as the agent loop wrote it (before any rejection).
        scores: verl's rewards per token (``rm_scores``), read when the rows have no records.
        kl: added to the reward of the turn that a token is in (verl's KL penalty, a negative one).
        values: critic values, left-shifted as verl has them: the value at a token is the state before it.
        lists: see :func:`verl_turnkey.plugins.credit.unrecorded.derive`.
        supply: further columns by name, for each that the records do not give.
        heads: likewise, the values of the heads of a critic, from the turns of the steps, the row of each, and their
            further columns; the first head's are the values of the steps, too.
        before: names of the further columns that the estimator takes from the state before a step.

    Raises:
        RecordError: a malformed record, one whose steps do not match the row's turns, or one that is missing while
            other rows have theirs; names the row key.
    """
    runs = Runs.of(response_mask)
    real = [i for i, tag in enumerate(tags) if not tag.get("is_padding", False)]
    records = [record_of(extra_fields[i]) for i in real]
    recorded = not real or any(record is not None for record in records)
    if recorded:
        parsed = _read_records(keys, real, records, runs.count.tolist(), before)
    else:
        assert scores is not None, "rows without records need scores"
        parsed = derive(keys, real, runs, scores, extra_fields, lists)
    row, turn = np.array(parsed.row, dtype=np.int64), np.array(parsed.turn, dtype=np.int64)
    of_run = runs.steps(row, turn)
    turns = runs.turns(of_run, len(row))
    columns = dict(parsed.columns)
    reward = np.asarray(columns.pop("reward"), dtype=np.float64)
    of_heads = {} if heads is None else heads(turns, row, parsed.extra)
    known = {**of_heads, **parsed.extra}
    supplied = {name: column(turns, row) for name, column in (supply or {}).items() if name not in known}
    rewards_of_env = np.array(parsed.reward, dtype=np.float64) if recorded else None
    trajectory = np.unique(columns["trajectory"], return_inverse=True)[1]
    returns = np.bincount(trajectory, reward if rewards_of_env is None else rewards_of_env)
    before_turn = None if values is None else values_before(values, turns, row)
    penalty = None if kl is None else turns.sum(kl.double()).numpy()
    return Rows(
        steps=StepBatch(
            **columns,
            reward=reward if penalty is None else reward + penalty,
            env_return=returns[trajectory],
            tokens=turns.tokens.numpy(),
            value=next(iter(of_heads.values()), before_turn),
            text=known.pop("text", None),
            extra={**known, **supplied},
        ),
        row=row,
        turn=turn,
        runs=runs,
        of_run=of_run,
        turns=turns,
        reward=rewards_of_env,
        reward_before_kl=reward,
        kl=penalty,
        version=np.array(parsed.version or [np.nan] * len(row), dtype=np.float64),
        branch=np.array(parsed.branch or [0] * len(row), dtype=np.int64),
        recorded=recorded,
        failed=parsed.failed,
    )


def _read_records(
    keys: Sequence[str], real: Sequence[int], records: Sequence[Any], turns: Sequence[int], before: Collection[str]
) -> ParsedRows:
    """The steps of the rows ``real`` from their ``records``; ``turns``: number of turns in each row of the batch."""
    if any(record is None for record in records):
        _raise_missing([keys[i] for i in real], records)
    parsed, group, trajectory = ParsedRows(), [], []
    steps: list[Mapping[str, Any]] = []
    for i, record in zip(real, records, strict=True):
        _check_row(keys[i], record, turns[i])
        row_group, row_trajectory, _ = split_key(keys[i])
        if record["failed"] is not None:
            parsed.failed[row_trajectory] = record["failed"]
        held = record["steps"]
        steps += held
        group += [row_group] * len(held)
        branch = record.get("branch", 0)
        trajectory += [branch_name(row_trajectory, branch)] * len(held)
        parsed.branch += [branch] * len(held)
        parsed.row += [i] * len(held)
        parsed.turn += range(len(held))
    parsed.columns = {"group": group, "trajectory": trajectory, **_columns(steps)}
    parsed.extra = _extra_columns(steps, before)
    parsed.version = [step.get("version", np.nan) for step in steps]
    parsed.reward = [step["reward"] for step in steps]
    return parsed


def _raise_missing(keys: Sequence[str], records: Sequence[Any]) -> NoReturn:
    without = next(key for key, record in zip(keys, records, strict=True) if record is None)
    other = next(key for key, record in zip(keys, records, strict=True) if record is not None)
    raise RecordError(
        f"row {without} carries no turnkey record, row {other} does: either every output of an agent loop sets "
        "extra_fields['turnkey'] (a failed one make_record([], failed=reason)), or none does"
    )


def _check_row(key: str, record: Any, turns: int) -> None:
    """Check a record and whether it fits its row: it may come from a user's agent loop."""
    validate_record(record, key)
    if record["failed"] is not None and turns:
        raise RecordError(f"row {key}: a failed episode must be fully masked, but its response mask has ones")
    # The turn of a row with one step may have gaps (masked tokens); turns of a row with several may not.
    if (held := len(record["steps"])) > 1 and held != turns:
        raise RecordError(
            f"row {key}: its record has {held} steps but its response mask has {turns} runs of ones; each "
            "turn needs its own run, separated by at least one masked token"
        )


_COLUMNS = ("step", "anchor", "action", "valid", "penalty", "terminated", "truncated", "success")
_OF_TREES = ("after", "request", "outcome")


def _columns(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns of a StepBatch. A column without any value is left out; estimators that need it are refused."""
    columns = {name: [step[name] for step in steps] for name in _COLUMNS}
    columns |= {name: [step.get(name) for step in steps] for name in _OF_TREES}
    columns["reward"] = [step.get("composed_reward", step["reward"]) for step in steps]
    return {name: column for name, column in columns.items() if not column or any(v is not None for v in column)}


def _extra_columns(steps: Sequence[Mapping[str, Any]], before: Collection[str]) -> dict[str, list[Any]]:
    """The further columns: the names that every step with an action has.

    A step without an action changed nothing, so an entry that it lacks is 0, or None in a column of texts. A name that
    a step with an action lacks is left out, and one in ``before`` that any step lacks; an estimator that needs it is
    then refused by that name.
    """
    columns: dict[str, list[Any]] = {}
    for name in sorted({name for step in steps for name in step["extra"]}):
        if all(name in step["extra"] or (step["action"] is None and name not in before) for step in steps):
            blank = None if any(isinstance(step["extra"].get(name), str) for step in steps) else 0.0
            columns[name] = [step["extra"].get(name, blank) for step in steps]
    return columns
