"""Assigns whole episodes to mini-batches at random, and their rows to ranks with about equal work.

In verl the rows of a batch are in the order in which the rollouts finished, and every rank cuts its share into
mini-batches of equal numbers of rows in that order. With a row per step the first mini-batches would hold the short
episodes, many of which have the same outcome. Here episodes are dealt to *parts*, one or several of which are a
mini-batch, and the rows of each part to the ranks. Padding rows bring every part to the same number of rows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

from verl_turnkey.plugins.actor.balance import even
from verl_turnkey.plugins.credit.row_turns import split_key


def parts(requested: Iterable[int], played: int) -> int:
    """Number of parts of a batch for roles that take ``requested`` mini-batches; each part has an episode to train.

    ``played``: number of episodes with a token to train. If it suffices, the number of parts is a multiple of each of
    ``requested``; else the number up to ``played`` that gives the roles the largest share of their requests.
    """
    requested = list(requested)
    every = math.lcm(*requested)
    if every <= played:
        return every
    shares = {number: sum(mini_batches(most, number) / most for most in requested) for number in range(1, played + 1)}
    return max(shares, key=lambda number: shares[number], default=1)


def mini_batches(requested: int, parts: int) -> int:
    """The largest number of mini-batches, at most ``requested``, that divides the number of parts."""
    return next(number for number in range(min(requested, parts), 0, -1) if parts % number == 0)


def deal(
    keys: Sequence[str], lengths: np.ndarray, trained: np.ndarray, roles: Iterable[int], seed: Sequence[int]
) -> list[np.ndarray]:
    """The rows of each part, drawn with ``seed``, independently of the order of the rows.

    Episodes are dealt from the one with most rows down, those with equal numbers in random order. Each goes to the part
    with the fewest rows so far, and among those with equal numbers to the one with the fewest tokens. Parts then differ
    by at most the rows of one episode, and have about equal numbers of tokens. The order of the parts is random.

    Args:
        keys: keys of the rows, B.
        lengths: (B,) tokens of each row, prompt included.
        trained: (B,) tokens to train in each row. Episodes without any are dealt last.
        roles: ``requested`` of :func:`parts`.
        seed: seed of the random generator.
    """
    rng = np.random.default_rng(seed)
    by_key = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    number_of: dict[str, int] = {}
    codes = np.array([number_of.setdefault(split_key(keys[int(i)])[1], len(number_of)) for i in by_key.tolist()])
    episode = np.empty(len(keys), dtype=np.int64)
    episode[by_key] = rng.permutation(len(number_of))[codes]
    size = np.bincount(episode)
    tokens, idle = np.bincount(episode, weights=lengths), np.bincount(episode, weights=trained) == 0
    number = parts(roles, int((~idle).sum()))
    of_episode = np.empty(len(size), dtype=np.int64)
    fewest = [(0, 0.0, part) for part in range(number)]
    order = np.lexsort((-size, idle))  # ties stay in the drawn order
    for i, rows, episode_tokens in zip(order.tolist(), size[order].tolist(), tokens[order].tolist(), strict=True):
        count, total, part = fewest[0]
        of_episode[i] = part
        heapq.heapreplace(fewest, (count + rows, total + episode_tokens, part))
    of_row = of_episode[episode]
    drawn = by_key[rng.permutation(len(keys))]
    return [drawn[of_row[drawn] == part] for part in rng.permutation(number)]


def rows_of_a_part(dealt: Sequence[np.ndarray], ranks: int, multiple: int) -> int:
    """Rows of each part per rank, including padding: a multiple of ``multiple``."""
    return max(math.ceil(len(part) / (ranks * multiple)) for part in dealt) * multiple


def lay_out(dealt: Sequence[np.ndarray], weights: np.ndarray, ranks: int, micro: int) -> np.ndarray:
    """The order of a batch's rows: by rank, then by part, then by micro-batch, with about equal work in each.

    Args:
        dealt: the rows of each part, in equal numbers, which are a multiple of ``ranks * micro``.
        weights: work of each row.
        ranks: number of data-parallel ranks.
        micro: rows of a micro-batch; 1 leaves the order of a rank's rows as it is.
    """
    of_rank: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for part in dealt:
        of_row = even(weights[part], ranks)
        for rank, rank_rows in enumerate(of_rank):
            own = part[of_row == rank]
            if micro > 1:
                own = own[even(weights[own], len(own) // micro).argsort(kind="stable")]
            rank_rows.append(own)
    return np.concatenate([rows for rank_rows in of_rank for rows in rank_rows])


def filled(dealt: Sequence[np.ndarray], rows: int, padding: Iterable[int]) -> list[np.ndarray]:
    """Each part, filled up with padding rows to ``rows`` rows."""
    unused = iter(padding)
    return [np.concatenate([part, [next(unused) for _ in range(rows - len(part))]]).astype(np.int64) for part in dealt]
