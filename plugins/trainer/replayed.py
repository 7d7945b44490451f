"""Stored episodes that join groups in which all episodes ended alike (``turnkey.groups.replay``)."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.credit.rows import REPLAYED
from verl_turnkey.plugins.credit.supplied import TASK_FIELDS, task_keys
from verl_turnkey.plugins.notices import warn_once
from verl_turnkey.plugins.trainer.outcomes import Outcome, of_groups
from verl_turnkey.plugins.trainer.replay_memory import Memory, Stored, all_ended


class Replayed:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`, behind the one that keeps groups."""

    turnkey: TurnkeyConfig
    global_steps: int
    _memory: Memory | None = None
    """None before the first batch"""

    def _replay(
        self, batch: KVBatchMeta, found: Mapping[str, Sequence[Outcome]], metrics: dict[str, Any]
    ) -> KVBatchMeta:
        """``batch`` with the stored episodes that join groups of it.

        Only then are the batch's own episodes stored, so that none is trained twice in a batch.
        """
        groups = self.turnkey.groups
        if self._memory is None:
            self._memory = Memory(groups.replay, groups.replay_tasks, groups.replay_age)
        tasks = dict(zip(found, task_keys(of_groups(batch, found, TASK_FIELDS)), strict=True))
        found = {group: played for group, played in found.items() if played}
        added: dict[str, list[Stored]] = {}
        for group, played in found.items():
            ended = all_ended([each.solved for each in played])
            if ended is not None and (stored := self._memory.take(tasks[group], not ended, self.global_steps)):
                added[group] = stored
        extended, ages = self._put(batch, added)
        self._remember(batch, found, tasks)
        metrics["groups/replayed"] = len(ages) / max(1, len(found))
        metrics["groups/replay_tasks"] = float(len(self._memory))
        if ages:
            metrics["groups/replay_age"] = float(np.mean([age for of_group in ages.values() for age in of_group]))
        return extended

    def _put(self, batch: KVBatchMeta, added: Mapping[str, Sequence[Stored]]) -> tuple[KVBatchMeta, dict[str, Any]]:
        """``batch`` with the stored episodes as further sessions of their groups, and the ages of those by group."""
        if not added:
            return batch, {}
        names = set(tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id).keys())
        keys: list[str] = []
        rows: list[dict[str, Any]] = []
        tags: list[dict[str, Any]] = []
        ages: dict[str, list[int]] = defaultdict(list)
        last: dict[str, int] = defaultdict(int)
        for group, episode, _ in map(split_key, batch.keys):
            last[group] = max(last[group], int(episode.rsplit("_", 1)[1]))
        for group, stored in added.items():
            for one in stored:
                # The queue keeps the fields that all rows have: a row that lacks one would take it from the batch.
                if any(names - row.keys() for row in one.rows):
                    warn_once("a stored episode lacks fields that the rows of this batch have, and is not replayed")
                    continue
                last[group] += 1
                ages[group].append(self.global_steps - one.step)
                for index, (row, tag) in enumerate(zip(one.rows, one.tags, strict=True)):
                    keys.append(f"{group}_{last[group]}_{index}")
                    fresh = {name: copy.deepcopy(row[name]) for name in row if name in names}
                    rows.append(fresh | {"uid": group, "session_id": last[group]})
                    tags.append({**tag, REPLAYED: True})
        if keys:
            tq.kv_batch_put(
                keys=keys, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows), tags=tags
            )
        return (
            KVBatchMeta(
                keys=[*batch.keys, *keys],
                tags=[*batch.tags, *tags],
                partition_id=batch.partition_id,
                fields=batch.fields,
                extra_info=batch.extra_info,
            ),
            ages,
        )

    def _remember(self, batch: KVBatchMeta, found: Mapping[str, Sequence[Outcome]], tasks: Mapping[str, str]) -> None:
        """Store the newest episodes of each group that were solved, and those that were not at all."""
        assert self._memory is not None
        chosen: dict[str, dict[bool, list[str]]] = {}
        for group, played in found.items():
            won = [each.episode for each in played if each.solved >= 1]
            lost = [each.episode for each in played if each.solved <= 0]
            most = self.turnkey.groups.replay
            chosen[group] = {True: won[-most:], False: lost[-most:]}
        wanted = {episode for ends in chosen.values() for episodes in ends.values() for episode in episodes}
        at = sorted(
            (i for i, key in enumerate(batch.keys) if split_key(key)[1] in wanted),
            key=lambda i: split_key(batch.keys[i])[1:],
        )
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        tags: dict[str, list[dict[str, Any]]] = defaultdict(list)
        if at:
            keys = [batch.keys[i] for i in at]
            read = _rows(tq.kv_batch_get(keys=keys, partition_id=batch.partition_id))
            for i, row in zip(at, read, strict=True):
                episode = split_key(batch.keys[i])[1]
                rows[episode].append(row)
                tags[episode].append(dict(batch.tags[i]))
        for group, ends in chosen.items():
            kept = {
                end: [Stored(self.global_steps, rows[one], tags[one]) for one in episodes if _of_text(rows[one])]
                for end, episodes in ends.items()
            }
            self._memory.learn(tasks[group], kept[True], kept[False])
        self._memory.forget(self.global_steps + 1)


def _rows(data: TensorDict) -> list[dict[str, Any]]:
    """The fields of each row, with memory of their own: a view would hold the tensors of the whole batch."""
    columns: dict[str, list[Any]] = {}
    for name in data.keys():  # noqa: SIM118
        value = data.get(name)
        tensors = isinstance(value, torch.Tensor)
        columns[name] = [one.clone() for one in value.unbind()] if tensors else list(data[name])
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _of_text(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no row holds images, which would fill the driver's memory."""
    return not any(row.get("multi_modal_inputs") for row in rows)
