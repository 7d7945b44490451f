"""Metrics of several batches are those of one batch of all their episodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_turnkey.advantage import RecordError, make_record, make_step
from verl_turnkey.plugins.credit.metrics import combine, episode_metrics
from verl_turnkey.plugins.credit.rows import read_rows


def batch(lengths: list[int], solved: int, failed: int, groups: int, seed: int) -> tuple[dict[str, float], np.ndarray]:
    """What is logged of episodes of these lengths, and the credit of their steps."""
    credit = np.random.default_rng(seed).normal(size=sum(lengths))
    count = len(lengths) + failed
    metrics = {
        "episode/count": float(count),
        "episode/failed": float(failed),
        **({"episode/failed/timeout": float(failed)} if failed else {}),
        "episode/missing": float(seed),
        "episode/success_rate": solved / count,
        "episode/invalid_rate": 0.1 * seed,
        "credit/anchor_groups": float(groups),
        "credit/groups": 2.0,
    }
    if lengths:
        metrics |= {
            "episode/length/mean": float(np.mean(lengths)),
            "episode/length/max": float(max(lengths)),
            "episode/reward/terminal": solved / len(lengths),
            "credit/step/mean": float(credit.mean()),
            "credit/anchor_group_size/mean": len(credit) / groups,
            "credit/share_steps_in_anchor_groups": 0.5,
            "credit/level_1/share_steps_in_groups": 0.8,
            "credit/own_group_size/mean": 3.0,
        }
    return metrics, credit


def test_each_is_a_mean_of_what_it_counts():
    parts = [batch([5] * 8, 8, 0, 10, 1), batch([50] * 6, 0, 2, 20, 2), batch([], 0, 4, 0, 0)]
    found = combine([metrics for metrics, _ in parts])
    credit = np.concatenate([credit for _, credit in parts])
    assert found == pytest.approx(
        {
            "episode/count": 20,
            "episode/failed": 6,
            "episode/failed/timeout": 6,
            "episode/missing": 3,
            "episode/success_rate": 8 / 20,
            "episode/invalid_rate": (40 * 0.1 + 300 * 0.2) / 340,
            "episode/length/mean": 340 / 14,
            "episode/length/max": 50,
            "episode/reward/terminal": 8 / 14,
            "credit/anchor_groups": 30,
            "credit/groups": 6,
            "credit/anchor_group_size/mean": 340 / 30,
            "credit/step/mean": credit.mean(),
            "credit/share_steps_in_anchor_groups": 0.5,
            "credit/level_1/share_steps_in_groups": 0.8,
            "credit/own_group_size/mean": 3.0,
        }
    )


def test_one_batch_stays_as_it_is():
    metrics, _ = batch([3, 4], 1, 1, 2, 1)
    assert combine([metrics]) == pytest.approx(metrics)
    assert combine([]) == {}


def rows(*episodes: list[bool] | str, mask: int = 0):
    """A row per step that says whether the task is solved, or of an episode that failed, with this response mask."""
    keys, extra_fields, masks = [], [], []
    for session, episode in enumerate(episodes):
        if isinstance(episode, str):
            records = [make_record([], failed=episode)]
        else:
            records = [make_record([make_step(step=t, reward=0.0, success=s)]) for t, s in enumerate(episode)]
        for index, record in enumerate(records):
            keys.append(f"g_{session}_{index}")
            extra_fields.append({"turnkey": record})
            masks.append([mask if record["failed"] else 1])
    return read_rows(keys, [{}] * len(keys), extra_fields, torch.tensor(masks))


def test_a_failed_episode_counts_as_not_solved():
    metrics = episode_metrics(rows([False, True, True], [False, False], [False], "it died"))
    assert metrics["episode/success_rate"] == 1 / 4
    assert (metrics["episode/count"], metrics["episode/failed"]) == (4, 1)
    assert (metrics["episode/length/mean"], metrics["episode/length/max"]) == (2, 3)


def test_a_failed_episode_has_nothing_to_train():
    with pytest.raises(RecordError, match="g_1_0: a failed episode must be fully masked"):
        rows([True], "it died", mask=1)
