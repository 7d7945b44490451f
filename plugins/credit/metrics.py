"""Metrics of the episodes of a training step. verl's own are means over rows: episodes with more rows weigh more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.log.schema import COMPONENT
from verl_turnkey.plugins.notices import failure_kind, warn_once

BREAK = "turnkey_break"
"""extra field of a row: why it does not extend the row before it"""
CACHED = "turnkey_cached"
"""extra field of a row: for each turn the share of its prompt that the server had cached, if the server reports it"""
OBSERVED = "turnkey_observed"
"""extra field of a row: for each turn the spans of tokens that are what the environment said before it, (first, end)
each, counted from the turn's first token, so that both are negative"""
LEARNED = "turnkey_observation"
"""column of the queue: (B, L) nested, 1 / N on the N tokens of a batch's observations that are learned, else 0"""
BREAKS = "rows/break/"
"""prefix of the counts of rows by ``turnkey_break``"""
BRANCHING = "branching/"
"""prefix of what a rollout says of its branches, in verl's ``reward_extra_info`` and as metrics"""
AGENT = "turnkey_agent"
"""extra field of a row: counts of an agent's calls in its episode; the metrics ``agent/<name>`` are their means"""
OF_EPISODES = ("episode/", "rows/", "credit/", BRANCHING, "agent/", "importance/")
"""prefixes of the metrics of this module, of the methods and of importance weights"""
FAILED = "episode/failed/"
"""prefix of the counts of failed episodes by kind"""


