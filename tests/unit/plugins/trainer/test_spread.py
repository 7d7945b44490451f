"""Which groups are kept, against RAGEN's numbers worked out by hand and a naive loop."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from verl_turnkey.plugins.trainer.outcomes import TOLERANCE, most_spread, spread

BY_HAND = {"a": [1, 0, 1, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 1], "d": [0, 0, 0, 0]}


def test_by_hand():
    spreads = {name: spread(scores) for name, scores in BY_HAND.items()}
    assert [round(value, 6) for value in spreads.values()] == [0.57735, 0.0, 0.5, 0.0]
    assert most_spread(spreads, 0.25, "groups") == ["a"]
    assert most_spread(spreads, 0.5, "groups") == ["a", "c"]
    assert most_spread(spreads, 0.9, "spread") == ["a", "c"]  # up to 0.959615
    assert most_spread(spreads, 0.5, "spread") == ["a"]
    assert most_spread(spreads, 1.0, "spread") == ["a", "c", "b", "d"]


def naive(spreads: dict[str, float], share: float, by: str) -> list[str]:
    left, kept = dict(spreads), []
    while left:
        best = min(name for name in left if left[name] == max(left.values()))
        enough = len(kept) + 1 > share * len(spreads) + 1e-9
        if by == "spread":
            enough = sum(spreads[name] for name in kept) >= share * sum(spreads.values()) - TOLERANCE
        if kept and enough:
            break
        left.pop(best)
        kept.append(best)
    return kept


@pytest.mark.parametrize("by", ["groups", "spread"])
@pytest.mark.parametrize("seed", range(20))
def test_like_a_loop(by, seed):
    rng = np.random.default_rng(seed)
    scores = {f"g{i}": rng.integers(0, 3, rng.integers(1, 6)).tolist() for i in range(rng.integers(1, 30))}
    spreads = {name: spread(held) for name, held in scores.items()}
    for name, held in scores.items():
        assert spreads[name] == pytest.approx(statistics.stdev(held) if len(held) > 1 else 0.0)
    share = float(rng.uniform(0.05, 0.95))
    assert most_spread(spreads, share, by) == naive(spreads, share, by)


def test_edges():
    assert spread([0.1] * 3) == 0.0  # no remainder of a mean in floating point
    assert most_spread({f"{i:03}": float(i) for i in range(100)}, 0.29, "groups")[-1] == "071"
    for by in ("groups", "spread"):
        assert most_spread({"b": 0.0, "a": 0.0}, 0.2, by) == ["a"]
