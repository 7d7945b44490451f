"""The rollout side of the trajectory log: the tables ``episodes``, ``turns`` and ``texts``."""

from __future__ import annotations

import io
import json
import os
import socket
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_turnkey.envs.answers import images_key
from verl_turnkey.envs.registry import spec_of
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins.credit.rows import branch_name
from verl_turnkey.plugins.log.bounds import Shares, chosen, logged_shares
from verl_turnkey.plugins.log.masking import masked, masked_json
from verl_turnkey.plugins.log.writer import UNNAMED, Rows, Tables
from verl_turnkey.plugins.notices import failure_kind, warn_once

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.episode import Episode, OtherTurn, PlayedStep

VALIDATION = "turnkey_validation"
"""field that marks data rows of a validation"""
TAIL = 2000
"""characters of a prompt that are kept, and maximum number of their tokens"""
WRITE_SECONDS = 300.0
"""seconds until a file is written, unless the next step or 64 episodes come first: small files burden shared disks"""
_OF_TURN = 500  # approximate bytes of a turn besides its texts
STEPS_OF_PICTURES = 4
"""steps of which a process remembers which pictures it wrote: episodes of several may end at the same time"""

Decode = Callable[..., str]
"""a tokenizer's, of ids; ``skip_special_tokens``"""


class TrajectoryLog:
    """Logs the episodes of this process; none of them if ``turnkey.log.trajectories`` is null.

    Args:
        config: verl's whole configuration.
        log: its node ``turnkey.log``, parsed.
    """

    def __init__(self, config: Mapping[str, Any], log: Any) -> None:
        self._shares = logged_shares(config) if log.trajectories else Shares()
        process = f"{socket.gethostname()}-{os.getpid()}"
        teacher = (config.get("turnkey") or {}).get("teacher") or {}
        self._lengths = teacher.get("source") is not None
        named = (log.trajectories, log.segment or UNNAMED, process)
        self._live = None
        if log.trajectories and log.otlp:
            from verl_turnkey.plugins.view.traces import LiveTraces

            self._live = LiveTraces(log.otlp, Path(log.trajectories), named[1])
        also = self._live.take if self._live else None
        self.tables = Tables(*named, seconds=WRITE_SECONDS, also=also) if log.trajectories else None
        self._pictures: dict[int, set[str]] = {}  # in the log by step, of the last steps; of the thread that writes

    def write(
        self,
        row: Mapping[str, Any],
        task: Task | None,
        episode: Episode,
        outputs: Sequence[Any],
        failed: str | None,
        decode: Decode,
    ) -> None:
        """Log an episode of a chosen group, or one that failed; never waits for the disk.

        Args:
            row: the data row, with ``uid``, ``session_id`` and ``global_steps``.
            task: the task with the arguments of the configuration; None: it could not be read.
            outputs: the rows that verl gets; their keys are ``{uid}_{session_id}_{index}``. Those of
                other branches hold none of its turns.
            failed: the reason, or None.
            decode: the tokenizer's; called later, in another thread.
        """
        group = str(row["uid"])
        validation = bool(row.get(VALIDATION))
        share = self._shares.validation if validation else self._shares.training
        if self.tables is None or not (failed or chosen(group, share)):
            return
        extra_info = row.get("extra_info") or {}
        players, opening = episode.players, episode.opening.turns if episode.opening else ()
        records = [] if failed else [output.extra_fields["turnkey"] for output in outputs]
        logged = Logged(
            # Without the ids and log-probs of whole conversations, which would wait in memory with the episode.
            episode=replace(episode, steps=[]),
            turns=[
                _Turn.of(
                    step,
                    players.index(players[t]) == t,
                    t > 0 and players[t] == players[t - 1] and step.prompt.request is None,
                    self._lengths,
                    opening if t == 0 else (),
                )
                for t, step in enumerate(episode.steps)
            ],
            rollout=f"{group}_{row['session_id']}",
            group=group,
            global_step=int(row["global_steps"]),
            split=extra_info.get("split") if isinstance(extra_info, Mapping) else None,
            validation=validation,
            row_task=row.get(COLUMN),
            task=task,
            failed=failed,
            rows={
                step["step"]: (i, j)
                for i, record in enumerate(records)
                if record.get("branch", 0) == episode.branch
                for j, step in enumerate(record["steps"])
            },
            decode=decode,
            new_pictures=self._new_pictures,
        )
        if logged.size > self.tables.room // 2 and any(turn.images for turn in logged.turns):
            warn_once(
                "turnkey.log.trajectories: pictures come faster than they are written; some are left out", "pictures"
            )
            logged = replace(logged, turns=[turn._replace(images=()) for turn in logged.turns])
        self.tables.put_later(logged.tables, 1 + 2 * len(episode.steps), logged.size)

    def _new_pictures(self, step: int, names: Iterable[str]) -> set[str]:
        """Those of ``names`` that the log of this process does not have for ``step``; then it has them."""
        known = self._pictures.setdefault(step, set())
        new = {*names} - known
        known |= new
        for old in sorted(self._pictures)[:-STEPS_OF_PICTURES]:
            del self._pictures[old]
        return new

    def drain(self, seconds: float) -> bool:
        """Wait until everything is written or lost; False: it took longer than ``seconds``."""
        return self.tables is None or self.tables.drain(seconds)

    def unsent(self, seconds: float) -> int:
        """Episodes that ``turnkey.log.otlp`` has not got; waits at most ``seconds`` for those on their way."""
        return 0 if self._live is None else self._live.drain(seconds)


