"""Steps of rows without a record: verl's own agent loops (``tool_agent``, ``single_turn_agent``) and users' loops.

The steps are derived from a row's response mask, its rewards per token and, where present, lists with one number per
turn. This suffices for methods that do not compare states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from verl_turnkey.losses.turns import row_offsets
from verl_turnkey.plugins.credit.row_turns import ParsedRows, Runs, split_key

# verl's own agent loops, each with its extra fields that hold one number per turn.
VERLS_LOOPS = {"single_turn_agent": (), "tool_agent": ("tool_rewards",)}

NO_TOKENS = "no token of its responses is the model's"

# Columns of StepBatch that can be derived; `value` comes from the critic.
COLUMNS = ("env_return", "terminated", "tokens", "value")


def listed_per_turn(rollout: DictConfig) -> tuple[str, ...]:
    """The lists in verl's extra fields that hold one number per turn, under this ``actor_rollout_ref.rollout``.

    ``tool_rewards`` has one number per tool *call*: with several calls per turn its
    entries cannot be assigned to turns.
    """
    return ("turn_scores", "tool_rewards") if rollout.multi_turn.max_parallel_calls == 1 else ("turn_scores",)


def derive(
    keys: Sequence[str],
    real: Sequence[int],
    runs: Runs,
    scores: torch.Tensor,
    extra_fields: Sequence[Mapping[str, Any]],
    lists: Sequence[str],
) -> ParsedRows:
    """The steps of rows without a record.

    The turns of a trajectory are the runs of ones in its rows, the rows ordered by their index. A turn's reward is the
    sum of the rewards on its tokens and on the masked tokens after it, up to the next turn. Rewards before the first
    turn of a row count for that turn, rewards in a row without turns for the trajectory's last turn. The last turn
    counts as ``terminated``: these loops do not distinguish truncation from termination. A trajectory without any turn
    has failed.

    Args:
        keys: row keys, B; ``real``: positions of the rows that are not padding.
        runs: the runs of ones in their response mask.
        scores: ``rm_scores``, jagged. verl writes a trajectory's outcome on the last token of **each** of its rows; it
            counts once: the last token of earlier rows is ignored.
        extra_fields: B dicts; ``lists`` names the entries with one number per turn, which become ``extra`` columns. A
            list that is one short gets a 0 for the last turn, in which no tool was called. A name is left out if no
            row fills it, or if a list of any trajectory has another length.
    """
    parsed = ParsedRows()
    turns = runs.count.tolist()
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
            parsed.failed[name] = NO_TOKENS
            continue
        for i in rows:
            parsed.row += [i] * turns[i]
            parsed.turn += range(turns[i])
        earlier += rows[:-1]
        silent += [(len(step) + size - 1, i) for i in rows if not turns[i]]
        played.append((size, rows))
        group += [parts[rows[0]][0]] * size
        trajectory += [name] * size
        step += range(size)
        terminated += [False] * (size - 1) + [True]
    ends = row_offsets(scores).tolist()
    flat = scores.values().double()
    flat[[ends[i + 1] - 1 for i in earlier]] = 0.0
    reward = runs.owned(flat)[runs.first[parsed.row] + np.array(parsed.turn, dtype=np.int64)]
    for position, i in silent:
        reward[position] += flat[ends[i] : ends[i + 1]].sum().item()
    parsed.columns = {
        "group": group,
        "trajectory": trajectory,
        "step": step,
        "reward": reward,
        "terminated": terminated,
    }
    columns = {name: _column(name, played, extra_fields) for name in lists}
    parsed.extra = {name: column for name, column in columns.items() if column is not None}
    return parsed


def _column(
    name: str, played: Sequence[tuple[int, Sequence[int]]], extra_fields: Sequence[Mapping[str, Any]]
) -> list[float] | None:
    """The column ``name`` from the lists of all trajectories; None if one does not fit its turns, or all are empty."""
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
    """The message when rows lack the columns ``lacking`` of the estimator ``name``, with code that provides them."""
    extra_names = {column.partition(".")[2] for column in lacking if column.startswith("extra.")}
    fields = [f"{column}={column}[t]" for column in lacking if not column.startswith("extra.") and column != "text"]
    extra = [f'"{column}": {column}[t]' for column in sorted(extra_names | ({"text"} & set(lacking)))]
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
