"""Where success was lost and what changed about then: curves whose answer is plain to see."""

from __future__ import annotations

import numpy as np
import pytest

from verl_turnkey.plugins.view.collapse import Curve, change_rows, changes, fall, formatted, split

STEPS = np.arange(1.0, 13.0)
SUCCESS = Curve(STEPS, np.array([0.3, 0.4, 0.4, 0.5, 0.4, 0.5, 0.4, 0.1, 0.0, 0.1, 0.0, 0.0]))


def jump(at: int, before: float, after: float, kind="size") -> Curve:
    return Curve(STEPS, np.where(at > STEPS, before, after) + 0.001 * (STEPS % 2), kind)


def test_a_fall_by_hand():
    drop = fall(SUCCESS)
    assert drop.best == pytest.approx((0.5 + 0.4 + 0.5) / 3)
    assert drop.best_at == 6
    assert drop.last == pytest.approx(0.1 / 3)
    assert drop.turn == 8  # where most was lost, though the mean of three steps is below half only from 9 on
    assert drop.steps == [9, 10, 11, 12]
    assert drop.within == (1, 11)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.5],
        [0.1, 0.15, 0.1, 0.0, 0.0, 0.0],  # never had much
        [0.5, 0.5, 0.5, 0.3, 0.3, 0.3],  # lost less than half
        [0.1, 0.2, 0.3, 0.4, 0.5],
    ],
)
def test_no_fall(values):
    assert fall(Curve(np.arange(len(values)), np.array(values, float))) is None


@pytest.mark.parametrize(("episodes", "width"), [(np.inf, 3), (100, 3), (5, 6), (1, None)])
def test_the_fewer_episodes_a_step_is_worth_the_more_steps_it_takes(episodes, width):
    drop = fall(Curve(np.arange(24), np.repeat([0.7, 0.1], 12), episodes=episodes))
    assert (drop and drop.width) == width


def test_a_lucky_step_is_not_the_best_level():
    value = np.tile([0.2, 0.45, 0.2, 0.2], 8)
    value[9] = 1.0
    assert fall(Curve(np.arange(32), value)) is not None
    assert fall(Curve(np.arange(32), value, episodes=8)) is None


@pytest.mark.parametrize(
    ("validation", "silent"),
    [
        ({}, False),
        ({5: 0.6, 9: 0.6}, True),
        ({5: 0.6, 9: 0.8}, True),
        ({5: 0.6, 8: 0.3, 9: 0.6}, True),  # three quarters on average
        ({5: 0.6, 8: 0.2, 9: 0.6}, False),
        ({0: 0.6, 9: 0.3}, False),
        ({9: 0.6}, False),  # nothing before
        ({5: 0.6}, False),  # nothing since
        ({7: 0.6, 9: 0.6}, False),  # after step 7 it plays the policy of step 8
    ],
)
def test_a_fall_during_which_validation_held(validation, silent):
    """Success is lost at step 8, and below half from step 9 on; what tells of it begins at step 1."""
    curve = Curve(np.array(list(validation), float), np.array(list(validation.values()), float))
    assert (fall(SUCCESS, curve) is None) == silent


def test_validation_long_before_a_fall_says_nothing_of_it():
    success = Curve(np.arange(1.0, 17), np.append(np.full(4, 0.4), SUCCESS.value))
    assert fall(success).within[0] == 5
    assert fall(success, Curve(np.array([3.0, 13]), np.full(2, 0.1))) is not None
    assert fall(success, Curve(np.array([4.0, 13]), np.full(2, 0.1))) is None


def test_validation_after_a_fall_that_was_made_good_says_nothing_of_it():
    success = Curve(np.arange(1.0, 13), np.repeat([0.6, 0.0, 0.6], 4))
    about = fall(success)
    assert (about.steps, about.back) == ([6, 7, 8, 9], 10)
    assert fall(success, Curve(np.array([3.0, 9, 12]), np.full(3, 0.6))) == about
    assert fall(success, Curve(np.array([3.0, 8, 12]), np.full(3, 0.6))) is None


def test_a_fall_that_was_made_good():
    """A real run of the quickstart with four times its learning rate: success in 12 steps of training."""
    values = [0.438, 0.359, 0.203, 0.266, 0.109, 0.375, 0.5, 0.641, 0.781, 0.719, 0.703, 0.719]
    assert fall(Curve(STEPS, np.array(values), episodes=8)) is None  # of its 8 groups a step, half may be luck
    drop = fall(Curve(STEPS, np.array(values)))
    assert (drop.best, drop.best_at) == (0.438, 1)
    assert drop.last == pytest.approx((0.203 + 0.266 + 0.109) / 3)
    assert (drop.turn, drop.steps, drop.back) == (3, [5], 6)
    kl = [0.014, 0.018, 0.082, 0.02, 0.001, 0.003, 0.003, 0.003, 0.002, 0.005, 0.002, 0.001]
    reported = changes({"KL": Curve(STEPS, np.array(kl), "peak", 0.02)}, drop)
    assert [(change.step, change.before, change.after) for change in reported] == [(3, 0.003, 0.082)]
    norm = [0.254, 0.351, 3.0, 0.377, 0.153, 0.325, 0.324, 0.228, 0.256, 0.536, 0.273, 0.414]
    assert changes({"norm": Curve(STEPS, np.array(norm), "peak")}, drop) == []  # nothing was usual yet
    assert changes({"KL": Curve(STEPS, np.array(kl), "peak", 0.03)}, drop) == []


