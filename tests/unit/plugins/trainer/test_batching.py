"""Whole episodes are dealt to optimizer steps by a draw, and their rows to ranks, equally many and of equal weight."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.plugins.actor.update_order import even
from verl_turnkey.plugins.trainer.batching import deal, filled, lay_out, mini_batches, parts, rows_of_a_part

episodes = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=30)
"""rows of each, and whether it has a token to train"""


def rows_of(episodes, seed=0):
    rng = np.random.default_rng(seed)
    keys = [f"task_{e // 3}_{e}_{i}" for e, (rows, _) in enumerate(episodes) for i in range(rows)]
    alive = np.array([alive for rows, alive in episodes for _ in range(rows)])
    lengths = rng.integers(10, 2000, size=len(keys))
    return keys, lengths, np.where(alive, rng.integers(1, 10, size=len(keys)), 0)


def episode_of(key):
    return key.rsplit("_", 1)[0]


@settings(max_examples=200, deadline=None)
@given(
    episodes,
    st.lists(st.integers(1, 5), max_size=2),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 99),
)
def test_a_batch_as_verl_cuts_it(episodes, roles, ranks, micro, seed):
    """Each rank's rows front to back into equally many for each mini-batch of each role."""
    keys, lengths, trained = rows_of(episodes, seed)
    dealt = deal(keys, lengths, trained, roles, (seed, 0))
    share = rows_of_a_part(dealt, ranks, micro)
    size = len(dealt) * ranks * share
    full = filled(dealt, ranks * share, range(len(keys), size))
    weights = np.append(lengths, np.full(size - len(keys), 128)).astype(float)
    order = lay_out(full, weights, ranks, micro)
    assert sorted(order.tolist()) == list(range(size)), "every row once"

    longest = max(rows for rows, _ in episodes)
    assert size - len(keys) < len(dealt) * (longest + ranks * micro), "few of padding"

    alive = sum(alive for _, alive in episodes)
    numbers = [mini_batches(wanted, len(dealt)) for wanted in roles]
    if alive >= math.lcm(*roles):
        assert numbers == roles
    by_rank = order.reshape(ranks, -1)
    for number in numbers:
        assert by_rank.shape[1] % (number * micro) == 0, "whole micro-batches"
        cut = by_rank.reshape(ranks, number, -1).transpose(1, 0, 2).reshape(number, -1)
        of_episode: dict[str, set[int]] = {}
        for step, rows in enumerate(cut.tolist()):
            for row in rows:
                if row < len(keys):
                    of_episode.setdefault(episode_of(keys[row]), set()).add(step)
            assert not alive or any(row < len(keys) and trained[row] for row in rows), "something to train"
        assert all(len(steps) == 1 for steps in of_episode.values()), "an episode is never in two mini-batches"


@settings(max_examples=60, deadline=None)
@given(episodes, st.integers(1, 4), st.integers(0, 99))
def test_parts_are_drawn_by_the_seed_whatever_the_order_in_which_rows_stand(episodes, number, seed):
    keys, lengths, trained = rows_of(episodes)
    turned = np.random.default_rng(seed).permutation(len(keys))
    first = deal(keys, lengths, trained, [number], (seed, 1))
    again = deal([keys[i] for i in turned], lengths[turned], trained[turned], [number], (seed, 1))
    assert [part.tolist() for part in first] == [turned[part].tolist() for part in again]


def test_other_seeds_deal_other_episodes():
    keys, lengths, trained = rows_of([(2, True)] * 40)
    dealt = {
        tuple(sorted(keys[i] for i in deal(keys, lengths, trained, [2], seed)[0])) for seed in ((3, 0), (3, 1), (4, 0))
    }
    assert len(dealt) == 3


def test_each_episode_is_as_likely_in_any_optimizer_step():
    """Short ones, which finish first and may be the won ones, too."""
    keys, lengths, trained = rows_of([(1, True)] * 6 + [(9, True)] + [(4, True)] * 5)
    first: Counter[str] = Counter()
    for seed in range(400):
        first.update({episode_of(keys[i]) for i in deal(keys, lengths, trained, [2], (seed, 0))[0]})
    assert len(first) == 12
    assert all(140 < count < 260 for count in first.values())  # six standard deviations of 10


@pytest.mark.parametrize(
    ("roles", "played", "partition"),
    [
        ([4], 100, 4),
        ([4, 2], 100, 4),  # a mini-batch of the second has two parts
        ([4, 6], 12, 12),
        ([4, 6], 11, 6),  # too few for both: 3 of 4 and all 6
        ([8, 4], 7, 4),
        ([8, 4], 5, 4),
        ([16, 4], 15, 12),
        ([4], 3, 3),
        ([4], 0, 1),
        ([], 100, 1),
    ],
)
def test_parts_serve_every_role_where_the_episodes_suffice(roles, played, partition):
    assert parts(roles, played) == partition


@pytest.mark.parametrize(("wanted", "of", "number"), [(4, 12, 4), (4, 6, 3), (4, 3, 3), (4, 1, 1), (5, 7, 1)])
def test_a_mini_batch_has_whole_parts(wanted, of, number):
    assert mini_batches(wanted, of) == number


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 6))
def test_bins_hold_equally_many_and_no_bin_much_more_than_another(weights, bins):
    weights = np.array(weights + [1] * (-len(weights) % bins), dtype=float)
    assigned = even(weights, bins)
    assert set(np.bincount(assigned, minlength=bins).tolist()) == {len(weights) // bins}
    total = np.bincount(assigned, weights=weights)
    # Dealt round by round in the order of weight, whatever the round's order, they would differ by no more.
    assert total.max() - total.min() <= weights.max()


def test_the_ranks_of_a_large_mini_batch_are_within_a_percent():
    rng = np.random.default_rng(0)
    for weights in (rng.uniform(200, 1500, 512), 200 + rng.exponential(2000, 512)):
        total = np.bincount(even(weights, 8), weights=weights)
        assert total.max() < 1.01 * total.mean()


def test_micro_batches_of_a_rank_have_equal_weight():
    weights = np.array([100.0, 100, 1, 1, 50, 50, 51, 51])
    order = lay_out([np.arange(8)], weights, ranks=2, micro=2)
    assert sorted(weights[order].reshape(4, 2).sum(1).tolist()) == [101] * 4
