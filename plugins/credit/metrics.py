"""What a training step logs of its episodes. verl's own metrics are per row, so long episodes weigh more there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.notices import failure_kind

REWARD = "reward/"
"""begins the names of the reward components among verl's ``reward_extra_info``"""
FAILED = "episode/failed/"
"""begins the counts of failed episodes by kind"""


def reward_metrics(rows: Rows, keys: Sequence[str], extra_fields: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over the played episodes of what each reward component gave, and of what held no action."""
    said: dict[str, Mapping[str, Any]] = {}
    for row in rows.row.tolist():
        said.setdefault(split_key(keys[row])[1], extra_fields[row].get("reward_extra_info") or {})
    names = {name for info in said.values() for name in info if name.startswith(REWARD) or name == "unparsed_rate"}
    return {
        f"episode/{name}": float(np.mean([info[name] for info in said.values() if name in info]))
        for name in sorted(names)
    }


def episode_metrics(rows: Rows) -> dict[str, float]:
    """Per-episode figures of a training batch.

    A failed episode counts as not solved; it has no length and no return. What nobody said is not reported: without
    records there is no success and no validity.
    """
    steps = rows.steps
    index, played, failed = steps.trajectory, steps.n_trajectories, len(rows.failed)
    if played + failed == 0:
        return {}
    metrics = {"episode/count": float(played + failed), "episode/failed": float(failed)}
    for kind, number in sorted(Counter(map(failure_kind, rows.failed.values())).items()):
        metrics[f"{FAILED}{kind}"] = float(number)
    if "success" in steps.given:
        solved = np.bincount(index, weights=steps.success) > 0
        metrics["episode/success_rate"] = float(solved.sum() / (played + failed))
    if played:
        length = np.bincount(index)
        metrics |= {
            "episode/length/mean": float(length.mean()),
            "episode/length/max": float(length.max()),
            "episode/return/mean": float(np.bincount(index, weights=rows.reward_before_kl).mean()),
        }
    if played and "valid" in steps.given:
        metrics["episode/invalid_rate"] = float(1.0 - steps.valid.mean())
    return metrics


COUNTS = ("episode/count", "episode/failed", "episode/missing")


def combine(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several batches as those of one; those of one batch stay as they are.

    verl would weigh each batch by its rows, average counts, and take a name with "min" or "max" anywhere in it for an
    extreme. Standard deviations are averaged: those between the batches are not in them.
    """
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _combined(name, [part for part in parts if name in part]) for name in names}


def _combined(name: str, parts: Sequence[Mapping[str, float]]) -> float:
    values = [part[name] for part in parts]
    last = name.rsplit("/", 1)[-1]
    groups = last == "groups" or (last.endswith("_groups") and not last.startswith("share_"))
    if groups or name in COUNTS or name.startswith(FAILED):
        return float(sum(values))
    if name.endswith("/max"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    weights = [_weight(name, part) for part in parts]
    return float(np.average(values, weights=weights if any(weights) else None))


def _weight(name: str, part: Mapping[str, float]) -> float:
    """Of how many things the metric is a mean: groups, episodes, played episodes or steps."""
    groups = f"{name.removesuffix('_size/mean')}s"  # of credit/anchor_group_size/mean: credit/anchor_groups
    if name.endswith("_group_size/mean") and groups in part:
        return part[groups]
    count = part.get("episode/count", 0.0)
    if name == "episode/success_rate":
        return count
    played = count - part.get("episode/failed", 0.0)
    steps = played * part.get("episode/length/mean", 0.0)
    return steps if name.startswith("credit/") or name == "episode/invalid_rate" else played
