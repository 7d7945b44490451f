"""Importance weights per token, turn and row, and SeeUPO's accumulated ratio."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.losses.clipping import accumulated_ratio, importance_weights, units_of
from verl_turnkey.losses.turns import Turns, turn_ids

# --- Importance weights per token, turn and row: the values of the formulas, and a loop straight from them ------------
LEVELS = ("token", "turn", "sequence")
RATIOS = ("product", "geometric")
OUTSIDE = ("truncate", "zero_weight", "clear_mask")
#: A token of the model with its log-ratio, or None: masked.
Row = list[float | None]
TURNS: Row = [0.9, 0.9, None, -0.1, -0.1]
LONG: Row = [0.2, 0.3, None, None, -0.4, -0.1, 0.05]


def nested(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=torch.float64) for row in rows], layout=torch.jagged)


def weights(level: str, rows: list[Row], padded: bool = False, **options) -> list[list[float]]:
    """The weight of each token, 0 where it is masked, of rows whose masked tokens hold any number."""
    mask = nested([[float(r is not None) for r in row] for row in rows])
    ratios = nested([[math.nan if r is None else r for r in row] for row in rows])
    ratios = nested([[7.0 if r != r else r for r in row.tolist()] for row in ratios.unbind()])
    if padded:
        mask, ratios = mask.to_padded_tensor(0.0), ratios.to_padded_tensor(-3.0)
    units = units_of(level, mask, Turns.of(mask))
    weight, _ = importance_weights(ratios, units, **options)
    spread = units.spread(weight)
    return [line[: len(row)].tolist() for line, row in zip(spread.unbind(), rows, strict=True)]


def naive(level: str, rows: list[Row], ratio: str, outside: str, high: float, low: float | None) -> list[list[float]]:
    lines = []
    for row in rows:
        units, run = [], []
        for place, r in enumerate(row):
            if r is not None:
                run.append(place)
            if run and (r is None or place == len(row) - 1):
                units.append(run)
                run = []
        if level == "token":
            units = [[place] for unit in units for place in unit]
        if level == "sequence":
            units = [[place for unit in units for place in unit]] if units else []
        line = [0.0] * len(row)
        for unit in units:
            total = sum(row[place] for place in unit)
            if ratio == "geometric":
                total /= len(unit)
            w = math.exp(min(20.0, max(-20.0, total)))
            if outside == "truncate":
                w = min(w, high)
            elif w > high or (low is not None and w < low):
                w = 0.0
            for place in unit:
                line[place] = w
        lines.append(line)
    return lines


VALUES = json.loads((Path(__file__).parents[2] / "data" / "oracle" / "teacher_check_values.json").read_text())["tis"]


def spread(row: Row, level: str, values: list[float] | float) -> list[float]:
    """The check values of a row's units on its tokens."""
    turn = turn_ids(torch.tensor([[r is not None for r in row]]))[0].tolist()
    numbers = {"token": [sum(t >= 0 for t in turn[:i]) for i in range(len(turn))], "turn": turn}.get(level)
    of_token = [values if numbers is None else values[numbers[i]] if t >= 0 else 0.0 for i, t in enumerate(turn)]
    return [value if t >= 0 else 0.0 for value, t in zip(of_token, turn, strict=True)]


@pytest.mark.parametrize(
    ("case", "row", "high"), [("3.0", LONG, 3.0), ("1.5", LONG, 1.5), ("0.9,0.9|-0.1,-0.1 C=3", TURNS, 3.0)]
)
def test_check_values(case, row, high):
    """Six digits, printed by a script written from the formulas alone, equal to verl's per token and row."""
    expected = VALUES[case]
    masked = {"low": 1 / high, "outside": "zero_weight"}
    for level, options, name in (
        ("token", {}, "token"),
        ("sequence", {}, "seq"),
        ("turn", {}, "turn"),
        ("turn", masked, "turn_mask"),
        ("turn", masked | {"outside": "clear_mask"}, "turn_mask"),
        ("turn", {"ratio": "geometric"}, "turn_geo"),
    ):
        of_rows = weights(level, [row], high=high, **options)
        assert of_rows == [pytest.approx(spread(row, level, expected[name]), abs=1e-6)], name


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.lists(st.none() | st.floats(-9, 9), min_size=1, max_size=9),
        min_size=1,
        max_size=4,
    ),
    level=st.sampled_from(LEVELS),
    ratio=st.sampled_from(RATIOS),
    outside=st.sampled_from(OUTSIDE),
    high=st.floats(1, 5),
    low=st.none() | st.floats(0.1, 1),
    padded=st.booleans(),
)
def test_the_formula_is_the_loop(rows, level, ratio, outside, high, low, padded):
    options = {"ratio": ratio, "outside": outside, "high": high, "low": low}
    of_rows = weights(level, rows, padded, **options)
    for line, expected in zip(of_rows, naive(level, rows, **options), strict=True):
        assert line == pytest.approx(expected, rel=1e-9)


def test_turns_from_before_a_rejection_stay_whole():
    """A rejected token in the middle does not split its turn, and its ratio still counts."""
    mask = nested([[1, 1, 1, 0, 1]])
    units = units_of("turn", mask, Turns.of(mask))
    weight, inside = importance_weights(nested([[0.1, 0.2, 0.3, 9.0, -0.5]]), units)
    assert weight.tolist() == pytest.approx([math.exp(0.6), math.exp(-0.5)])
    assert inside.tolist() == [True, True]
    assert turn_ids(mask).unbind()[0].tolist() == [0, 0, 0, -1, 1]


# --- SeeUPO's accumulated ratio; the reference's outputs are in the test of the estimator ``seeupo``, which it weighs.


def test_the_accumulated_ratio():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    zeros = torch.zeros(3, 2)
    after = torch.tensor([[50.0, 50.0], [-50.0, 9.0], [9.0, 9.0]])
    ratio = accumulated_ratio(torch.tensor([1.1, 1.0, 0.9]), zeros, after, mask)
    assert ratio.tolist() == pytest.approx([1.2, 0.8, 0.9])
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0]])
    after = torch.tensor([[0.1, 0.05, 9.0, 9.0], [9.0, 0.5, 9.0, 9.0]])
    ratio = accumulated_ratio(torch.tensor([0.9, 0.9]), torch.zeros(2, 4), after, mask)
    assert ratio.tolist() == pytest.approx([0.9 * math.exp(0.075), 0.9 * 1.2])
    far = torch.tensor([[0.5], [-0.5]])
    ones, zeros, mask = torch.ones(2), torch.zeros(2, 1), torch.ones(2, 1)
    assert accumulated_ratio(ones, zeros, far, mask).tolist() == pytest.approx([1.2, 0.8])
    wide = accumulated_ratio(ones, zeros, far, mask, clip_low=0.3, clip_high=0.4)
    assert wide.tolist() == pytest.approx([1.4, 0.7])
