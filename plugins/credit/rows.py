"""The table of steps of verl's rows, in any layout, and credit written back to their tokens.

A row is one training sample under the key ``{uid}_{session}_{index}``: group = uid, trajectory = uid and session, with
the branch of its record behind a dot where the rollout forked (``{uid}_{session}.{branch}``).
Its record (:mod:`verl_turnkey.advantage.record`) lists the steps that the row holds: one step, or several consecutive
ones (merged steps, or a row per trajectory), each of which is a turn. Turns are runs of ones in the row's response
mask.

The steps of rows without a record, of verl's own agent loops (``tool_agent``, ``single_turn_agent``) and of users', are
derived from the response mask, the rewards per token and, where present, lists with one number per turn. This suffices
for methods that do not compare states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from verl_turnkey.advantage import RecordError, StepBatch, validate_record
from verl_turnkey.losses.turns import Turns, like, row_offsets
from verl_turnkey.plugins.credit.trainer_columns import Column, values_before


@dataclass
class ParsedRows:
    """The steps that a batch of rows holds, one entry per step in each list.

    ``row``: position of its row in the batch; ``turn``: position of its turn in the row; ``reward``: the environment's,
    empty if unknown; ``columns``: columns of a StepBatch; ``extra``: its further columns by name, and ``text``;
    ``version``: newest weights version, nan if unknown; ``branch``: of its rollout, empty where none can fork;
    ``failed``: trajectory -> why it has no steps.
    """

    row: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    version: list[float] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def split_key(key: str) -> tuple[str, str, int]:
    """``{uid}_{session}_{index}`` to (group, trajectory, index)."""
    group, session, index = key.rsplit("_", 2)
    return group, f"{group}_{session}", int(index)


def branch_name(episode: str, branch: int) -> str:
    """The trajectory that is the branch of a rollout ``{uid}_{session}``; the first one has the rollout's name."""
    return f"{episode}.{branch}" if branch else episode


def record_of(extra_fields: Any) -> Any:
    """The record that the agent loop wrote for a row, unchecked; None without one."""
    return extra_fields.get("turnkey") if isinstance(extra_fields, Mapping) else None


def token_counts(mask: torch.Tensor) -> np.ndarray:
    """Number of the model's tokens in each row of the jagged ``mask`` -> (B,) int64."""
    runs = Runs.of(mask)
    return np.bincount(runs.row, weights=runs.length, minlength=len(mask)).astype(np.int64)


