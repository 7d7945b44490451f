"""Steps of rows without a record: verl's own agent loops (``tool_agent``, ``single_turn_agent``) and users' loops.

What such a row says of its steps is its response mask, its rewards per token and, sometimes, a list with one number
per turn. That is enough for every method that compares no states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from verl_turnkey.plugins.credit.row_turns import Found, split_key, sum_by_turn, turn_counts

# verl's own agent loops, and what of their extra fields has one number per turn.
VERLS_LOOPS = {"single_turn_agent": (), "tool_agent": ("tool_rewards",)}

NO_TOKENS = "no token of its responses is the model's"

# Columns of StepBatch that can be derived; `value` comes from the critic.
COLUMNS = ("terminated", "tokens", "value")


def listed_per_turn(rollout: DictConfig) -> tuple[str, ...]:
    """The lists in verl's extra fields that hold one number per turn, under this ``actor_rollout_ref.rollout``.

    ``tool_rewards`` has one number per tool *call*: with several calls a turn nobody can tell which belong together.
    """
    return ("turn_scores", "tool_rewards") if rollout.multi_turn.max_parallel_calls == 1 else ("turn_scores",)


def derive(
    keys: Sequence[str],
    real: Sequence[int],
    ids: torch.Tensor,
    scores: torch.Tensor,
    lengths: Sequence[int],
    extra_fields: Sequence[Mapping[str, Any]],
    lists: Sequence[str],
) -> Found:
    """The steps of rows without a record.

    The turns of a trajectory are the runs of ones over its rows, in the order of their index. A turn's reward is the
    sum of the rewards on its tokens and on the masked ones behind it, up to the next turn; what stands before the
    first turn of a row belongs to that turn, what stands in a row without any to the trajectory's last. The last turn
    counts as ``terminated``: these loops do not tell a cut from an end. A trajectory without any turn has failed.

    Args:
        keys: row keys, B; ``real``: the rows among them that are no padding.
        ids: (B, L) turn of each token in its row, -1 off the model's own tokens.
        scores: (B, L) ``rm_scores``. verl writes a trajectory's outcome on the last token of **each** of its rows; it
            counts once, so that on the last token of earlier rows nothing is read.
        lengths: number of response tokens of each row, B.
        extra_fields: B dicts; ``lists`` names the entries with one number per turn, which become ``extra`` columns. A
            list that is one short gets a 0 for the last turn, in which no tool was called. One that no row fills, or
            that has another length somewhere in the batch, is left out.
    """
    found = Found()
    turns = turn_counts(ids)
    parts = {i: split_key(keys[i]) for i in real}
    trajectories: dict[str, list[int]] = {}
    for i in sorted(real, key=lambda i: parts[i][2]):
        trajectories.setdefault(parts[i][1], []).append(i)
    group, trajectory, step, terminated = [], [], [], []
    earlier: list[int] = []  # rows that are not their trajectory's last
    silent: list[tuple[int, int]] = []  # rows without a turn, each with the position of its trajectory's last step
    played: list[tuple[int, list[int]]] = []
    for name, rows in trajectories.items():
        size = sum(turns[i] for i in rows)
        if not size:
            found.failed[name] = NO_TOKENS
            continue
        for i in rows:
            found.row += [i] * turns[i]
            found.turn += range(turns[i])
        earlier += rows[:-1]
        silent += [(len(step) + size - 1, i) for i in rows if not turns[i]]
        played.append((size, rows))
        group += [parts[rows[0]][0]] * size
        trajectory += [name] * size
        step += range(size)
        terminated += [False] * (size - 1) + [True]
    scores = scores.clone()
    scores[earlier, [lengths[i] - 1 for i in earlier]] = 0.0
    owner = ids.cummax(1).values.clamp(min=0) if ids.numel() else ids
    reward = sum_by_turn(scores, owner, np.array(found.row, dtype=np.int64), np.array(found.turn, dtype=np.int64))
    for position, i in silent:
        reward[position] += scores[i].double().sum().item()
    found.columns = {
        "group": group,
        "trajectory": trajectory,
        "step": step,
        "reward": reward,
        "terminated": terminated,
    }
    columns = {name: _column(name, played, extra_fields) for name in lists}
    found.extra = {name: column for name, column in columns.items() if column is not None}
    return found


def _column(
    name: str, played: Sequence[tuple[int, Sequence[int]]], extra_fields: Sequence[Mapping[str, Any]]
) -> list[float] | None:
    """The list ``name`` of every trajectory, one number per turn; None when it is no such list."""
    column: list[float] = []
    filled = False
    for size, rows in played:
        numbers = [number for i in rows for number in (extra_fields[i].get(name) or ())]
        if size - len(numbers) not in (0, 1) or not all(isinstance(number, int | float) for number in numbers):
            return None
        filled = filled or bool(numbers)
        column += numbers + [0.0] * (size - len(numbers))
    return column if filled else None


def needs_record(name: str, lacking: Sequence[str]) -> str:
    """What to tell who wants the estimator ``name`` on rows without the columns ``lacking``: a loop that has them."""
    given = {column.partition(".")[2] for column in lacking if column.startswith("extra.")}
    fields = [f"{column}={column}[t]" for column in lacking if not column.startswith("extra.") and column != "text"]
    extra = [f'"{column}": {column}[t]' for column in sorted(given | ({"text"} & set(lacking)))]
    fields += [f"extra={{{', '.join(extra)}}}"] if extra else []
    return (
        f"algorithm.adv_estimator={name} needs {', '.join(map(repr, lacking))} of each step, which cannot be told from "
        "rows without a turnkey record. Use a loop that writes one "
        "(actor_rollout_ref.rollout.agent.default_agent_loop=turnkey_env), or let yours set it on every output:\n"
        "    from verl_turnkey.advantage import make_record, make_step\n"
        "    output = await super().run(sampling_params, **kwargs)  # in `run` of a subclass of the loop\n"
        f"    steps = [make_step(step=t, reward=reward[t], {', '.join(fields)}) for t in range(turns)]\n"
        '    output.extra_fields["turnkey"] = make_record(steps)  # a turn is a run of ones in the response mask\n'
        "    return output"
    )
