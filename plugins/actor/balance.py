"""Bins with equal numbers of rows and about equal work."""

from __future__ import annotations

import heapq

import numpy as np


def even(weights: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each item: bins with equal numbers of items and about equal sums of ``weights``.

    ``bins`` divides the number of items. From the heaviest item down, each goes to the lightest bin that has room.
    """
    room = len(weights) // bins
    bin_of = np.zeros(len(weights), dtype=np.int64)
    order = np.argsort(-weights, kind="stable")
    lightest = [(0.0, number, room) for number in range(bins)]
    for i, weight in zip(order.tolist(), weights[order].tolist(), strict=True):
        total, number, left = lightest[0]
        bin_of[i] = number
        if left > 1:
            heapq.heapreplace(lightest, (total + weight, number, left - 1))
        else:
            heapq.heappop(lightest)
    return bin_of
