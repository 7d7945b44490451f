"""Rows are dealt to mini-batches by a draw, and each mini-batch has something to train."""

from __future__ import annotations

import numpy as np
import pytest

from verl_turnkey.plugins.trainer.dealing import mini_batches, shuffled, spread


def test_rows_are_shuffled_by_the_seed_whatever_the_order_in_which_they_came():
    keys = [f"group{i}_0_0" for i in range(50)]
    backwards = keys[::-1]
    drawn = [keys[i] for i in shuffled(keys, (3, 0))]
    assert sorted(drawn) == sorted(keys)
    assert [backwards[i] for i in shuffled(backwards, (3, 0))] == drawn
    others = {tuple(keys[i] for i in shuffled(keys, seed)) for seed in ((3, 1), (4, 0), (0, 3))}
    assert len(others | {tuple(drawn), tuple(sorted(keys)), tuple(keys)}) == 6
    assert shuffled([], (1, 0)) == []


def test_idle_rows_are_spread_over_the_mini_batches():
    """150 of 1440 rows on 8 ranks in 20 mini-batches, as verl leaves them: at the end of each rank's part."""
    ranks, share, number = 8, 180, 20
    padded = [19] * 6 + [18] * 2
    idle = [i >= share - padded[rank] for rank in range(ranks) for i in range(share)]
    order = spread(idle, ranks)
    assert sorted(order) == list(range(ranks * share))
    for rank in range(ranks):
        part = order[rank * share : (rank + 1) * share]
        assert {i // share for i in part} == {rank}
        for k in range(number):
            assert sum(idle[i] for i in part[k * 9 : (k + 1) * 9]) <= 1
    others = [i for i in order if not idle[i]]
    assert others == sorted(others), "the others keep their order"
    assert spread([], 2) == []


@pytest.mark.parametrize("seed", range(40))
def test_no_mini_batch_is_without_a_row_to_train(seed):
    rng = np.random.default_rng(seed)
    ranks, wanted = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    share = wanted * int(rng.integers(1, 6))
    trained = int(rng.integers(1, ranks * share + 1))
    idle = rng.permutation([False] * trained + [True] * (ranks * share - trained)).tolist()
    number = mini_batches(wanted, ranks * share, trained, ranks)
    assert 1 <= number <= wanted
    assert share % number == 0
    order = spread(idle, ranks)
    size = share // number
    for k in range(number):
        rows = [order[rank * share + k * size + i] for rank in range(ranks) for i in range(size)]
        assert not all(idle[row] for row in rows)
    if trained > ranks * (wanted - 1):
        assert number == wanted


@pytest.mark.parametrize(
    ("wanted", "rows", "trained", "ranks", "number"),
    [
        (4, 8, 7, 2, 4),
        (4, 8, 6, 2, 2),  # three would not divide the four rows of a rank
        (4, 24, 5, 2, 3),
        (4, 8, 2, 2, 1),
        (4, 8, 0, 2, 1),
        (1, 8, 8, 8, 1),
    ],
)
def test_fewer_mini_batches_for_few_rows(wanted, rows, trained, ranks, number):
    assert mini_batches(wanted, rows, trained, ranks) == number
