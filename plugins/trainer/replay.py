"""Trains stored episodes again when those of a batch all ended alike (``replay`` and ``buffer``): R^3 and SSB."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins.config.training import GroupsConfig
from verl_turnkey.plugins.credit.rows import REPLAYED, split_key
from verl_turnkey.plugins.credit.trainer_columns import TASK_FIELDS, task_keys
from verl_turnkey.plugins.notices import warn_once
from verl_turnkey.plugins.trainer.outcomes import EpisodeScore, of_groups, spread
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, partition_of, with_rows


@dataclass(frozen=True)
class Stored:
    """An episode of an earlier step."""

    step: int
    """in which it was first trained"""
    rows: Sequence[Mapping[str, Any]]
    """the fields of verl's queue of each of its rows"""
    tags: Sequence[Mapping[str, Any]]
    """of the rows in verl's queue"""


class Memory:
    """The newest solved and the newest unsolved episodes of the tasks that were played last.

    Args:
        outcomes: most solved episodes of a task, and most unsolved ones.
        tasks: most tasks; the least recently played one is dropped first.
        age: steps after which an episode is dropped.
    """

    def __init__(self, outcomes: int, tasks: int, age: int) -> None:
        self._outcomes, self._most, self._age = outcomes, tasks, age
        self._tasks: OrderedDict[str, dict[bool, list[Stored]]] = OrderedDict()
        """the solved and the unsolved episodes of each task, the newest last"""

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._tasks)

    def learn(self, task: str, solved: Sequence[Stored], unsolved: Sequence[Stored]) -> None:
        """Store episodes of ``task``, the newest last."""
        stored = self._tasks.setdefault(task, {True: [], False: []})
        self._tasks.move_to_end(task)
        for end, episodes in ((True, solved), (False, unsolved)):
            stored[end] = [*stored[end], *episodes][-self._outcomes :]
        while len(self._tasks) > self._most:
            self._tasks.popitem(last=False)

    def take(self, task: str, solved: bool, step: int) -> list[Stored]:
        """Stored episodes of ``task`` from before ``step`` with this outcome that are not too old; they stay stored."""
        episodes = self._tasks[task][solved] if task in self._tasks else []
        return [episode for episode in episodes if episode.step < step <= episode.step + self._age]

    def forget(self, step: int) -> None:
        """Drop what is too old at ``step``."""
        for task, stored in list(self._tasks.items()):
            for end, episodes in stored.items():
                stored[end] = [episode for episode in episodes if step <= episode.step + self._age]
            if not any(stored.values()):
                del self._tasks[task]


@dataclass(frozen=True)
class StoredGroup:
    """The episodes of a group whose rewards differ."""

    name: str
    spread: float
    """standard deviation of the rewards, positive"""
    episodes: Sequence[Stored]

    @property
    def step(self) -> int:
        """The step in which it was first trained."""
        return self.episodes[0].step


class Buffer:
    """The newest groups whose rewards differ (Skywork R1V2's selective sample buffer).

    Args:
        size: most groups; the oldest is dropped first.
        age: steps after which a group is dropped.
        seed: of the draws.
    """

    def __init__(self, size: int, age: int, seed: int) -> None:
        self._size, self._age, self._seed = size, age, abs(seed)
        self._groups: list[StoredGroup] = []

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._groups)

    def learn(self, groups: Sequence[StoredGroup]) -> None:
        """Store the groups of a step."""
        self._groups = [*self._groups, *groups][-self._size :]

    def draw(self, number: int, step: int, update: int = 0) -> list[StoredGroup]:
        """At most ``number`` groups of steps before ``step``, the larger their spread the more likely, oldest first.

        They are removed, so that none is trained a third time. ``update``: its number in the step.
        """
        eligible = [i for i, group in enumerate(self._groups) if group.step < step]
        if not eligible or not number:
            return []
        weights = np.array([self._groups[i].spread for i in eligible])
        rng = np.random.default_rng((self._seed, step, update))
        drawn = set(rng.choice(eligible, min(number, len(eligible)), replace=False, p=weights / weights.sum()).tolist())
        chosen = [self._groups[i] for i in sorted(drawn)]
        self._groups = [group for i, group in enumerate(self._groups) if i not in drawn]
        return chosen

    def forget(self, step: int) -> None:
        """Drop what is too old at ``step``."""
        self._groups = [group for group in self._groups if step <= group.step + self._age]


