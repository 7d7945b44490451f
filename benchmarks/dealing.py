"""How long dealing a batch to ranks and mini-batches takes, and how even and fair it is, compared with verl's own.

    python benchmarks/dealing.py

verl's own balances the ranks over all rows of a batch (Karmarkar-Karp) and cuts each rank's rows into mini-batches in
the order in which their episodes finished. ``ranks``: tokens of the largest rank over the mean of the ranks, in the
worst mini-batch. ``advantage``: lowest and highest mean per token of a mini-batch, where the shorter half of the
episodes has +1 and the longer half -1. ``cut``: share of the episodes that are in several mini-batches.
"""

from __future__ import annotations

import os
import time

os.environ.update(TURNKEY_DEVICE="cpu", VERL_LOGGING_LEVEL="ERROR")

import numpy as np
import torch
import typer
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_turnkey.plugins.trainer import batching

PADDING = 128  # tokens of verl's padding rows


Batch = tuple[list[str], np.ndarray, np.ndarray]
"""keys, lengths and advantages of the rows"""


def episodes(layout: str, rows: int, seed: int = 0) -> Batch:
    """Episodes of 1 to 50 turns, the shortest first, as they finish."""
    rng = np.random.default_rng(seed)
    turns = np.sort(rng.integers(1, 51, size=rows))
    keys: list[str] = []
    lengths: list[int] = []
    advantage: list[float] = []
    for episode, number in enumerate(turns[:: 1 if layout == "merged" else 25].tolist()):
        of_rows = [300 + 150 * number] if layout == "merged" else (400 + 20 * np.arange(number)).tolist()
        keys += [f"{episode % 997:032x}_{episode}_{index}" for index in range(len(of_rows))]
        lengths += of_rows
        advantage += [1.0 if number <= 25 else -1.0] * len(of_rows)
    return keys[:rows], np.array(lengths[:rows]), np.array(advantage[:rows])


def show(name: str, seconds: float, order: np.ndarray, batch: Batch, ranks: int, number: int) -> None:
    keys, lengths, advantage = batch
    cut = order.reshape(ranks, number, -1)
    tokens = np.append(lengths, np.full(order.size - len(lengths), PADDING))
    trained = np.append(lengths, np.zeros(order.size - len(lengths)))
    of_rank = tokens[cut].sum(2)
    weighed = np.append(advantage * lengths, np.zeros(order.size - len(lengths)))
    means = weighed[cut].sum((0, 2)) / trained[cut].sum((0, 2))
    steps_of: dict[str, set[int]] = {}
    for step in range(number):
        for row in cut[:, step].reshape(-1).tolist():
            if row < len(keys):
                steps_of.setdefault(keys[row].rpartition("_")[0], set()).add(step)
    several = sum(len(steps) > 1 for steps in steps_of.values()) / len(steps_of)
    print(
        f"  {name:5} {seconds:6.2f} s   padding {1 - len(keys) / order.size:.4f}   "
        f"ranks {(of_rank / of_rank.mean(0)).max():.4f}   advantage {means.min():+.3f} to {means.max():+.3f}   "
        f"cut {several:.2f}",
        flush=True,
    )


def main(rows: int = 98304, ranks: int = 8, number: int = 4) -> None:
    for layout in ("steps", "merged"):
        keys, lengths, advantage = episodes(layout, rows)
        rows_here = len(keys) // (ranks * number) * ranks * number  # verl pads; here whole mini-batches are enough
        keys, lengths, advantage = keys[:rows_here], lengths[:rows_here], advantage[:rows_here]
        batch = (keys, lengths, advantage)
        print(f"{layout}: {len(keys)} rows on {ranks} ranks in {number} mini-batches")
        started = time.perf_counter()
        dealt = batching.deal(keys, lengths, lengths, [number], (1, 0))
        share = batching.rows_of_a_part(dealt, ranks, 1)
        size = number * ranks * share
        full = batching.filled(dealt, ranks * share, range(len(keys), size))
        tokens = np.append(lengths, np.full(size - len(keys), PADDING))
        order = batching.lay_out(full, calculate_workload(torch.from_numpy(tokens)).numpy(), ranks, 1)
        show("ours", time.perf_counter() - started, order, batch, ranks, number)
        started = time.perf_counter()
        workload = calculate_workload(torch.from_numpy(lengths))
        parts = get_seqlen_balanced_partitions(workload, k_partitions=ranks, equal_size=True)
        order = np.array([row for part in parts for row in part])
        show("verl", time.perf_counter() - started, order, batch, ranks, number)


if __name__ == "__main__":
    typer.run(main)
