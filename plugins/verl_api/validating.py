"""verl's validation metrics over episodes of which some have no value.

verl 0.9.1 leaves out a value that is None, and takes the number of episodes of each task to count the missing ones as
not solved. Earlier versions do neither; here their metrics are computed from the rows that have a value.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from verl.trainer.ppo.v1 import trainer_base

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
