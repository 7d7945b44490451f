"""What the trainer supplies to methods: columns that the record lacks, and the values of a critic's heads.

The columns are made of verl's fields of the rows; what stands in each: ``FROM_TRAINER`` of
:mod:`verl_turnkey.advantage.registry`. A head of a critic gives its value before a token of each turn, and is fitted to
a target there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from verl_turnkey.advantage import ConfigError, Credit, Tokens, ValueHead
from verl_turnkey.advantage.modifiers.rank_shaping import NAMES as RANK_COLUMNS
from verl_turnkey.advantage.registry import FROM_TRAINER
from verl_turnkey.losses.turns import Turns, like, row_offsets
from verl_turnkey.plugins.config.scorers import SCORE, TURN_SCORE

Column = Callable[[Turns, np.ndarray], Sequence[Any] | np.ndarray]
"""From the turns of the steps and the row of each, (S,), to one entry per step."""

#: With it verl takes the rollout's log-probabilities for the old policy's, and computes no entropy.
BYPASS = "algorithm.rollout_correction.bypass_mode"


@dataclass(frozen=True)
class Source:
    """``fields``: of the queue; ``column(data, turns, row)`` makes the column of the fields ``data`` of all rows.

    It needs all of the ``fields``, or ``any_of`` them.
    """

    fields: tuple[str, ...]
    column: Callable[[Mapping[str, Any], Turns, np.ndarray], Sequence[Any] | np.ndarray]
    any_of: bool = False

    def has(self, data: Mapping[str, Any]) -> bool:
        return (any if self.any_of else all)(field in data for field in self.fields)


def _log_prob(data: Mapping[str, Any], turns: Turns, row: np.ndarray) -> np.ndarray:
    return turns.sum(data["old_log_probs"].double()).numpy()


def _entropy(data: Mapping[str, Any], turns: Turns, row: np.ndarray) -> np.ndarray:
    mean = turns.mean(data["entropy"].double()).numpy()
    return np.where(turns.tokens.numpy() > 0, mean, np.nan)


def teacher_gap(data: Mapping[str, Any]) -> torch.Tensor:
    """Log-probability under the teacher's prompt minus that under the student's, by token, flat: float64."""
    return data[TEACHER].values().double() - data["old_log_probs"].values().double()


def _with_text(
    measure: Callable[[Mapping[str, Any], Turns], torch.Tensor],
) -> Callable[[Mapping[str, Any], Turns, np.ndarray], np.ndarray]:
    """A ``measure`` of each step (S,), nan where the row has no text for a teacher, or the step no token."""

    def column(data: Mapping[str, Any], turns: Turns, row: np.ndarray) -> np.ndarray:
        has_text = np.array([bool(flag) for flag in data[HAS_TEACHER]], dtype=bool)[row]
        return np.where(has_text & (turns.tokens.numpy() > 0), measure(data, turns).numpy(), np.nan)

    return column


def tokens_of(data: Mapping[str, Any], turns: Turns, training_step: int, always: bool = False) -> Tokens | None:
    """The tokens of all steps with their gaps, in the order of ``turns.index``; None: no teacher ran.

    With ``always``, gaps of 0 without a teacher.
    """
    if not (GAP.has(data) or always):
        return None
    step = turns.index.values()
    gap = teacher_gap(data) if GAP.has(data) else torch.zeros(len(step), dtype=torch.float64)
    return Tokens(step[step < turns.n].numpy(), gap[step < turns.n].numpy(), training_step)


def values_before(values: torch.Tensor, turns: Turns, row: np.ndarray) -> np.ndarray:
    """``values`` at the first token of each step, or of its row where the step has none -> (S,) float64."""
    start = row_offsets(values)[torch.from_numpy(row)]
    return values.values()[torch.where(turns.tokens > 0, turns.first(), start)].double().numpy()


def _value(data: Mapping[str, Any], turns: Turns, row: np.ndarray) -> np.ndarray:
    return values_before(data["values"], turns, row)


def _rank(place: int, data: Mapping[str, Any], turns: Turns, row: np.ndarray) -> np.ndarray:
    return np.stack([entry.double().numpy() for entry in data[RANK].unbind()])[row, place]


def turn_score(data: Mapping[str, Any], turns: Turns, row: np.ndarray) -> np.ndarray:
    """The process reward model's score of each step, (S,)."""
    return turns.sum(data[SCORE].double()).numpy()