class _Turn(NamedTuple):
    """What is logged of a step."""

    record: Mapping[str, Any]
    columns: Mapping[str, Any]
    """columns of ``turns`` that the record does not have"""
    prompt: Sequence[int]
    """ids of its end; all ids for the first turn, of each role if there are several"""
    first: bool
    """whether it is that turn"""
    response: Sequence[int] | None
    """its ids where the log has their lengths"""
    text: str
    observation: str | None
    """what the agent saw, at first, after another role's turn, or as a summary request; None: the last answer"""
    answer: str
    oldest: int | None
    opponents: str | None = None
    """turns of others, JSON"""
    images: Sequence[Any] = ()

    @classmethod
    def of(
        cls, step: PlayedStep, first: bool, follows: bool, lengths: bool, opening: Sequence[OtherTurn] = ()
    ) -> _Turn:
        """``first``: of its role. ``follows``: it saw the last turn's answer. ``opening``: others' turns before it."""
        prompt, turn = step.prompt, step.turn
        columns = {
            "parse_note": step.invalid,
            "weights": turn.version,
            "prompt_tokens": len(prompt.ids),
            "prompt_cut": prompt.cut,
            "response_tokens": len(turn.ids),
            "started": turn.ended - turn.seconds,
            "seconds_model": turn.seconds,
            "seconds_env": step.seconds,
        }
        return cls(
            step.record,
            columns,
            prompt.ids[0 if first else -TAIL :],
            first,
            turn.ids if lengths else None,
            turn.text,
            None if follows else step.observation,
            step.answer,
            turn.extra_fields.get("min_global_steps"),
            json.dumps([{**turn.logged, "before": True} for turn in opening] + [turn.logged for turn in step.others])
            if opening or step.others
            else None,
            step.images,
        )


