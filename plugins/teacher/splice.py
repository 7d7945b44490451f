"""Where a text goes into a row's prompt, and the row with the text in it; all of the row's own ids stay as they are.

The text is put before the prompt's tail: the ids that end the last message and begin the model's turn. Rows whose
prompts continue an earlier prompt of their episode have it there, too: a conversation of which each turn is a row then
has the text in the same place as the one row of which all turns are parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.prompting.control_tokens import ControlTokens
from verl_turnkey.plugins.config.scorers import SLOT, TeacherConfig
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.teacher.sources import NEUTRAL

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
    own = torch.as_tensor(list(ids), dtype=row["input_ids"].dtype)
    new = position[..., place : place + 1] + torch.arange(n, dtype=position.dtype)
    result = dict(row) | {
        name: torch.cat([row[name][:place], own, row[name][place:]]) for name in ("input_ids", "prompts")
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
