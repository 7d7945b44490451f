"""Accuracy, AUC and calibration of scores: against pairs, loops and the check values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from verl_turnkey.plugins.eval.prm import calibration, evaluate, measure

ORACLE = Path(__file__).parents[3] / "data" / "oracle" / "learned_check_values.json"
CHECK_VALUES = json.loads(ORACLE.read_text())


def naive_auc(scores, labels):
    """The share of pairs of a positive and a negative in which the positive has the higher score, ties half."""
    pairs = [
        (a, b) for a, x in zip(scores, labels, strict=True) for b, y in zip(scores, labels, strict=True) if x > 0.5 >= y
    ]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs) if pairs else math.nan


def naive_calibration_error(scores, labels):
    total = 0.0
    for low in range(10):
        members = [(s, y) for s, y in zip(scores, labels, strict=True) if min(int(s * 10), 9) == low]
        if members:
            gap = sum(s for s, _ in members) / len(members) - sum(y for _, y in members) / len(members)
            total += len(members) / len(scores) * abs(gap)
    return total


@pytest.mark.parametrize("seed", range(6))
def test_measures_are_those_of_the_twins(seed: int):
    rng = np.random.default_rng(seed)
    scores, labels = rng.integers(0, 11, 60) / 10, rng.integers(0, 5, 60) / 4
    values = measure(scores, labels)
    assert values["auc"] == pytest.approx(naive_auc(scores, labels))
    assert values["calibration_error"] == pytest.approx(naive_calibration_error(scores, labels))
    assert values["accuracy"] == np.mean([(s > 0.5) == (y > 0.5) for s, y in zip(scores, labels, strict=True)])
    assert values["squared_error"] == pytest.approx(
        np.mean([(s - y) ** 2 for s, y in zip(scores, labels, strict=True)])
    )


def test_a_weight_is_a_number_of_copies():
    rng = np.random.default_rng(0)
    scores, labels, copies = rng.random(30), rng.random(30), rng.integers(0, 4, 30)
    repeated = measure(np.repeat(scores, copies), np.repeat(labels, copies))
    assert measure(scores, labels, copies) == pytest.approx(repeated)


def test_the_cross_entropy_is_gui_shepherds():
    values = CHECK_VALUES["gui_shepherd"]
    positive = [1.0 - label for label in values["label"]]
    measured = measure(values["p(positive)"], positive)
    assert measured["cross_entropy"] == pytest.approx(values["loss"], abs=1e-7)
    decisions = [1 if p > 0.5 else -1 for p in values["p(positive)"]]
    assert decisions == values["reward +1/-1"]
    assert measured["accuracy"] == np.mean([(d > 0) == (y > 0.5) for d, y in zip(decisions, positive, strict=True)])


def test_intervals_are_over_tasks():
    """A task's turns are one observation: ten copies of each turn leave the interval as it is."""
    rng = np.random.default_rng(1)
    labels = np.repeat(rng.integers(0, 2, 20), 3).astype(float)
    scores = np.clip(labels * 0.4 + rng.random(60) * 0.6, 0, 1)
    tasks = [str(i // 3) for i in range(60)]
    once = evaluate(scores, labels, tasks)
    often = evaluate(np.tile(scores, 10), np.tile(labels, 10), tasks * 10)
    for name, (value, low, high) in once.items():
        assert low <= value <= high or name == "calibration_error"  # the bootstrap's is biased upwards
        assert often[name] == pytest.approx((value, low, high))
    other = evaluate(scores, labels, [str(i) for i in range(60)])
    assert other["auc"] != pytest.approx(once["auc"], abs=1e-4)
    [(number, mean_score, mean_label)] = calibration([0.31, 0.39], [0.0, 1.0])
    assert (number, mean_score, mean_label) == (2, pytest.approx(0.35), 0.5)


def test_one_class_alone_has_no_auc():
    result = evaluate([0.2, 0.9], [1.0, 1.0], ["a", "b"])
    assert math.isnan(result["auc"].value)
    assert result["accuracy"].value == 0.5


@pytest.mark.parametrize("scores", [[], [1.2], [float("nan")]])
def test_scores_are_from_0_to_1(scores):
    with pytest.raises(ValueError, match="expected scores from 0 to 1"):
        evaluate(scores, scores, ["t"] * len(scores))
