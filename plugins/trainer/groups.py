"""``turnkey.groups``: how often each task is played, with how much of its hint, and which groups are trained.

verl's agent-loop worker plays a prompt ``__rollout_n__`` times if the prompt has this field. The histories of tasks
are in the checkpoints.

With a fixed total, ``variance`` is the allocation of DynaMO's released code (arXiv:2602.19208): every task gets the
minimum, the others are divided by the variance of outcomes so far. ``prior`` is the sequential rule of V_0.5
(arXiv:2603.10848) turned into one that decides before the episodes are played: another episode goes where it lowers the
error of the baseline most.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_turnkey.envs.tasks import HINT
from verl_turnkey.plugins.checks.files import ROLLOUTS
from verl_turnkey.plugins.config.checkpoint_files import GROUPS
from verl_turnkey.plugins.config.training import GroupsConfig
from verl_turnkey.plugins.credit.rows import split_key
from verl_turnkey.plugins.credit.trainer_columns import TASK_FIELDS, task_keys
from verl_turnkey.plugins.rollout.columns import HINT_SHARE, hint_words
from verl_turnkey.plugins.trainer import checkpointing
from verl_turnkey.plugins.trainer.outcomes import EpisodeScore, most_spread, of_groups, outcomes, spread
from verl_turnkey.plugins.trainer.replay import Replay
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, part_of, partition_of

SOLVED, LEAST = 0.85, 0.01
"""DynaMO: from this share of successes on a task counts as solved and gets the smallest weight"""
FARTHEST = 4.0
"""the largest squared distance of two outcomes in [-1, 1], used for unknown tasks"""


class TaskHistory(NamedTuple):
    """The history of a task."""

    episodes: float
    """weighted number of episodes"""
    solved: float
    """their successes, with the same weights"""
    surprise: float
    """squared distance of its last successes from those before, in excess of chance: V_0.5's D2"""
    unsolved: float = 0.0
    """1: it was last played without a hint and not solved once"""


def learn(history: TaskHistory | None, solved: Sequence[float], decay: float) -> TaskHistory:
    """``history`` after another group of the task; ``solved``: the success of each episode, in [0, 1], at least one."""
    number, total = len(solved), float(sum(solved))
    unsolved = float(total == 0)
    if history is None or not history.episodes:
        return TaskHistory(number, total, FARTHEST, unsolved)
    distance = 2 * (total / number - history.solved / history.episodes)  # V_0.5's outcomes are -1 and 1
    surprise = max(0.0, distance**2 - 1 / number)
    return TaskHistory(decay * history.episodes + number, decay * history.solved + total, surprise, unsolved)


def hint_share(history: TaskHistory | None, low: float, high: float) -> float:
    """The share of its hint that a task shows: ADHint's, ``low + (high - low) * d``, d the share of failures so far.

    0 unless no episode of the last group was solved, without a hint: so every other group has no hint and shows
    whether the task still needs one.
    """
    if history is None or not history.unsolved:
        return 0.0
    return low + (high - low) * (1 - history.solved / history.episodes)


def by_variance(tasks: Sequence[TaskHistory | None], total: int, low: int, high: int) -> list[int]:
    """``low`` each, and the rest in proportion to 4 p (1 - p), p the share of successes; never above ``high``."""
    counts = np.full(len(tasks), low)
    weights = np.array([_weight(history) for history in tasks])
    while remaining := total - int(counts.sum()):
        free = np.flatnonzero(counts < high)
        shares = remaining * weights[free] / weights[free].sum()
        added = np.floor(shares).astype(int)
        largest = np.argsort(added - shares, kind="stable")  # by the rounding error
        added[largest[: remaining - added.sum()]] += 1
        counts[free] += np.minimum(added, high - counts[free])
    return counts.tolist()


def _weight(history: TaskHistory | None) -> float:
    if history is None or not history.episodes:
        return 1.0
    share = history.solved / history.episodes
    return LEAST if share >= SOLVED else max(LEAST, 4 * share * (1 - share))


def by_prior(tasks: Sequence[TaskHistory | None], total: int, low: int, high: int) -> list[int]:
    """``low`` each, and every further episode where the baseline's mean squared error D2 / (k D2 + 1) falls most.

    That is V_0.5's w^2 / k + (1 - w)^2 D2 with w = D2 / (D2 + 1 / k). Ties go to the task with fewest episodes.
    """
    counts = [low] * len(tasks)
    surprises = [FARTHEST if history is None else history.surprise for history in tasks]

    def entry(i: int) -> tuple[float, int, int]:
        k, d = counts[i], surprises[i]
        return (d / ((k + 1) * d + 1) - d / (k * d + 1), k, i)

    heap = [entry(i) for i in range(len(tasks)) if low < high]
    heapq.heapify(heap)
    for _ in range(total - low * len(tasks)):
        i = heapq.heappop(heap)[2]
        counts[i] += 1
        if counts[i] < high:
            heapq.heappush(heap, entry(i))
    return counts


RULES: dict[str, Callable[[Sequence[TaskHistory | None], int, int, int], list[int]]] = {
    "variance": by_variance,
    "prior": by_prior,
}
"""From the history of each task of a batch, the total, and the bounds per task, with ``low * tasks <= total <= high *
tasks``, to the episodes of each task."""