def reward_metrics(rows: Rows, keys: Sequence[str], extra_fields: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the played episodes: the sum of each reward component, ``unparsed_rate``, and of branches."""
    reward_info: dict[str, Mapping[str, Any]] = {}
    for row in rows.row[rows.branch == 0].tolist():
        reward_info.setdefault(split_key(keys[int(row)])[1], extra_fields[row].get("reward_extra_info") or {})
    names = {
        name
        for info in reward_info.values()
        for name in info
        if name.startswith((COMPONENT, BRANCHING)) or name == "unparsed_rate"
    }
    means = {
        name: float(np.mean([info[name] for info in reward_info.values() if name in info])) for name in sorted(names)
    }
    return {_metric_name(name): mean for name, mean in means.items()}


def agent_metrics(rows: Rows, keys: Sequence[str], extra_fields: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the played episodes of the counts in :data:`AGENT`; empty where no agent of the user's own plays."""
    counts: dict[str, Mapping[str, float]] = {}
    for row in rows.row.tolist():
        if AGENT in extra_fields[row]:
            counts.setdefault(split_key(keys[int(row)])[1], extra_fields[row][AGENT])
    names = sorted({name for count in counts.values() for name in count})
    return {f"agent/{name}": float(np.mean([count.get(name, 0.0) for count in counts.values()])) for name in names}


def _metric_name(name: str) -> str:
    if name.startswith(BRANCHING):
        return name
    return f"episode/{name}/mean" if name.startswith(COMPONENT) else f"episode/{name}"


def warn_of_branches(metrics: Mapping[str, float]) -> None:
    """Say it where all branches of a batch failed: estimates by branches are then without any, and credit is 0."""
    failed, *ended = (metrics.get(f"{BRANCHING}{name}", 0.0) for name in ("failed", "trained", "measured"))
    if failed and not any(ended):
        warn_once(
            "all branches of a batch failed (branching/failed), so that turnkey.rollout.strategy gave its method "
            "nothing; the agent-loop workers name the reasons"
        )


def episode_metrics(rows: Rows) -> dict[str, float]:
    """Per-episode figures of a training batch.

    A failed episode counts as not solved; it has no length and no return. Without records success and validity are
    unknown and not reported. Of a rollout that forked its first trajectory counts alone: branches begin late.
    """
    steps, first = rows.steps, rows.branch == 0
    names, index = np.unique(steps.trajectory[first], return_inverse=True)
    played, failed = len(names), len(rows.failed)
    if played + failed == 0:
        return {}
    metrics = {"episode/count": float(played + failed), "episode/failed": float(failed)}
    for kind, number in sorted(Counter(map(failure_kind, rows.failed.values())).items()):
        metrics[f"{FAILED}{kind}"] = float(number)
    if "success" in steps.given:
        solved = np.bincount(index, weights=steps.success[first]) > 0
        metrics["episode/success_rate"] = float(solved.sum() / (played + failed))
    if played:
        length = np.bincount(index)
        metrics |= {
            "episode/length/mean": float(length.mean()),
            "episode/length/max": float(length.max()),
            "episode/composed_return/mean": float(np.bincount(index, weights=rows.reward_before_kl[first]).mean()),
        }
    if played and rows.reward is not None:
        metrics["episode/env_return/mean"] = float(np.bincount(index, weights=rows.reward[first]).mean())
    if played and "valid" in steps.given:
        metrics["episode/invalid_rate"] = float(1.0 - steps.valid[first].mean())
    return metrics


def row_metrics(
    rows: Rows, tags: Sequence[Mapping[str, Any]], extra_fields: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Metrics of the rows of played episodes. ``trained`` tokens are the model's, ``masked`` ones all others."""
    held = np.unique(rows.row).tolist()
    if not held:
        return {}
    reasons = Counter(str(why) for row in held if (why := extra_fields[row].get(BREAK)) not in (None, "first"))
    trained = float(rows.steps.tokens.sum())
    cached = [share for row in held for share in extra_fields[row].get(CACHED) or ()]
    first = rows.steps.first_rows
    begins = rows.row[first[rows.branch[first] > 0]].tolist()  # rows of trained branches that begin at their fork
    forked = [share for row in begins for share in (extra_fields[row].get(CACHED) or ())[:1]]
    return {
        "rows/per_episode": len(held) / len(np.unique(rows.steps.trajectory[rows.branch == 0])),
        "rows/trained_tokens": trained,
        "rows/masked_tokens": sum(tags[row]["seq_len"] for row in held) - trained,
        **({"rows/cached_prompt_share": float(np.mean(cached))} if cached else {}),
        **({f"{BRANCHING}cached_prompt_share": float(np.mean(forked))} if forked else {}),
        **{f"{BREAKS}{why}": float(number) for why, number in sorted(reasons.items())},
    }


COUNTS = ("episode/count", "episode/failed", "episode/missing", "rows/trained_tokens", "rows/masked_tokens")


def combine(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several batches into those of one; those of a single batch are returned unchanged.

    verl would weight each batch by its rows, average counts, and treat every name that contains "min" or "max" as an
    extreme. Standard deviations are averaged, which leaves out the deviation between batches.
    """
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _combined(name, [part for part in parts if name in part]) for name in names}


def _combined(name: str, parts: Sequence[Mapping[str, float]]) -> float:
    values = [part[name] for part in parts]
    last = name.rsplit("/", 1)[-1]
    groups = last == "groups" or (last.endswith("_groups") and not last.startswith("share_"))
    if groups or name in COUNTS or name.startswith((FAILED, BREAKS)):
        return float(sum(values))
    if name.endswith("/max"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    weights = [_weight(name, part) for part in parts]
    return float(np.average(values, weights=weights if any(weights) else None))


def _weight(name: str, part: Mapping[str, float]) -> float:
    """The number of groups, episodes, played episodes or steps that the metric is a mean over."""
    groups = f"{name.removesuffix('_size/mean')}s"  # of credit/anchor_group_size/mean: credit/anchor_groups
    if name.endswith("_group_size/mean") and groups in part:
        return part[groups]
    count = part.get("episode/count", 0.0)
    if name == "episode/success_rate":
        return count
    played = count - part.get("episode/failed", 0.0)
    steps = played * part.get("episode/length/mean", 0.0)
    if name == "episode/decisions/density":
        return steps * part.get("episode/decisions/covered", 0.0)
    of_steps = name.startswith("credit/") or name in ("episode/invalid_rate", "episode/decisions/covered")
    return steps if of_steps else played