@dataclass(frozen=True)
class Logged:
    """An ended episode, until it is in the tables."""

    episode: Episode
    """but for its steps"""
    turns: Sequence[_Turn]
    rollout: str
    group: str
    global_step: int
    split: str | None
    validation: bool
    row_task: Any
    task: Task | None
    failed: str | None
    rows: Mapping[int, tuple[int, int]]
    """step -> its row, and its position there"""
    decode: Decode
    new_pictures: Callable[[int, Iterable[str]], set[str]] = lambda step, names: {*names}
    """which pictures the log does not have yet, see :class:`TrajectoryLog`"""

    @property
    def key(self) -> str:
        return branch_name(self.rollout, self.episode.branch)

    def trained_by(self, step: int) -> str | None:
        """The episode that trains a step; None if it is this one."""
        owner = self.episode.owners[step] if self.episode.owners else self.episode.branch
        return None if owner == self.episode.branch else branch_name(self.rollout, owner)

    @property
    def size(self) -> int:
        """Approximate bytes in memory: a character takes one to four, an id in a list eight, a pixel three."""
        pixels = sum(3 * width * height for turn in self.turns for width, height in map(_size, turn.images))
        texts = sum(
            len(turn.text) + len(turn.observation or "") + len(turn.answer) + len(turn.opponents or "")
            for turn in self.turns
        )
        ids = sum(len(turn.prompt) + len(turn.response or ()) for turn in self.turns)
        return pixels + 2 * texts + 8 * ids + _OF_TURN * len(self.turns)

    def tables(self) -> Iterator[Rows]:
        """The rows of all tables. Reads versions of packages from the disk."""
        count = len(self.turns)
        pictures = [[(picture_name(image), image) for image in turn.images] for turn in self.turns]
        keys = {"episode": [self.key] * count, "turn": list(range(count))}
        yield "episodes", self.global_step, {name: [value] for name, value in self._episode().items()}
        if count:
            named = [" ".join(name for name, _ in of_turn) or None for of_turn in pictures]
            yield "turns", self.global_step, keys | self._turns() | {"images": named}
            yield "texts", self.global_step, keys | self._texts()
        by_name = {name: image for of_turn in pictures for name, image in of_turn}
        if new := sorted(self.new_pictures(self.global_step, by_name)):
            yield "pictures", self.global_step, {"picture": new, "png": [png(by_name[name]) for name in new]}

    def _episode(self) -> dict[str, Any]:
        episode, turns, task = self.episode, self.turns, self.task
        spec = {} if task is None else spec_of(task.env_id, task.kwargs)
        oldest = [turn.oldest for turn in turns if turn.oldest is not None]
        newest = [version for turn in turns if (version := turn.columns["weights"]) is not None]
        return {
            "episode": self.key,
            "group": self.group,
            "branch": episode.branch,
            # It forked from the episode of the turn before; at the start, from the rollout itself.
            "parent": (self.trained_by(episode.begins - 1) if episode.begins else self.rollout)
            if episode.branch
            else None,
            "split": None if self.split is None else str(self.split),
            "validation": self.validation,
            "global_step": self.global_step,
            "task": None if self.row_task is None else masked_json(str(self.row_task)),
            "env": spec.get("id"),
            "kwargs": json.dumps(masked(spec["kwargs"]), sort_keys=True, default=str) if spec else None,
            "seed": None if task is None else task.seed,
            "package": " ".join(filter(None, (spec.get("package"), spec.get("version")))) or None,
            "weights_min": min(oldest, default=None),
            "weights_max": max(newest, default=None),
            "host": socket.gethostname(),
            "started": episode.started,
            "seconds_model": sum(turn.columns["seconds_model"] for turn in turns),
            "seconds_env": episode.seconds_start + sum(turn.columns["seconds_env"] for turn in turns),
            "seconds_waiting": episode.seconds_waiting,
            "turns": len(turns),
            "env_return": sum(turn.record["reward"] for turn in turns),
            "composed_return": None if self.failed else sum(turn.record["composed_reward"] for turn in turns),
            "success": None if self.failed else episode.success,
            "truncated": bool(turns) and turns[-1].record["truncated"],
            "failed": self.failed,
            "failed_kind": failure_kind(self.failed) if self.failed else None,
            "other_calls": json.dumps(masked(episode.other_calls)) if episode.other_calls else None,
        }

    def _turns(self) -> dict[str, list[Any]]:
        columns = [self._turn(turn, t) for t, turn in enumerate(self.turns)]
        parts = {f"composed_reward.{label}": list(values) for label, values in self.episode.parts.items()}
        return {name: [turn_columns[name] for turn_columns in columns] for name in columns[0]} | parts

    def _turn(self, turn: _Turn, t: int) -> dict[str, Any]:
        record, extra = turn.record, dict(turn.record["extra"])
        extra.pop("text", None)  # the observation, which is among the texts
        extra.pop("images", None)
        row, place = self.rows.get(record["step"], (None, None))
        return {
            "row": row,
            "turn_in_row": place,
            "trained_by": self.trained_by(t),
            "anchor": None if record["anchor"] is None else str(record["anchor"]),
            "next_anchor": extra.pop("next_anchor", None),
            "composed_reward": record.get("composed_reward"),
            "extra": json.dumps(extra, sort_keys=True) if extra else None,
            **{name: record[name] for name in ("action", "valid", "penalty", "reward", "terminated", "truncated")},
            **turn.columns,
        }

    def _texts(self) -> dict[str, list[Any]]:
        return {
            "prompt_tail": [self.decode(turn.prompt) if turn.first else self._end(turn.prompt) for turn in self.turns],
            "response": [turn.text for turn in self.turns],
            "token_lengths": [
                None if turn.response is None else token_lengths(turn.response, turn.text, self.decode)
                for turn in self.turns
            ],
            "observation": [turn.answer for turn in self.turns],
            "task_text": [None if t else self.episode.task for t in range(len(self.turns))],
            "first_observation": [turn.observation for turn in self.turns],
            "opponents": [turn.opponents for turn in self.turns],
        }

    def _end(self, ids: Sequence[int]) -> str:
        """The last characters of a text; decodes more only if tokens are short."""
        few = ids[-TAIL // 3 :]
        text = self.decode(few)
        return (text if len(text) >= TAIL or len(few) == len(ids) else self.decode(ids))[-TAIL:]


def _size(image: Any) -> tuple[int, int]:
    """Width and height of a PIL image or an array."""
    return image.size if hasattr(image, "convert") else (image.shape[1], image.shape[0])


def picture_name(image: Any) -> str:
    """The name of a PIL image or an array in the log: equal pixels have equal names."""
    width, height = _size(image)
    return f"{width}x{height}-{images_key([image])}"


def png(image: Any) -> bytes:
    """A PIL image or an array of (height, width, 3) bytes as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    (image if hasattr(image, "convert") else Image.fromarray(image)).save(file, "PNG")
    return file.getvalue()


def data_url(image: Any) -> str:
    """An image as servers of OpenAI's API take it."""
    return f"data:image/png;base64,{b64encode(png(image)).decode()}"


def token_lengths(ids: Sequence[int], text: str, decode: Decode) -> list[int] | None:
    """How many characters each token adds to ``text``, which the ids decode to; a character counts at its last token.

    None: the tokens' texts, one after the other, are not ``text``, as under tokenizers that drop a space at the start.
    """
    lengths, begin, parts = list[int](), 0, list[str]()
    for end in range(1, len(ids) + 1):
        part = decode(ids[begin:end], skip_special_tokens=True)
        whole = not part.endswith("\ufffd")  # else the token ends inside a character
        lengths.append(len(part) if whole else 0)
        if whole:
            parts.append(part)
            begin = end
    return lengths if "".join(parts) == text else None
