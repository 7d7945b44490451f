"""Validation metrics that distinguish failed episodes from unsolved ones.

verl averages over all episodes. A failed one also has a row, of length 0, which would lower the mean length and the
success rate without a visible cause. Here it counts as not solved in ``acc``, as an episode without a row does in verl;
all other metrics are over the played episodes, and ``failed`` is the share of failed ones. Rows without an entry
``failed`` count as played. A validation of which most episodes failed measures nothing, and is played again: a host
that dies takes all its open episodes, which may be most of them.

verl 0.9.1 leaves out a value that is None, and takes the number of episodes of each task to count the missing ones as
not solved. Earlier versions do neither; here their metrics are computed from the rows that have a value.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.rollout.worker import latest_failures
from verl_turnkey.plugins.shutdown.channel import StoppedError
from verl_turnkey.plugins.trainer.checkpointing import Checkpointing
from verl_turnkey.plugins.trainer.starvation import Patience, StarvedError, listed
from verl_turnkey.plugins.verl_api import internals

Infos = dict[str, list[Any]]
Metrics = dict[str, dict[str, dict[str, float]]]


def validation_metrics(
    update: Callable[..., dict[str, float]],
    sources: Sequence[str],
    uids: Sequence[str],
    infos: Infos,
    turns: Sequence[int],
    expected: dict[tuple[str, str], int] | None,
) -> dict[str, float]:
    """What verl's ``_val_metrics_update`` gives; the values in ``infos`` of episodes that failed are None."""
    if "expected_acc_counts" in inspect.signature(update).parameters:
        return update(sources, uids, infos, turns, expected)
    with patch.object(trainer_base, "process_validation_metrics", without_missing):
        return update(sources, uids, infos, turns)


def without_missing(sources: Sequence[str], uids: Sequence[str], infos: Infos) -> Metrics:
    """verl's ``process_validation_metrics`` over the values that are not None; in ``acc`` None counts as 0."""
    if "acc" in infos:
        infos = {**infos, "acc_success_only": infos["acc"], "acc": [value or 0.0 for value in infos["acc"]]}
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, values in infos.items():
        alike[tuple(i for i, value in enumerate(values) if value is not None)].append(name)
    merged: Metrics = defaultdict(dict)
    for rows, names in alike.items():
        part = _verls(
            [sources[i] for i in rows], [uids[i] for i in rows], {n: [infos[n][i] for i in rows] for n in names}
        )
        for source, of_names in part.items():
            merged[source].update(of_names)
    return dict(merged)


_verls = trainer_base.process_validation_metrics  # pyright: ignore[reportPrivateImportUsage]


WARN_ABOVE, STOP_ABOVE = 0.05, 0.5
"""shares of failed episodes"""


class Validation:
    """Validation by the played episodes. ``seconds``: ``turnkey.env.patience``."""

    def __init__(self, trainer: PPOTrainer, seconds: float, checkpointing: Checkpointing) -> None:
        self._trainer, self._seconds, self._checkpointing = trainer, seconds, checkpointing

    def validate(self, verls: Callable[[], dict[str, float]]) -> dict[str, float]:
        """verl's own validation, repeated with pauses while most of its episodes fail.

        Raises:
            StarvedError: most failed for ``turnkey.env.patience`` seconds; the last trained step is saved.
            StoppedError: a signal arrived and most failed; the last trained step is saved.
        """
        patience = Patience(self._seconds)
        try:
            while True:
                try:
                    return verls()
                except StarvedError as error:
                    patience.lose(str(error))
        except (StarvedError, StoppedError):
            if self._trainer.global_steps:
                self._checkpointing.save_stopping(self._trainer.global_steps)
            raise

    def metrics(
        self,
        verls: Callable[..., dict[str, float]],
        sources: list[str],
        uids: list[str],
        infos: dict[str, list[Any]],
        turns: list[int],
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """The metrics of ``verls`` over the played episodes. The other arguments are those of verl's, a list each.

        Raises:
            StarvedError: more than half of the episodes failed.
        """
        failed = [bool(value) for value in infos.get("failed", [False] * len(uids))]
        infos = {  # None, which verl's metrics leave out, for the values of failed episodes
            name: [None if lost and name != "failed" else value for value, lost in zip(values, failed, strict=True)]
            for name, values in infos.items()
        }
        turns = [number for number, lost in zip(turns, failed, strict=True) if not lost]
        metrics = validation_metrics(verls, sources, uids, infos, turns, expected_acc_counts)
        samples = self._trainer.config.actor_rollout_ref.rollout.val_kwargs.n
        expected = set((expected_acc_counts or {}).values()) or {samples}
        if any(failed) and len(expected) == 1:
            metrics = unsplit(metrics, sources, infos, expected.pop())
        share = sum(failed) / max(1, len(failed))
        if share > WARN_ABOVE:
            workers = internals.loop_workers(self._trainer.agent_loop_manager)
            failures = ray.get([worker.__ray_call__.remote(latest_failures) for worker in workers])
            reasons = listed(reason for worker_reasons in failures for reason in worker_reasons)
            message = f"{sum(failed)} of {len(failed)} validation episodes failed; latest reasons:\n{reasons}"
            if share > STOP_ABOVE:
                raise StarvedError(message)
            logger.warning(message)
        return metrics


def unsplit(
    metrics: Mapping[str, float], sources: Sequence[str], infos: Mapping[str, Sequence[Any]], expected: int
) -> dict[str, float]:
    """``metrics`` with one mean per metric, where verl has one for each number of played episodes of a task.

    verl names a mean by the number of values of a task (``mean@4``). The values of a task with a missing episode would
    become a separate metric (``mean@3``).

    Args:
        metrics: verl's of this validation.
        sources: data source of each episode.
        infos: verl's ``reward_extra_info`` as lists by name, with None for the values of failed episodes.
        expected: episodes of each task.
    """
    metrics = dict(metrics)
    played = {**infos, "acc_success_only": infos.get("acc", [None] * len(sources))}
    for source in set(sources):
        for name, values in played.items():
            pattern = re.compile(rf"(val-\w+/{re.escape(f'{source}/{name}')}/mean@)\d+")
            split = {key: match[1] for key in metrics if (match := pattern.fullmatch(key))}
            present = [
                value
                for value, value_source in zip(values, sources, strict=True)
                if value_source == source and value is not None
            ]
            if name != "acc" and split and present:
                for key in split:
                    del metrics[key]
                metrics[f"{max(split.values())}{expected}"] = float(np.mean(present))
    return metrics
