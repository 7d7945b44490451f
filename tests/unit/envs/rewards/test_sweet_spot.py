"""Sweet spot learning: zones of closeness, their values, and what they are taken from."""

from __future__ import annotations

import pytest

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.envs.rewards import RewardError, RewardStep, compose
from verl_turnkey.envs.rewards.sweet_spot import tier


@pytest.mark.parametrize(
    ("closeness", "expected"),
    [(0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.74, 2), (0.75, 3), (1.0, 3)],
)
def test_four_zones_of_equal_width(closeness, expected):
    assert tier(closeness, [0, 1, 2, 3]) == expected


def episode(*close):
    return [RewardStep("", "a", next_extra={"closeness": value}) for value in close]


def reward(*close, **options):
    return compose([{"name": "sweet_spot", **options}])(episode(*close)).rewards


def test_the_component():
    assert reward(0.2, 0.9) == pytest.approx([0, 2 / 3]), "the mean, 0.55, is in the third of four zones"
    assert reward(0.2, 0.9, aggregate="max") == [0, 1]
    assert reward(0.9, 0.2, aggregate="last") == [0, 0]
    assert reward(0.6, tiers=[0, 0.1, 0.3, 1], weight=0.5) == pytest.approx([0.15])
    assert reward(0.6, zones=2) == [1]


def test_beside_the_outcome_a_near_miss_is_better_than_a_far_one():
    both = compose([{"name": "outcome"}, {"name": "sweet_spot", "weight": 0.5}])
    far, near = (sum(both(episode(value)).rewards) for value in (0.1, 0.8))
    won = sum(both([RewardStep("", "a", success=True, next_extra={"closeness": 1})]).rewards)
    assert (far, near, won) == (0.0, 0.5, 1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zones": 1}, r"zones: expected an integer >= 2"),
        ({"tiers": [0, 1]}, r"tiers: expected one value for each of the 4 zones"),
        ({"tiers": [0, 1, 0.5, 2]}, r"tiers: expected finite numbers that do not fall"),
        ({"aggregate": "median"}, r"aggregate: expected one of"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        reward(0.5, **options)


def test_a_turn_without_an_action_before_anything_was_done_is_not_close():
    """Its episode counts: losing the bad beginnings would bias what is learned."""
    silent, scored = {}, {"closeness": 0.25}
    [first, second] = [RewardStep("", None, valid=False, extra=e, next_extra=e) for e in (silent, scored)]
    last = episode(0.75)
    assert compose([{"name": "sweet_spot", "zones": 2}])([first, *last]).rewards == [0, 0], "the mean of 0 and 0.75"
    assert compose([{"name": "sweet_spot", "zones": 2}])([second, *last]).rewards == [0, 1], "of 0.25 and 0.75"


@pytest.mark.parametrize("close", [None, 1.2, -0.1, float("nan")])
def test_what_is_no_closeness(close):
    with pytest.raises(RewardError, match=r"after step 0: expected .*closeness"):
        reward(close)