@dataclass(frozen=True)
class Runs:
    """The runs of ones in a jagged response mask of B rows, numbered row after row; n in all.

    A batch has far fewer runs than tokens: what can be said of a run is not computed for each of its tokens.
    """

    mask: torch.Tensor
    start: np.ndarray
    """(n,) where each run begins in the flat mask"""
    length: np.ndarray
    """(n,) tokens of each run"""
    row: np.ndarray
    """(n,) row of each run"""
    count: np.ndarray
    """(B,) runs of each row"""
    first: np.ndarray
    """(B,) number of each row's first run; of a row without runs, the number of the next run"""

    @classmethod
    def of(cls, mask: torch.Tensor) -> Runs:
        flat, offsets = mask.values().bool().numpy(), row_offsets(mask).numpy()
        # Between two bounds all tokens are alike, and of one row.
        bounds = np.union1d(offsets, np.flatnonzero(flat[1:] != flat[:-1]) + 1)
        ones = flat[bounds[:-1]]
        start, length = bounds[:-1][ones], np.diff(bounds)[ones]
        row = np.searchsorted(offsets, start, side="right") - 1
        count = np.bincount(row, minlength=len(mask))
        return cls(mask, start, length, row, count, count.cumsum() - count)

    def spread(self, per_run: np.ndarray, outside: float) -> torch.Tensor:
        """Write one value per run, (n,), onto its tokens: jagged like the mask, ``outside`` on all others."""
        values = np.full(2 * len(per_run) + 1, outside, dtype=per_run.dtype)
        values[1::2] = per_run
        end = self.start + self.length
        times = np.zeros(len(values), dtype=np.int64)
        times[1::2] = self.length
        times[0::2] = np.append(self.start, len(self.mask.values())) - np.append(0, end)
        return like(torch.from_numpy(np.repeat(values, times)), self.mask)

    def steps(self, row: np.ndarray, turn: np.ndarray) -> np.ndarray:
        """The step that each run is of, (n,), S for none. ``row`` and ``turn``, (S,), locate the steps.

        All runs of a row with a single step belong to that step, which may have gaps (masked tokens) or no token.
        """
        of_run = np.full(len(self.start), len(row))
        alone = np.bincount(row, minlength=len(self.count))[row] == 1
        several = np.flatnonzero(~alone)
        of_run[self.first[row[several]] + turn[several]] = several
        step_of_row = np.full(len(self.count), len(row))
        step_of_row[row[alone]] = np.flatnonzero(alone)
        return np.minimum(of_run, step_of_row[self.row])

    def turns(self, of_run: np.ndarray, number: int) -> Turns:
        """The tokens of each of ``number`` steps, as turns numbered like the steps; ``of_run``: see :meth:`steps`."""
        tokens = np.bincount(of_run, weights=self.length, minlength=number + 1)[:number].astype(np.int64)
        return Turns(self.spread(of_run, number), number, torch.from_numpy(tokens))

    def owned(self, values: torch.Tensor) -> np.ndarray:
        """Sum of ``values`` (tokens,) over each run and the masked tokens behind it -> (n,) float64.

        Tokens before the first run of a row count for that run; rows without runs are left out.
        """
        none, offsets = len(self.start), row_offsets(self.mask)
        index = self.spread(np.arange(none), none).values()
        latest = torch.where(index < none, index, -1).cummax(0).values if len(index) else index
        row_of_token = torch.repeat_interleave(offsets.diff())
        owner = torch.maximum(latest, torch.from_numpy(self.first)[row_of_token])
        owner[torch.from_numpy(self.count == 0)[row_of_token]] = none
        return torch.bincount(owner, weights=values.double(), minlength=none + 1)[:none].numpy()


