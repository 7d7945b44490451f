"""Which rows of a batch an optimizer step sees.

verl hands out a batch in the order in which its rollouts finished, and every rank cuts its part into mini-batches from
front to end: with a row per step the first would be the short episodes, which are the won or the lost ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shuffled(keys: Sequence[str], seed: Sequence[int]) -> list[int]:
    """An order of the rows: drawn by ``seed``, whatever the order in which they stand."""
    by_key = sorted(range(len(keys)), key=keys.__getitem__)
    return [by_key[i] for i in np.random.default_rng(seed).permutation(len(keys))]


def spread(idle: Sequence[bool], ranks: int) -> list[int]:
    """An order in which the idle rows of each rank, those without a token to train, stand evenly between its others.

    ``idle`` lists the ranks' parts, of equal length, one after the other; so does the result. The others keep their
    order. Of a rank with at least as many others as mini-batches, each mini-batch gets one.
    """
    order: list[int] = []
    share = len(idle) // ranks
    for start in range(0, len(idle), max(1, share)):
        part = range(start, min(start + share, len(idle)))
        resting = [i for i in part if idle[i]]
        others = iter([i for i in part if not idle[i]])
        at = {int((k + 0.5) * len(part) / len(resting)): i for k, i in enumerate(resting)}
        order += [at[place] if place in at else next(others) for place in range(len(part))]
    return order


def mini_batches(wanted: int, rows: int, trained: int, ranks: int) -> int:
    """How many mini-batches, at most ``wanted``, each have something to train; one without would have no mean loss.

    ``rows`` in all, ``trained`` of which are not idle, :func:`spread` over ``ranks``. Some rank has ``trained / ranks``
    of them, rounded up. The result divides a rank's rows.
    """
    most = max(1, min(wanted, -(-trained // ranks)))
    return next(number for number in range(most, 0, -1) if rows // ranks % number == 0)
