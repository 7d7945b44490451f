"""The rollout side of the trajectory log: the tables ``episodes``, ``turns`` and ``texts``."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_turnkey.envs.registry import spec_of
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins.credit.rows import branch_name
from verl_turnkey.plugins.log.bounds import Shares, chosen, logged_shares
from verl_turnkey.plugins.log.masking import masked, masked_json
from verl_turnkey.plugins.log.writer import UNNAMED, Rows, Tables
from verl_turnkey.plugins.notices import failure_kind

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.episode import Episode, PlayedStep

VALIDATION = "turnkey_validation"
"""field that marks data rows of a validation"""
TAIL = 2000
"""characters of a prompt that are kept, and maximum number of their tokens"""
WRITE_SECONDS = 300.0
"""seconds until a file is written, unless the next step or 64 episodes come first: small files burden shared disks"""
_OF_TURN = 500  # approximate bytes of a turn besides its texts

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
        self.tables = Tables(*named, seconds=WRITE_SECONDS) if log.trajectories else None

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
        players = episode.players
        records = [] if failed else [output.extra_fields["turnkey"] for output in outputs]
        logged = Logged(
            # Without the ids and log-probs of whole conversations, which would wait in memory with the episode.
            episode=replace(episode, steps=[]),
            turns=[
                _Turn.of(step, players[t] not in players[:t], t > 0 and players[t] == players[t - 1], self._lengths)
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
        )
        self.tables.put_later(logged.tables, 1 + 2 * len(episode.steps), logged.size)

    def drain(self, seconds: float) -> bool:
        """Wait until everything is written or lost; False: it took longer than ``seconds``."""
        return self.tables is None or self.tables.drain(seconds)


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
    """what the agent saw before the first turn, or where another role moved before; None: the answer of then"""
    answer: str
    oldest: int | None

    @classmethod
    def of(cls, step: PlayedStep, first: bool, follows: bool, lengths: bool) -> _Turn:
        """``first``: of its role. ``follows``: a turn of the same role."""
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

    @property
    def key(self) -> str:
        return branch_name(self.rollout, self.episode.branch)

    def trained_by(self, step: int) -> str | None:
        """The episode that trains a step; None if it is this one."""
        owner = self.episode.owners[step] if self.episode.owners else self.episode.branch
        return None if owner == self.episode.branch else branch_name(self.rollout, owner)

    @property
    def size(self) -> int:
        """Approximate bytes in memory: a character takes one to four, an id in a list eight."""
        texts = sum(len(turn.text) + len(turn.observation or "") + len(turn.answer) for turn in self.turns)
        return 2 * texts + sum(8 * (len(turn.prompt) + len(turn.response or ())) + _OF_TURN for turn in self.turns)

    def tables(self) -> Iterator[Rows]:
        """The rows of all three tables. Reads versions of packages from the disk."""
        count = len(self.turns)
        keys = {"episode": [self.key] * count, "turn": list(range(count))}
        yield "episodes", self.global_step, {name: [value] for name, value in self._episode().items()}
        if count:
            yield "turns", self.global_step, keys | self._turns()
            yield "texts", self.global_step, keys | self._texts()

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
        }

    def _end(self, ids: Sequence[int]) -> str:
        """The last characters of a text; decodes more only if tokens are short."""
        few = ids[-TAIL // 3 :]
        text = self.decode(few)
        return (text if len(text) >= TAIL or len(few) == len(ids) else self.decode(ids))[-TAIL:]


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