def _task(data: Mapping[str, Any], turns: Turns, row: np.ndarray) -> list[str]:
    keys = task_keys({name: list(data[name]) for name in TASK_FIELDS if name in data})
    return [keys[i] for i in row]


TEACHER, HAS_TEACHER = "teacher_log_prob", "has_teacher"
"""fields of the queue: log-probabilities under the teacher's prompt, like ``old_log_probs``, which they equal in a row
without a text; and whether a row has one"""
RANK = "turnkey_rank"
"""field of the queue: effective rank of a row's hidden states, its velocity and its acceleration, (B, 3)"""
STRIDE, WINDOW = "turnkey_rank_stride", "turnkey_rank_window"
"""entries of a batch's ``extra_info``, in the pass that measures :data:`RANK` alone"""
GAP = Source((TEACHER, HAS_TEACHER, "old_log_probs"), _with_text(lambda data, turns: turns.sum(teacher_gap(data))))
TASK = "turnkey_task"
"""``envs.tasks.COLUMN``; every process that imports verl imports this file, and ``envs`` would bring gymnasium"""
TASK_FIELDS = (TASK, "data_source", "index", "raw_prompt")
"""by which tasks are told apart"""
SOURCES = {
    "extra.log_prob": Source(("old_log_probs",), _log_prob),
    "extra.entropy": Source(("entropy",), _entropy),
    "extra.task": Source(TASK_FIELDS, _task, any_of=True),
    "extra.teacher_gap": GAP,
    "extra.teacher_gap_mean": Source(GAP.fields, _with_text(lambda data, turns: turns.mean(teacher_gap(data)))),
    "extra.teacher_log_prob_mean": Source(
        (TEACHER, HAS_TEACHER), _with_text(lambda data, turns: turns.mean(data[TEACHER].double()))
    ),
    **{f"extra.value_{stream}": Source(("values",), _value) for stream in ("low", "high", "term")},
    **{f"extra.{name}": Source((RANK,), partial(_rank, place)) for place, name in enumerate(RANK_COLUMNS)},
    TURN_SCORE: Source((SCORE,), turn_score),
}
OF_CRITIC = {column for column, source in SOURCES.items() if "values" in source.fields}
OF_RANK = {f"extra.{name}" for name in RANK_COLUMNS}
#: What a second prompt says of a step.
OF_TEACHER = {column for column, source in SOURCES.items() if TEACHER in source.fields}


def from_trainer(prm: str | None, critic: bool) -> set[str]:
    """The columns that the trainer supplies; ``prm``: ``turnkey.prm.kind``; ``critic``: whether there is one."""
    return ({*FROM_TRAINER} | ({TURN_SCORE} if prm else set())) - (set() if critic else OF_CRITIC)


def fields(columns: Iterable[str]) -> list[str]:
    """The fields of the queue that the supplied ones among ``columns`` are made of."""
    return [field for column in columns if column in SOURCES for field in SOURCES[column].fields]


def supply(columns: Iterable[str], data: Mapping[str, Any]) -> dict[str, Column]:
    """How the ``columns`` are made of the fields in ``data``, by name without ``extra.``.

    Left out are columns that the trainer does not supply, or has no field for.
    """
    return {
        column.removeprefix("extra."): partial(SOURCES[column].column, data)
        for column in columns
        if column in SOURCES and SOURCES[column].has(data)
    }


def task_key(row: Mapping[str, Any]) -> str:
    """The key of a data row's task, the same in every batch and every run: 16 hexadecimal digits.

    It is made of the column ``turnkey_task``; in data without one of the data source, ``extra_info.index`` and the
    prompt.
    """
    text = row.get(TASK)
    if not isinstance(text, str):
        text = json.dumps([row.get(name) for name in ("data_source", "index", "raw_prompt")], default=_plain)
    return sha256(text.encode()).hexdigest()[:16]


