"""The table ``credit`` of the log: a row for each turn of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_turnkey.advantage import Credit, Tokens
from verl_turnkey.losses.turns import like
from verl_turnkey.plugins.credit.rows import Rows

TOKEN_FIELDS = ("advantages", "returns", "token_level_rewards")
"""fields of the queue that tell the credit under an estimator of verl's"""


class Numbers:
    """Numbers the comparison groups of a step, by level: 0, 1, ... through all its batches."""

    def __init__(self) -> None:
        self._next: Counter[str] = Counter()

    def of(self, level: str, code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers (S,) int32 of the groups of a batch's steps, and (S,) their sizes; ``code`` -1: -1 and 0."""
        number, size = np.full(len(code), -1, dtype=np.int32), np.zeros(len(code), dtype=np.int32)
        known = code >= 0
        groups, index, count = np.unique(code[known], return_inverse=True, return_counts=True)
        number[known], size[known] = index + self._next[level], count[index]
        self._next[level] += len(groups)
        return number, size


def of_verl(rows: Rows, data: Mapping[str, torch.Tensor], critic: bool) -> tuple[Credit, np.ndarray | None]:
    """What an estimator of verl's tells of each turn, and what the KL penalty took from its reward, (S,), if anything.

    Advantage and return are means over the turn's tokens. ``data``: nested fields of the queue. Without a critic
    verl's returns are targets of nothing.
    """
    mean = {name: rows.turns.mean(data[name].double()).numpy() for name in TOKEN_FIELDS[:2]}
    credit = Credit(mean["advantages"], mean["returns"] if critic else None)
    if "token_level_rewards" not in data:
        return credit, None
    taken = data["rm_scores"].values() - data["token_level_rewards"].values()
    return credit, rows.turns.sum(like(taken.double(), data["rm_scores"])).numpy()


def progress_advantage(rows: Rows, data: Mapping[str, torch.Tensor]) -> np.ndarray | None:
    """Mean log-probability of each turn's tokens by the old policy less that by the reference, (S,).

    None: there is no reference; nan: a turn without tokens. ``data``: nested fields of the queue.

    Source: progress advantage, arXiv:2606.26080, with the mean over tokens and beta 1. There it scores the steps of a
    trained agent; as a reward it would pay for the distance from the reference.
    """
    if not {"old_log_probs", "ref_log_prob"} <= {*data}:
        return None
    old, reference = (rows.turns.mean(data[name].double()).numpy() for name in ("old_log_probs", "ref_log_prob"))
    return np.where(rows.turns.tokens.numpy() > 0, old - reference, np.nan)


def credit_columns(
    rows: Rows,
    credit: Credit,
    *,
    train_step: int,
    first_row: int,
    numbers: Numbers,
    chosen: np.ndarray,
    kl: np.ndarray | None = None,
    progress: np.ndarray | None = None,
) -> dict[str, Sequence[Any]]:
    """The columns of the turns ``chosen`` (S,) bool of a batch; what is not known has none.

    Args:
        train_step, first_row: the step, and the rows of its batches before this one.
        kl: (S,) what the KL penalty took from the reward of each turn; None: there is none.
        progress: (S,) from :func:`progress_advantage`.
    """
    steps = rows.steps
    columns: dict[str, Any] = {
        "turn": steps.step,
        "train_step": np.full(len(steps), train_step),
        "row_id": rows.row + first_row,
        "turn_in_row": rows.turn,
    }
    columns = {name: column.astype(np.int32) for name, column in columns.items()}
    numeric = {"advantage": credit.advantage, "value_target": credit.returns, "kl": kl}
    numeric["progress_advantage"] = progress
    numeric["value"] = steps.value if "value" in steps.given else None
    numeric |= {f"part.{name}": part for name, part in credit.parts.items()}
    numeric |= {f"level.{name}": level for name, level in credit.levels.items()}
    columns |= {name: np.asarray(column, np.float32) for name, column in numeric.items() if column is not None}
    for name, code in credit.groups.items():
        columns[f"group.{name}"], columns[f"size.{name}"] = numbers.of(name, code)
    episodes = steps.ids["trajectory"]
    table: dict[str, Sequence[Any]] = {"episode": [episodes[i] for i in steps.trajectory[chosen].tolist()]}
    return table | {name: column[chosen] for name, column in columns.items()}


def token_columns(
    rows: Rows, credit: Credit, tokens: Tokens, *, train_step: int, chosen: np.ndarray
) -> dict[str, Sequence[Any]]:
    """The columns of the table ``tokens`` for the turns ``chosen`` (S,) bool: a list per turn, in the tokens' order."""
    steps, order = rows.steps, np.argsort(tokens.step, kind="stable")
    cuts = np.bincount(tokens.step, minlength=len(steps)).cumsum()[:-1]
    numbers = {"gap": tokens.gap, "advantage": credit.tokens}
    lists = {
        name: np.split(column[order].astype(np.float32), cuts) for name, column in numbers.items() if column is not None
    }
    wanted = np.flatnonzero(chosen).tolist()
    episodes = steps.ids["trajectory"]
    return {
        "episode": [episodes[steps.trajectory[i]] for i in wanted],
        "turn": steps.step[chosen].tolist(),
        "train_step": [train_step] * len(wanted),
        **{name: [of_turn[i] for i in wanted] for name, of_turn in lists.items()},
    }