class Allocation:
    """The history of every played task, and the allocation that follows for the tasks of a batch."""

    def __init__(self, config: DictConfig, options: GroupsConfig) -> None:
        self._config, self._options = config, options
        self.histories: dict[str, TaskHistory] = {}
        """key of the task -> history"""
        self.metrics: dict[str, float] = {}
        """of the newest batch of prompts"""

    def allot(self, batch: TensorDict) -> None:
        """Write into ``batch`` how often each prompt is played, ``rollout.n`` on average, and its share of a hint."""
        groups, n = self._options, self._config.actor_rollout_ref.rollout.n
        if not groups.remembers:
            return
        fields = {name: list(tu.get(batch, name)) for name in TASK_FIELDS if name in batch.keys()}  # noqa: SIM118
        tasks = [self.histories.get(key) for key in task_keys(fields)]
        metrics = {"groups/known": float(np.mean([history is not None for history in tasks]))}
        if groups.allocation != "even":
            counts = RULES[groups.allocation](tasks, n * len(tasks), *groups.bounds(n))
            tu.assign_non_tensor_stack(batch, ROLLOUTS, counts)
            metrics |= {"groups/episodes/min": float(min(counts)), "groups/episodes/max": float(max(counts))}
        if groups.hint_high:
            texts = tu.get(batch, HINT) if HINT in batch.keys() else [""] * len(tasks)  # noqa: SIM118
            shares = [
                hint_share(history, groups.hint_low, groups.hint_high) if hint_words(text) else 0.0
                for history, text in zip(tasks, texts, strict=True)
            ]
            tu.assign_non_tensor_stack(batch, HINT_SHARE, shares)
            metrics["groups/hinted"] = float(np.mean([share > 0 for share in shares]))
        if len(tasks) > 1:  # a single replacement says little
            self.metrics = metrics

    def learn(self, batch: KVBatchMeta, by_group: Mapping[str, list[EpisodeScore]]) -> None:
        """Remember how the groups of ``batch`` ended, including those that are not trained."""
        fields = of_groups(batch, by_group, (*TASK_FIELDS, HINT_SHARE))
        shares = fields.pop(HINT_SHARE, [0.0] * len(by_group))
        for episodes, key, share in zip(by_group.values(), task_keys(fields), shares, strict=True):
            solved = [min(max(outcome.solved, 0.0), 1.0) for outcome in episodes]
            history = self.histories.get(key)
            if share and history is not None:
                # Successes with a hint say nothing about those without; and the hint may be why all episodes failed.
                self.histories[key] = history._replace(unsolved=0.0)
            elif solved:
                self.histories[key] = learn(history, solved, self._options.decay)

    def save(self, folder: Path) -> None:
        """Write the histories into the checkpoint ``folder``."""
        if self._options.remembers:
            flat = {
                f"{key} {name}": v for key, history in self.histories.items() for name, v in history._asdict().items()
            }
            checkpointing.save_state(folder, "allocation", flat, GROUPS)

    def load(self, folder: Path) -> None:
        """Restore the histories from the checkpoint ``folder``."""
        if not self._options.remembers:
            return
        without = "turnkey.groups has no history of the tasks played before"
        state = checkpointing.restore_state(folder, "allocation", without, GROUPS) or {}
        keys = dict.fromkeys(name.split()[0] for name in state)
        self.histories = {key: TaskHistory(*(state[f"{key} {name}"] for name in TaskHistory._fields)) for key in keys}


class GroupSelection:
    """Selects the groups of the current batch to train, adds stored ones, and remembers outcomes."""

    def __init__(self, options: GroupsConfig, allocation: Allocation, replay: Replay) -> None:
        self._options, self._allocation, self._replay = options, allocation, replay
        self.groups: int | None = None
        """number of kept groups of the current batch; None: all"""
        self.left_out: Counter[str] = Counter()
        """episodes with rows of each dropped group of the current batch"""

    def select(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The rows of ``batch`` to train, once its rewards are complete, including those of a reward model."""
        self.groups, self.left_out = None, Counter()
        if self._options.remembers or self._options.stores or self._options.keep < 1:
            by_group = outcomes(batch)
            if self._options.remembers:
                self._allocation.learn(batch, by_group)
                metrics.update(self._allocation.metrics)
            if self._options.keep < 1:
                batch = self._keep(batch, by_group, metrics)
            if self._options.stores:
                batch = self._replay.extend(batch, by_group, metrics)
        return batch

    def _keep(
        self, batch: KVBatchMeta, by_group: dict[str, list[EpisodeScore]], metrics: dict[str, Any]
    ) -> KVBatchMeta:
        """``batch`` without the groups that are not trained, whose rows leave the queue.

        A group whose episodes all failed is not trained; ``starvation.py`` ensures that the batch has another one.
        """
        spreads = {group: spread([outcome.score for outcome in played]) for group, played in by_group.items() if played}
        kept = most_spread(spreads, self._options.keep, self._options.keep_by)
        failed = 1 - len(spreads) / len(by_group)
        metrics.update({"groups/failed": failed, **_metrics([*chain(*by_group.values())], spreads, kept)})
        self.groups, chosen = len(kept), set(kept)
        left_out = [key for key in batch.keys if split_key(key)[0] not in chosen]
        if not left_out:
            return batch
        self.left_out.update(group for group, _ in {split_key(key)[:2] for key in left_out})
        partition_of(batch).clear(left_out)
        return part_of(batch, [i for i, key in enumerate(batch.keys) if split_key(key)[0] in chosen])


def _metrics(played: list[EpisodeScore], spreads: dict[str, float], kept_groups: list[str]) -> dict[str, float]:
    """Metrics of all episodes; those under ``episode/`` are of the kept groups only."""
    total = sum(spreads.values())
    return {
        "groups/kept": len(kept_groups) / len(spreads),
        "groups/kept_spread": sum(spreads[group] for group in kept_groups) / total if total else 0.0,
        "groups/spread/mean": float(np.mean([*spreads.values()])),
        "groups/without_spread": float(np.mean([value == 0 for value in spreads.values()])),
        "groups/composed_return/mean": float(np.mean([outcome.score for outcome in played])),
        "groups/solved": float(np.mean([outcome.solved for outcome in played])),
    }