@pytest.mark.parametrize("episodes", [8, 64])
def test_the_run_on_the_page(episodes):
    """The one in docs/view-collapse.png, with 8 groups of 8 episodes a step: solved in the first step only."""
    success = Curve(STEPS, np.array([31 / 64] + 11 * [0.0]), episodes=episodes)
    drop = fall(success, Curve(np.array([0.0, 12.0]), np.array([0.42, 0.0])))
    assert (drop.best, drop.best_at, drop.last, drop.turn) == (31 / 64, 1, 0.0, 3)
    assert (drop.steps, drop.width, drop.back) == (list(range(3, 13)), 3, None)


def test_what_was_usual_is_what_was_before():
    """After the peak the update stays large, which says nothing of what was usual."""
    norm = Curve(STEPS, np.array([1.0, 1, 1, 1, 1, 1, 50, 30, 30, 30, 30, 30]), "peak")
    assert [(change.step, change.before) for change in changes({"norm": norm}, fall(SUCCESS))] == [(7, 1.0)]


def test_of_two_falls_the_last_counts():
    drop = fall(Curve(np.arange(1.0, 15), np.array([0.5, 0.5, 0, 0, 0, 0.5, 0.5, 0.5, 0.6, 0, 0, 0, 0.6, 0.6])))
    assert (drop.steps, drop.back, drop.last) == ([11, 12, 13], 14, 0.0)


def test_steps_without_a_number_and_out_of_order():
    order = [11, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10]
    step, value = np.append(STEPS[order], [3.5, 99]), np.append(SUCCESS.value[order], [np.nan, np.inf])
    assert fall(Curve(step, value)) == fall(SUCCESS)


def test_what_changed_stands_in_the_order_in_which_it_did():
    curves = {
        "afterwards": jump(10, 10, 20),
        "at once": jump(8, 0.1, 0.9, "share"),
        "a cause": jump(6, 1.0, 0.1),
        "gentle": jump(8, 10, 12),
        "a few points": jump(8, 0.40, 0.45, "share"),
        "not logged": Curve(STEPS, np.full(12, np.nan)),
        "never moved": Curve(STEPS, np.zeros(12)),
    }
    drop = changes(curves, fall(SUCCESS))
    late = fall(Curve(np.arange(1.0, 17), np.append(np.full(4, 0.4), SUCCESS.value)))
    assert late.within[0] == 5
    assert changes({"long ago": jump(4, 10, 20)}, late) == []
    assert [(change.what, change.step) for change in drop] == [("a cause", 6), ("at once", 8), ("afterwards", 10)]
    assert (drop[1].before, drop[1].after) == pytest.approx((0.1, 0.9), abs=0.01)


def test_noise_is_no_change():
    value = np.array([1, 1, 1, 1, 4, 1, 5, 1, 6, 1, 7, 1.0])
    assert changes({"restless": Curve(STEPS, value)}, fall(SUCCESS)) == []


def test_a_peak_is_held_against_what_was_usual_before():
    def norm(at, size):
        return {"norm": Curve(STEPS, np.where(at == STEPS, size, 1.0), "peak")}

    [peak] = changes(norm(7, 9.0), fall(SUCCESS))
    assert (peak.step, peak.before, peak.after) == (7, 1.0, 9.0)
    assert changes(norm(7, 2.9), fall(SUCCESS)) == []
    [kl] = changes({"KL": Curve(STEPS, -norm(7, 9.0)["norm"].value / 100, "peak", 0.02)}, fall(SUCCESS))
    assert kl.after == 0.09  # of either sign
    healthy = {"KL": Curve(STEPS, norm(7, 9.0)["norm"].value / 1000, "peak", 0.02)}
    assert changes(healthy, fall(SUCCESS)) == []
    assert changes(norm(2, 9.0), fall(SUCCESS)) == []  # long before
    assert changes(norm(12, 9.0), fall(SUCCESS)) == []  # long after


def test_the_fall_stands_among_what_changed():
    about = fall(SUCCESS)
    curves = {"before": jump(6, 1, 9), "with": jump(8, 1, 9), "after": jump(10, 1, 9)}
    rows = change_rows(about, changes(curves, about))
    assert [(row["step"], row["what"], row["fall"]) for row in rows] == [
        (6, "before", False), (8, "success", True), (8, "with", False), (10, "after", False),
    ]  # fmt: skip
    assert (rows[1]["before"], rows[1]["after"]) == ("47 %", "3 %")


def test_two_levels_of_at_least_two_numbers():
    assert split(np.array([1.0, 1, 1, 5, 5])) == 3
    assert split(np.array([1.0, 5, 5, 5, 5])) == 2  # one number is no level
    assert split(np.array([1.0, 5, 5])) == 0
    assert (formatted(0.0, "share"), formatted(0.004, "share"), formatted(0.5, "share"), formatted(0.5, "size")) == (
        "0 %", "0.4 %", "50 %", "0.5",
    )  # fmt: skip