def all_ended(solved: Sequence[float]) -> bool | None:
    """True if all episodes of a group were solved, False if none was; None if they differ or there are none."""
    if solved and min(solved) >= 1:
        return True
    return False if solved and max(solved) <= 0 else None


class Replay:
    """The stored episodes and groups; ``memory`` is None without ``replay``, ``buffer`` without ``buffer``."""

    def __init__(self, trainer: PPOTrainer, options: GroupsConfig) -> None:
        self._trainer, self._options = trainer, options
        age, seed = options.replay_age, trainer.config.data.get("seed") or 0
        self.memory = Memory(options.replay, options.replay_tasks, age) if options.replay else None
        self.buffer = Buffer(options.buffer, age, seed) if options.buffer else None

    def extend(
        self, batch: KVBatchMeta, by_group: Mapping[str, Sequence[EpisodeScore]], metrics: dict[str, Any]
    ) -> KVBatchMeta:
        """``batch`` with stored episodes added to its groups, and with stored groups.

        The batch's own episodes are stored afterwards, so that none is trained twice in a batch.
        """
        step = self._trainer.global_steps
        tasks = dict(zip(by_group, task_keys(of_groups(batch, by_group, TASK_FIELDS)), strict=True))
        spreads = {group: spread([outcome.score for outcome in played]) for group, played in by_group.items()}
        joining: dict[str, Sequence[Stored]] = {}
        if self.memory is not None:
            self.memory.forget(step)
            joining = self._opposite(self.memory, by_group, tasks)
        if self.buffer is not None:
            self.buffer.forget(step)
            alike = sum(not value for value in spreads.values())
            drawn = self.buffer.draw(alike, step, self._trainer.local_trigger_step)
            joining = {f"{stored_group.name}-{step}": stored_group.episodes for stored_group in drawn}
        extended, ages = self._put(batch, joining)
        self._remember(batch, by_group, tasks, spreads)
        if self.memory is not None:
            metrics["groups/replayed"] = len(ages) / max(1, sum(map(bool, by_group.values())))
            metrics["groups/replay_tasks"] = float(len(self.memory))
        if self.buffer is not None:
            metrics["groups/drawn"] = len(ages) / len(by_group)
            metrics["groups/buffer"] = float(len(self.buffer))
        if ages:
            metrics["groups/replay_age"] = float(np.mean([*chain(*ages.values())]))
        return extended

    def _opposite(
        self, memory: Memory, by_group: Mapping[str, Sequence[EpisodeScore]], tasks: Mapping[str, str]
    ) -> dict[str, Sequence[Stored]]:
        """Stored episodes with the other outcome, for groups in which all episodes ended alike.

        Of several groups of a task the first one gets them: nothing is trained twice in a batch.
        """
        joining: dict[str, Sequence[Stored]] = {}
        served: set[str] = set()
        for group, episodes in by_group.items():
            ended = all_ended([episode.solved for episode in episodes])
            if ended is None or tasks[group] in served:
                continue
            if stored := memory.take(tasks[group], not ended, self._trainer.global_steps):
                joining[group] = stored
                served.add(tasks[group])
        return joining

    def _put(
        self, batch: KVBatchMeta, added: Mapping[str, Sequence[Stored]]
    ) -> tuple[KVBatchMeta, dict[str, list[int]]]:
        """``batch`` with the stored episodes as further sessions of their groups, and their ages by group.

        A group that is not in the batch is added to it.
        """
        if not added:
            return batch, {}
        names = set(partition_of(batch).read(batch.keys[:1]).keys())
        keys: list[str] = []
        rows: list[dict[str, Any]] = []
        tags: list[dict[str, Any]] = []
        ages: dict[str, list[int]] = defaultdict(list)
        last: dict[str, int] = defaultdict(lambda: -1)
        for group, episode, _ in map(split_key, batch.keys):
            last[group] = max(last[group], int(episode.rsplit("_", 1)[1]))
        for group, stored in added.items():
            for stored_episode in stored:
                # The queue keeps only fields that all rows have: a row that lacks one would remove it from the batch.
                if any(names - row.keys() for row in stored_episode.rows):
                    warn_once("a stored episode lacks fields that the rows of this batch have, and is not replayed")
                    continue
                last[group] += 1
                ages[group].append(self._trainer.global_steps - stored_episode.step)
                for index, (row, tag) in enumerate(zip(stored_episode.rows, stored_episode.tags, strict=True)):
                    keys.append(f"{group}_{last[group]}_{index}")
                    fresh = {name: copy.deepcopy(row[name]) for name in row if name in names}
                    rows.append(fresh | {"uid": group, "session_id": last[group]})
                    tags.append({**tag, REPLAYED: True})
        if keys:
            partition_of(batch).write_rows(keys, rows, tags)
        return with_rows(batch, keys, tags), ages

    def _remember(
        self,
        batch: KVBatchMeta,
        by_group: Mapping[str, Sequence[EpisodeScore]],
        tasks: Mapping[str, str],
        spreads: Mapping[str, float],
    ) -> None:
        """Store the newest solved and unsolved episodes of each task, and the groups whose rewards differ."""
        chosen: dict[str, dict[bool, list[str]]] = {}
        if self.memory is not None:
            most = self._options.replay
            for group, played in by_group.items():
                won = [outcome.episode for outcome in played if outcome.solved >= 1]
                lost = [outcome.episode for outcome in played if outcome.solved <= 0]
                chosen[group] = {True: won[-most:], False: lost[-most:]}
        whole_groups: list[str] = []
        if self.buffer is not None:
            whole_groups = sorted(by_group, key=lambda group: -spreads[group])[: self._options.buffer]
            whole_groups = [group for group in by_group if group in whole_groups and spreads[group]]
        wanted = {episode for ends in chosen.values() for episodes in ends.values() for episode in episodes}
        stored = self.read(batch, wanted | {outcome.episode for group in whole_groups for outcome in by_group[group]})
        if self.memory is not None:
            for group, ends in chosen.items():
                kept = {end: [stored[name] for name in episodes if name in stored] for end, episodes in ends.items()}
                self.memory.learn(tasks[group], kept[True], kept[False])
        if self.buffer is not None:
            alike = {group: [outcome.episode for outcome in by_group[group]] for group in whole_groups}
            self.buffer.learn(
                [
                    StoredGroup(group, spreads[group], [stored[name] for name in episodes])
                    for group, episodes in alike.items()
                    if stored.keys() >= {*episodes}
                ]
            )

    def read(self, batch: KVBatchMeta, wanted: Collection[str]) -> dict[str, Stored]:
        """The rows of the ``wanted`` episodes of ``batch``, without those with images, which are not stored."""
        at = sorted(
            (i for i, key in enumerate(batch.keys) if split_key(key)[1] in wanted),
            key=lambda i: split_key(batch.keys[i])[1:],
        )
        if not at:
            return {}
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        tags: dict[str, list[dict[str, Any]]] = defaultdict(list)
        read = _rows(partition_of(batch).read([batch.keys[i] for i in at]))
        for i, row in zip(at, read, strict=True):
            episode = split_key(batch.keys[i])[1]
            rows[episode].append(row)
            tags[episode].append(dict(batch.tags[i]))
        step = self._trainer.global_steps
        stored = {name: Stored(step, rows[name], tags[name]) for name in rows if _of_text(rows[name])}
        if len(stored) < len(rows):
            warn_once("episodes with images are not stored: turnkey.groups.replay and buffer skip them")
        return stored


def _rows(data: TensorDict) -> list[dict[str, Any]]:
    """The fields of each row, copied: a view would keep the tensors of the whole batch in memory."""
    columns: dict[str, list[Any]] = {}
    for name in map(str, data.keys()):
        value = data.get(name)
        tensors = isinstance(value, torch.Tensor)
        columns[name] = [entry.clone() for entry in value.unbind()] if tensors else list(data[name])
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _of_text(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no row holds images, which would fill the driver's memory."""
    names = {name for row in rows for name in row.get("multi_modal_inputs") or ()}
    return names <= {"mm_token_type_ids"}  # which some processors give with text alone
