"""Selects the groups for a page of limited size: the most informative ones that fit.

Building a group's blocks is slow, so they are built in that order, and only until the page is full.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from verl_turnkey.plugins.view.join import Run, flag
from verl_turnkey.plugins.view.reading import parts

BATCH = 8
"""fewest groups that are built before their sizes are checked"""

Built = dict[int, tuple[bytes, ...]]


def chosen(
    ordered: Sequence[int], weights: np.ndarray, left: float, build: Callable[[set[int]], Built]
) -> tuple[Built, int, float]:
    """Group -> blocks, for the groups that fit, in order; the number of groups without blocks; and the bytes left.

    The number of groups to build is estimated from ``weights``; too low an estimate is followed by another batch.
    """
    kept: Built = {}
    without, done, ratio = 0, 0, math.inf  # bytes per weight, which the first batch measures
    while done < len(ordered) and left > 0:
        sizes = np.cumsum(weights[ordered[done:]]) * ratio
        some = ordered[done : done + max(BATCH, int(np.searchsorted(sizes, left)) + 1)]
        built = build(set(some))
        fitting, left = _fitting({g: built[g] for g in some if g in built}, left)
        kept |= {g: built[g] for g in some if g in fitting}
        without, done = without + len(some) - len(built), done + len(some)
        if built and not fitting:
            break
        actual = sum(on_page(len(block)) for several in built.values() for block in several)
        ratio = actual / weights[some].sum() or ratio
    return kept, without, left


def order(run: Run, group: np.ndarray, count: int) -> list[int]:
    """Groups, most informative first: one of each step, then the others; within both, newest steps first.

    Groups with mixed outcomes or failures come before the rest; the order of equal groups is random.
    """
    drawn = list(range(count))
    random.Random(0).shuffle(drawn)
    won, failed = flag(run.episodes["success"]), run.episodes["failed"].notna().to_numpy()
    members = np.bincount(group, minlength=count)
    wins, bad = (np.bincount(group, weights=flags, minlength=count) for flags in (won, failed))
    telling = ((wins > 0) & (wins < members)) | (bad > 0)
    step = run.episodes["global_step"].fillna(-1).groupby(group).max().to_numpy()
    best = sorted(drawn, key=lambda g: (not telling[g], -step[g]))
    first = set({step[g]: g for g in reversed(best)}.values())
    return sorted(best, key=lambda g: g not in first)


def _fitting(blocks: Mapping[int, Sequence[bytes]], left: float) -> tuple[set[int], float]:
    """The groups whose blocks all fit into the bytes that earlier groups leave; and the bytes left at the end."""
    chosen = set()
    for g, several in blocks.items():
        if (need := sum(on_page(len(block)) for block in several)) <= left:
            chosen.add(g)
            left -= need
    return chosen, left


def turns_of(run: Run, group: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(group[run.turns["at"].to_numpy()], minlength=count).astype(float)


def weights_of(run: Run, group: np.ndarray, count: int) -> np.ndarray:
    """Bytes of each group's texts on disk, estimated from its share of a step's turns; 0 if a step has no texts."""
    on_disk: dict[int, int] = defaultdict(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading the log has warned already
        for part in parts(run.folder, "texts"):
            on_disk[part.step] += part.path.stat().st_size
    at = run.turns["at"].to_numpy()
    step = run.episodes["step"].to_numpy()[at]
    known, place, turns = np.unique(step, return_inverse=True, return_counts=True)
    of_turn = np.array([on_disk[int(s)] for s in known]) / turns
    return np.bincount(group[at], weights=of_turn[place], minlength=count)


def on_page(size: int) -> int:
    return (size + 2) // 3 * 4 + 60  # base64 and its element
