"""What the sources read, from the fields of a batch in verl's queue; their texts, and where these go into a prompt."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.prompting.actions import ControlTokens
from verl_turnkey.envs.tasks import COLUMN as TASK
from verl_turnkey.envs.tasks import HINT
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.config.scorers import SLOT, TeacherConfig
from verl_turnkey.plugins.credit.rows import (
    EXTRA_FIELDS,
    Runs,
    branch_name,
    entries,
    failure,
    pop_extra_fields,
    record_of,
    split_key,
    token_counts,
)
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.teacher.sources import NEUTRAL, TeacherEpisode, TeacherRow, read_source

# Where a text goes into a row's prompt, and the row with the text in it; all of the row's own ids stay as they are.
#
# The text is put before the prompt's tail: the ids that end the last message and begin the model's turn. Rows whose
# prompts continue an earlier prompt of their episode have it there, too: a conversation of which each turn is a row
# then has the text in the same place as the one row of which all turns are parts.

Row = dict[str, Any]


def tail_of(tokenizer: Any, **template_kwargs: Any) -> list[int]:
    """The ids between the end of a user message's text and the model's turn, from the chat template.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that writes nothing there.
    """
    try:
        first, second = (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **template_kwargs,
            )
            for content in ("q", "7")
        )
    except Exception as error:
        raise ConfigError(
            f"turnkey.teacher: the tokenizer's chat template cannot be used ({type(error).__name__}: {error}), so "
            "there is no place for a text: set turnkey.teacher.source=null"
        ) from error
    same = next((n for n, (a, b) in enumerate(zip(reversed(first), reversed(second), strict=False)) if a != b), 0)
    if not same:
        raise ConfigError(
            "turnkey.teacher: the chat template writes nothing between a user's message and the model's turn, so "
            "there is no place for a text: set turnkey.teacher.source=null"
        )
    return list(first[-same:])


def place_in(prompt: Sequence[int], tail: Sequence[int]) -> int | None:
    """The position of the last ``tail`` in ``prompt``; None without any."""
    for at in range(len(prompt) - len(tail), -1, -1):
        if prompt[at] == tail[0] and [*prompt[at : at + len(tail)]] == [*tail]:
            return at
    return None


def places(keys: Sequence[str], prompts: Sequence[list[int]], tail: Sequence[int]) -> list[int | None]:
    """Where the text goes into each prompt; None where the tail is nowhere in it.

    A prompt that begins with an earlier one of its episode, generation prompt included, has that one's place.
    ``keys``: ``{uid}_{session}_{index}``.
    """
    result: list[int | None] = [None] * len(keys)
    episode, openings = None, list[tuple[list[int], int | None]]()
    for i in sorted(range(len(keys)), key=lambda i: split_key(keys[i])[1:]):
        prompt, of_row = prompts[i], split_key(keys[i])[1]
        if of_row != episode:
            episode, openings = of_row, []
        for first, place in openings:
            n = len(first)
            # The last id alone tells most prompts apart.
            if n <= len(prompt) and prompt[n - 1] == first[-1] and prompt[:n] == first:
                result[i] = place
                break
        else:
            result[i] = place_in(prompt, tail)
            openings.append((prompt, result[i]))
    return result


def splice(row: Mapping[str, Any], ids: Sequence[int], place: int) -> Row:
    """The fields of a row with ``ids`` before position ``place`` of its prompt.

    Args:
        row: ``input_ids`` (L,), ``prompts`` (P,), ``position_ids`` (L,) or (axes, L), and any further fields.

    The new tokens are text: on every axis their positions count on from where they are put in, and all later positions
    move by their number. Of ``multi_modal_inputs``, what has an entry per token gets zeros, the type of text.
    """
    n, position = len(ids), row["position_ids"]
    text = torch.as_tensor(list(ids), dtype=row["input_ids"].dtype)
    new = position[..., place : place + 1] + torch.arange(n, dtype=position.dtype)
    result = dict(row) | {
        name: torch.cat([row[name][:place], text, row[name][place:]]) for name in ("input_ids", "prompts")
    }
    result["position_ids"] = torch.cat([position[..., :place], new, position[..., place:] + n], -1)
    if media := row.get("multi_modal_inputs"):
        result["multi_modal_inputs"] = {
            name: _with_zeros(value, len(row["input_ids"]), place, n) for name, value in media.items()
        }
    return result


def _with_zeros(value: Any, length: int, place: int, n: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or tuple(value.shape) != (1, length):
        return value
    return torch.cat([value[:, :place], value.new_zeros(1, n), value[:, place:]], 1)


class TextIds:
    """Turns a text into the ids that are put into a prompt: template, control tokens made plain, cut to a length."""

    def __init__(self, tokenizer: Any, options: TeacherConfig) -> None:
        self._tokenizer, self._template, self._most = tokenizer, options.text_template(), options.max_tokens
        self._control = ControlTokens(tokenizer)
        frame = len(self._encode(self._template.replace(SLOT, "")))
        self._room = self._most - frame
        if self._room <= 0:
            raise ConfigError(
                f"turnkey.teacher.max_tokens={self._most}: the template alone has {frame} tokens: raise it"
            )
        self._neutral = self._encode(f" {NEUTRAL}")

    def ids(self, text: str) -> tuple[list[int], bool]:
        """The ids, at most ``max_tokens``, and whether the end of ``text`` was cut for that."""
        text = self._control.plain(text)
        ids = self._encode(self._template.replace(SLOT, text))
        if len(ids) <= self._most:
            return ids, False
        of_text, room = self._encode(text), self._room
        while len(ids) > self._most and room:
            ids = self._encode(self._template.replace(SLOT, self._tokenizer.decode(of_text[:room])))
            room -= 1
        return ids[: self._most], True

    def placebo(self, length: int) -> list[int]:
        """``length`` ids that say nothing about any task."""
        return (self._neutral * (length // len(self._neutral) + 1))[:length]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


DATA = ("data_source", "extra_info", "reward_model", "index", TASK, HINT)
"""fields of a data row that every source may read"""
FIELDS = (*DATA, *EXTRA_FIELDS, "rm_scores", "responses", "response_mask")


def read_rows(
    keys: Sequence[str], tags: Sequence[Mapping[str, Any]], data: TensorDict, tokenizer: Any
) -> dict[int, TeacherRow]:
    """The rows of played episodes by their position: no padding, no failed episode, none without a model's token.

    ``data``: the fields :data:`FIELDS` and those of the source, of all rows.
    """
    extra_fields = pop_extra_fields(data)
    mask = data["response_mask"]
    counts = token_counts(mask)
    real = [i for i, tag in enumerate(tags) if not tag.get("is_padding", False)]
    played = [i for i in real if counts[i] and failure(extra_fields[i], True) is None]
    played.sort(key=lambda i: split_key(keys[i])[1:])
    by_token = [name for name, column in data.items() if isinstance(column, torch.Tensor) and column.dim() > 1]
    columns = {name: entries(column) for name, column in data.items() if name not in by_token}
    runs, responses, scores = Runs.of(mask), data["responses"].unbind(), data.get("rm_scores", None)
    records: dict[int, Mapping[str, Any]] = {i: record_of(extra_fields[i]) or {} for i in played}
    # Of several roles each has an episode of its own: a text about another's turns would show what that one saw.
    names = {i: branch_name(split_key(keys[i])[1], records[i].get("branch", 0)) for i in played}
    role_of = {i: next((step["extra"].get("role") for step in records[i].get("steps", ())), None) for i in played}
    roles: dict[str, set[Any]] = defaultdict(set)  # of a group: in some of its episodes only one may have moved
    for i in played:
        roles[split_key(keys[i])[0]] |= {role_of[i]} - {None}
    members: dict[tuple[str, Any], list[int]] = defaultdict(list)
    for i in played:
        members[names[i], role_of[i] if len(roles[split_key(keys[i])[0]]) > 1 else None].append(i)

    def turns(rows: Sequence[int]) -> list[str]:
        return [
            tokenizer.decode(responses[i][start : start + length], skip_special_tokens=True)
            for i in rows
            for start, length in runs_of(runs, i)
        ]

    episodes: dict[tuple[str, Any], TeacherEpisode] = {}
    groups: dict[tuple[str, Any], list[TeacherEpisode]] = defaultdict(list)
    for (name, role), rows in members.items():
        steps = [step for i in rows for step in records[i].get("steps", ())]
        score = 0.0 if scores is None else float(scores[rows[-1]].sum())
        if steps:
            score = math.fsum(step.get("composed_reward", step["reward"]) for step in steps)
        success = any(map(_solved, steps)) if steps else score > 0
        episode = episodes[name, role] = TeacherEpisode(name, score, success, steps, lambda rows=rows: turns(rows))
        groups[split_key(keys[rows[0]])[0], role].append(episode)
    return {
        i: TeacherRow(
            key=keys[i],
            data={name: column[i] for name, column in columns.items()},
            steps=records[i].get("steps", ()),
            episode=episodes[player],
            others=[other for other in groups[split_key(keys[i])[0], player[1]] if other is not episodes[player]],
            reward_info=extra_fields[i].get("reward_extra_info") or {},
        )
        for player, rows in members.items()
        for i in rows
    }


def _solved(step: Mapping[str, Any]) -> bool:
    """Whether the episode was a success of the role that took the step."""
    outcome = step["extra"].get("role_outcome")
    return step["success"] if outcome is None or math.isnan(outcome) else outcome > 0


def runs_of(runs: Runs, row: int) -> list[tuple[int, int]]:
    """Start, within the response, and length of each run of ones of a row."""
    mask: Any = runs.mask  # jagged
    first, offset = int(runs.first[row]), int(mask.offsets()[row])
    numbers = range(first, first + int(runs.count[row]))
    return [(int(runs.start[n]) - offset, int(runs.length[n])) for n in numbers]


def selected(rows: Mapping[int, TeacherRow], which: str) -> dict[int, TeacherRow]:
    """The rows that may get a text, by ``turnkey.teacher.rows``."""
    if which == "failed":
        return {i: row for i, row in rows.items() if not row.episode.success}
    if which == "mixed_groups":
        return {i: r for i, r in rows.items() if any(o.success != r.episode.success for o in r.others)}
    return dict(rows)


class TextWriter:
    """Calls a run's source for rows.

    A source that raises for single rows leaves these without a text, and is reported once for each kind of error.
    """

    def __init__(self, config: DictConfig, turnkey: TurnkeyConfig) -> None:
        source = turnkey.teacher.source
        assert source is not None
        self.spec, self._call = read_source(source)
        self.columns: tuple[str, ...] = tuple(getattr(self._call, "columns", ()))
        self._reported: set[str] = set()

    def write(self, rows: Mapping[int, TeacherRow]) -> tuple[dict[int, str], int]:
        """The text of each row that has one, and the number of rows of which the source raised an error.

        Raises:
            RuntimeError: the source raised for every row.
        """
        results: dict[int, Any] = {i: self._attempt(row) for i, row in rows.items()}
        if waiting := {i: result for i, result in results.items() if inspect.isawaitable(result)}:
            with ThreadPoolExecutor(1) as thread:  # this one may be inside an event loop
                results |= thread.submit(asyncio.run, _gathered(waiting)).result()
        errors = {i: result for i, result in results.items() if isinstance(result, Exception)}
        for i, error in errors.items():
            if (kind := f"{type(error).__name__}: {error}") not in self._reported:
                self._reported.add(kind)
                logger.warning("turnkey.teacher.source: no text for row %s: %s", rows[i].key, kind)
        if errors and len(errors) == len(rows):
            first = next(iter(errors))
            raise RuntimeError(
                f"turnkey.teacher.source raised an error for all {len(rows)} rows of a batch; for {rows[first].key}: "
                f"{type(errors[first]).__name__}: {errors[first]}"
            ) from errors[first]
        return {i: text for i, text in results.items() if isinstance(text, str) and text.strip()}, len(errors)

    def _attempt(self, row: TeacherRow) -> Any:
        try:
            result = self._call(row)
        except Exception as error:
            return error
        if result is None or isinstance(result, str) or inspect.isawaitable(result):
            return result
        return TypeError(f"expected a text or None, got {type(result).__name__}")


async def _gathered(waiting: Mapping[int, Any]) -> dict[int, Any]:
    results = await asyncio.gather(*waiting.values(), return_exceptions=True)
    return dict(zip(waiting, results, strict=True))