def jagged(padded: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """``padded`` (B, L) in the shape of the jagged ``shape``."""
    rows = zip(padded.unbind(), row_offsets(shape).diff().tolist(), strict=True)
    return like(torch.cat([row[:length] for row, length in rows]), shape)


BREAK = "turnkey_break"
"""extra field of a row: why it does not extend the row before it"""
CACHED = "turnkey_cached"
"""extra field of a row: for each turn the share of its prompt that the server had cached, if the server reports it"""
OBSERVED = "turnkey_observed"
"""extra field of a row: for each turn the spans of tokens that are what the environment said before it, (first, end)
each, counted from the turn's first token, so that both are negative"""
EXTRA_COLUMN = "extra_fields"
FLAT = ("turnkey", "reward_extra_info", "turn_scores", "tool_rewards", BREAK, CACHED, OBSERVED)
"""the extra fields that the trainer reads"""
EXTRA_FIELDS = (EXTRA_COLUMN, *FLAT)
"""the columns in which they may be"""


def pop_extra_fields(data: TensorDict) -> list[Mapping[str, Any]]:
    """Remove the columns :data:`EXTRA_FIELDS` from ``data``; returns the extra fields of each row, {} without any.

    An entry of the column ``extra_fields`` comes before a column of its name. None stands for an entry that is not
    there.
    """
    columns = {name: entries(data.pop(name)) for name in FLAT if name in data}
    nested = entries(data.pop(EXTRA_COLUMN)) if EXTRA_COLUMN in data else [{}] * len(data)
    flat = ({name: values[i] for name, values in columns.items() if values[i] is not None} for i in range(len(data)))
    return [
        {**single, **(fields if isinstance(fields, Mapping) else {})}
        for single, fields in zip(flat, nested, strict=True)
    ]


def entries(column: Any) -> list[Any]:
    """One entry per row; numbers arrive as tensors, all else as verl wrote it."""
    return [value.tolist() for value in column.unbind()] if isinstance(column, torch.Tensor) else column.tolist()


NO_TOKENS = "no token of its responses is the model's"

# Columns of StepBatch that can be derived; `value` comes from the critic.
DERIVED_COLUMNS = ("env_return", "terminated", "tokens", "value")


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
    columns = {name: _listed_column(name, played, extra_fields) for name in lists}
    parsed.extra = {name: column for name, column in columns.items() if column is not None}
    return parsed


def _listed_column(
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
    compares = "anchor" in lacking
    method = "Use a method that compares no states (+turnkey=grpo_steps or turn_norm), or " if compares else "Use "
    return (
        f"algorithm.adv_estimator={name} needs {', '.join(map(repr, lacking))} of each step, which cannot be told from "
        f"rows without a turnkey record. {method}a loop that writes the record "
        "(actor_rollout_ref.rollout.agent.default_agent_loop=turnkey_env), or have your loop set it on every output:\n"
        "    from verl_turnkey.advantage import make_record, make_step\n"
        "    output = await super().run(sampling_params, **kwargs)  # in `run` of a subclass of the loop\n"
        f"    steps = [make_step(step=t, reward=reward[t], {', '.join(fields)}) for t in range(turns)]\n"
        '    output.extra_fields["turnkey"] = make_record(steps)  # a turn is a run of ones in the response mask\n'
        "    return output"
    )


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
        lists: see :func:`verl_turnkey.plugins.credit.rows.derive`.
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
    # By role where there are several: then a trajectory is what one role did.
    roles = [str(role) for role in parsed.extra.get("role") or ("",) * len(row)]
    players = list(zip(columns["trajectory"], roles, strict=True))
    numbers = {player: number for number, player in enumerate(dict.fromkeys(players))}
    trajectory = np.array([numbers[player] for player in players], dtype=np.int64)
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
    missing = [keys[i] for i, record in zip(real, records, strict=True) if record is None]
    if missing:
        other = next(keys[i] for i, record in zip(real, records, strict=True) if record is not None)
        raise RecordError(
            f"row {missing[0]} carries no turnkey record, row {other} does: either every output of an agent loop sets "
            "extra_fields['turnkey'] (a failed one make_record([], failed=reason)), or none does"
        )
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
    parsed.extra = _extra_columns(steps, trajectory, before)
    parsed.version = [step.get("version", np.nan) for step in steps]
    parsed.reward = [step["reward"] for step in steps]
    return parsed


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


def _extra_columns(
    steps: Sequence[Mapping[str, Any]], trajectory: Sequence[str], before: Collection[str]
) -> dict[str, list[Any]]:
    """The further columns: the names that every step with an action has.

    A step without an action changed nothing, so an entry that it lacks is 0, or None in a column of texts. A name that
    a step with an action lacks is left out, and one in ``before`` that any step lacks; an estimator that needs it is
    then refused by that name.

    A batch may have tasks with roles and others without: if some trajectory has several roles, the steps of
    one in which a step lacks its role so have none. An outcome by role that a step lacks is nan.
    """
    columns: dict[str, list[Any]] = {}
    for name in sorted({name for step in steps for name in step["extra"]}):
        lacks = [name not in step["extra"] and (step["action"] is not None or name in before) for step in steps]
        if name == "role_outcome":
            columns[name] = [step["extra"].get(name, np.nan) for step in steps]
        elif name == "role" and any(lacks):
            without = {of for of, lacking in zip(trajectory, lacks, strict=True) if lacking}
            roles = [step["extra"].get(name) for step in steps]
            roles = [None if of in without else role for of, role in zip(trajectory, roles, strict=True)]
            players = {(of, role) for of, role in zip(trajectory, roles, strict=True) if of not in without}
            if len(players) > len({of for of, _ in players}):
                columns[name] = roles
        elif not any(lacks):
            blank = None if any(isinstance(step["extra"].get(name), str) for step in steps) else 0.0
            columns[name] = [step["extra"].get(name, blank) for step in steps]
    return columns