def task_keys(fields: Mapping[str, Iterable[Any]]) -> list[str]:
    """:func:`task_key` of each row; ``fields``: the columns that there are of :data:`TASK_FIELDS`."""
    return [task_key(dict(zip(fields, values, strict=True))) for values in zip(*fields.values(), strict=True)]


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch, bytes, and images of a prompt; never an address in memory."""
    if hasattr(value, "ndim"):
        return value.tolist()
    data = value.tobytes() if hasattr(value, "tobytes") else value
    return sha256(data).hexdigest() if isinstance(data, bytes) else type(value).__name__


def check_supplied(names: Iterable[str], lacking: Iterable[str]) -> None:
    """Refuse columns that no record gives and that this configuration has no field for.

    Entropies, without old log-probabilities; what a teacher says, without one. ``names``: of the estimator and of its
    modifiers.

    Raises:
        ConfigError: names the key to change.
    """
    lacking = set(lacking)
    if "extra.entropy" in lacking:
        raise ConfigError(
            f"{' with '.join(names)} needs 'extra.entropy' of each step, the entropy of the old policy, which verl "
            f"does not compute with {BYPASS}=true: set it to false"
        )
    if columns := sorted(lacking & OF_TEACHER):
        raise ConfigError(
            f"{' with '.join(names)} needs {columns[0]!r} of each step, which takes a teacher's prompt: set "
            "turnkey.teacher.source"
        )


VALUES = "values"
"""verl's field of the critic's values; the first head has it"""


def value_field(heads: Sequence[ValueHead], head: ValueHead) -> str:
    """The field of the queue with the values of ``head``, one of ``heads``, by token, jagged (B, L)."""
    return VALUES if head == heads[0] else f"turnkey_value_{head.name}"


def target_field(head: ValueHead) -> str:
    """The field of the queue with what ``head`` is fitted to, jagged (B, L); nan where it learns nothing."""
    return f"turnkey_target_{head.name}"


def positions(head: ValueHead, turns: Turns, extra: Mapping[str, Any]) -> torch.Tensor:
    """Before which token of the flat mask a head gives the value of each turn -> (n,) int64; -1: it has no tokens.

    ``extra``: the further columns of the steps. A turn that ends with its decision has its last token.
    """
    place = np.zeros(turns.n)
    for decision in reversed(head.behind):
        if f"to_{decision}" in extra:
            behind = np.nan_to_num(np.asarray(extra[f"to_{decision}"], dtype=np.float64))
            place = np.where(behind > 0, behind, place)
    index = turns.index.values()
    order = torch.argsort(index, stable=True)  # the tokens of the first turn, of the second, ...
    inside = torch.minimum(torch.from_numpy(place).long(), turns.tokens - 1)
    token = (turns.tokens.cumsum(0) - turns.tokens + inside).clamp(0, max(0, len(index) - 1))
    return torch.where(turns.tokens > 0, order[token], -1)


def head_values(
    heads: Sequence[ValueHead],
    fields: Mapping[str, torch.Tensor],
    turns: Turns,
    row: np.ndarray,
    extra: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """``value_<name>`` (S,) of each head; of a turn without tokens, at the beginning of its row."""
    columns = {}
    for head in heads:
        values, at = fields[value_field(heads, head)], positions(head, turns, extra)
        start = row_offsets(values)[torch.from_numpy(row)]
        columns[f"value_{head.name}"] = values.values()[torch.where(at < 0, start, at)].double().numpy()
    return columns


def target_columns(
    heads: Sequence[ValueHead], credit: Credit, turns: Turns, extra: Mapping[str, Any], mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The fields of :func:`target_field`, jagged float32.

    ``mask``: jagged, of the tokens that are trained; a target of a rejected token is none.
    """
    columns = {}
    for head in heads:
        target = torch.full(mask.values().shape, torch.nan)
        at = positions(head, turns, extra)
        target[at[at >= 0]] = torch.from_numpy(credit.targets[head.name]).float()[at >= 0]
        columns[target_field(head)] = like(target.masked_fill(~mask.values().bool(), torch.nan), mask)
    return columns
