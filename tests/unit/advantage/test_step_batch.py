"""The table of steps, and the columns that methods read from it."""

import time
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from estimator_cases import columns, table

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit
from verl_turnkey.advantage.methods._step_columns import step_column, value_after

# --- StepBatch: what it takes, how it identifies things, and what it says about bad input -----------------------------
ROWS = columns([0.0, 1.0, 0.5, 2.0], ["t0", "t0", "t1", "t2"], group="gggh")


def test_defaults():
    batch = StepBatch(**ROWS)
    assert len(batch) == 4
    assert (batch.n_groups, batch.n_trajectories) == (2, 3)
    assert batch.score.tolist() == [1.0, 1.0, 0.5, 2.0]
    assert batch.penalty.tolist() == [0.0] * 4
    assert batch.valid.all()
    assert not np.concatenate([batch.terminated, batch.truncated, batch.success]).any()
    assert np.isnan(batch.value).all()
    assert batch.text.tolist() == [None] * 4
    assert len(set(batch.anchor.tolist())) == 4, "without anchors no two steps share a state"
    assert batch.given == frozenset()
    assert repr(batch) == "StepBatch(4 steps, 3 trajectories, 2 groups)"


def test_columns_are_kept_in_row_order_and_cannot_be_changed():
    reward = np.array([0.0, 1.0, 0.5, 2.0])
    batch = StepBatch(
        **{**ROWS, "reward": reward},
        score=[1, 1, 2, 3],
        valid=[1, 0, True, np.bool_(False)],
        value=np.array([0.1, np.nan, 0.2, 0.3]),
        tokens=[5, 6, 7, 8],
        text=["a", "b", "c", "d"],
        extra={"role": ["x", "y", "x", "y"], "prior": [1, None, 0.5, True]},
    )
    assert batch.score.tolist() == [1, 1, 2, 3]
    assert batch.valid.tolist() == [True, False, True, False]
    assert batch.tokens.tolist() == [5, 6, 7, 8]
    assert batch.text.tolist() == ["a", "b", "c", "d"]
    assert batch.extra["role"].tolist() == ["x", "y", "x", "y"]
    np.testing.assert_array_equal(batch.extra["prior"], [1, np.nan, 0.5, 1])
    assert batch.given == {"score", "valid", "value", "tokens", "text", "extra.role", "extra.prior"}
    with pytest.raises(ValueError, match="read-only"):
        batch.reward[0] = 9
    reward[0] = 9
    assert batch.reward[0] == 0.0


@pytest.mark.parametrize(
    ("state", "same"),
    [
        ("s", "s"),
        (1, 1.0),
        ([1, [2, "x"]], (1, (2, "x"))),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ({"pos": [0, 1], "inv": None}, {"inv": None, "pos": (0, 1)}),
        ({1, 2}, {2, 1}),
        (np.float32(0.5), 0.5),
        (b"s", b"s"),
    ],
)
def test_equal_structures_are_the_same_state(state, same):
    batch = StepBatch(**ROWS, anchor=[state, same, "other", None])
    assert batch.anchor[0] == batch.anchor[1]
    assert len(set(batch.anchor.tolist())) == 3


@pytest.mark.parametrize(
    ("state", "other"),
    [("1", 1), ([1, 2], [[1, 2]]), ({"a": 1}, [("a", 1)]), ((1, 2), {1, 2}), (None, None), ([], None), ("", None)],
)
def test_different_structures_are_different_states(state, other):
    anchor = StepBatch(**ROWS, anchor=[state, other, "x", "y"]).anchor
    assert anchor[0] != anchor[1]


def test_ids_lead_back_from_codes():
    batch = StepBatch(**{**ROWS, "trajectory": [("u", 0), ("u", 0), ["u", 1], ("v", 0)]}, anchor=["a", None, "b", "a"])
    assert [batch.ids["trajectory"][code] for code in batch.trajectory] == [("u", 0), ("u", 0), ("u", 1), ("v", 0)]
    assert batch.ids["anchor"] == ["a", "b"]
    assert batch.anchor.tolist() == [0, 2, 1, 0]


def test_steps_need_not_start_at_zero_or_be_contiguous():
    rows = {"group": ["g"] * 2, "trajectory": ["t"] * 2, "anchor": ["a", "b"]}
    gaps = compute_credit("gigpo", StepBatch(**rows, step=[9, 4], reward=[1.0, 0.0]), gamma=0.5)
    assert gaps.returns is not None
    assert gaps.returns.tolist() == [1.0, 0.5]


def test_array_columns_of_any_dtype():
    batch = StepBatch(
        group=np.array([7, 7, 8]),
        trajectory=np.array(["a", "b", "c"], dtype=object),
        step=np.array([0.0, 1.0, 2.0], dtype=np.float32),
        reward=np.array([1, 2, 3], dtype=object),
        anchor=np.array([[0, 1], [0, 1], [1, 1]]),
    )
    assert batch.reward.tolist() == [1.0, 2.0, 3.0]
    assert batch.step.dtype == np.int64
    assert batch.anchor.tolist() == [0, 0, 1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "kwargs", [{}, {"requires_grad": True}, {"dtype": torch.bfloat16}], ids=["float", "grad", "bf16"]
)
def test_tensors_are_columns(kwargs):
    value = torch.tensor([0.5, 0.25, 1.0, 2.0], **kwargs)
    batch = StepBatch(**{**ROWS, "step": torch.tensor(ROWS["step"])}, value=value, anchor=torch.tensor([7, 8, 7, 8]))
    assert batch.value.tolist() == [0.5, 0.25, 1.0, 2.0]
    assert batch.step.tolist() == ROWS["step"]
    assert batch.anchor.tolist() == [0, 1, 0, 1]


BAD = [
    ({"reward": [0.0, 1.0]}, r"reward: expected 4 entries, one per step as in group, got 2"),
    ({"anchor": ["a"]}, r"anchor: expected 4 entries, .* got 1"),
    ({"penalty": 0.1}, r"penalty: expected a sequence with one entry per step, got float"),
    ({"group": "gggh"}, r"group: expected a sequence with one entry per step, got str"),
    ({"reward": np.array(1.0)}, r"reward: expected a sequence with one entry per step, got ndarray"),
    ({"extra": ["x"] * 4}, r"extra: expected a dict of columns by name, got list"),
    ({"extra": {"role": ["x"]}}, r"extra\.role: expected 4 entries"),
    ({"reward": [0, 1, float("nan"), 2]}, r"reward: row 2, trajectory 't1', step 0: expected a number from .* got nan"),
    ({"reward": [0, 1, 2, float("inf")]}, r"reward: row 3, trajectory 't2', step 0: .* got inf"),
    ({"reward": [0, None, 2, 3]}, r"reward: row 1, .*, step 1: expected a number from -1e18 to 1e18, got None"),
    ({"reward": [0, 1e308, 2, 3]}, r"reward: row 1, .* expected a number from -1e18 to 1e18, got 1e\+308"),
    ({"score": [-1e200, 0, 2, 3]}, r"score: row 0, .* expected a number from -1e18 to 1e18, got -1e\+200"),
    ({"penalty": [0, -5, 0, 0]}, r"penalty: row 1, .* a number from 0 to 1e18, got -5"),
    ({"penalty": [0, 0, 0, 1e19]}, r"penalty: row 3, .* got 1e\+19"),
    ({"reward": [0, 1, "2", 3]}, r"reward: row 2, .* got '2'"),
    ({"reward": [[0], [1], [2], [3]]}, r"reward: row 0, .* got \[0\]"),
    ({"reward": [0, [1, 2], 2, 3]}, r"reward: row 1, .* got \[1, 2\]"),
    ({"score": [0, 1, float("nan"), 2]}, r"score: row 2, .* got nan"),
    ({"penalty": [0, float("inf"), 0, 0]}, r"penalty: row 1, .* got inf"),
    ({"value": [0, float("inf"), 0, 0]}, r"value: row 1, .* got inf"),
    ({"step": [0, -1, 0, 0]}, r"step: row 1, trajectory 't0': expected an integer >= 0, got -1"),
    ({"step": [0, 1.5, 0, 0]}, r"step: row 1, trajectory 't0': expected an integer >= 0, got 1.5"),
    ({"step": [0, "1", 0, 0]}, r"step: row 1, .* got '1'"),
    ({"step": [0, None, 0, 0]}, r"step: row 1, .* got None"),
    ({"tokens": [1, 2, 3, -4]}, r"tokens: row 3, trajectory 't2', step 0: expected an integer >= 0, got -4"),
    ({"step": [1, 1, 0, 0]}, r"step: row 1, trajectory 't0', step 1: the same step .* already in row 0"),
    ({"group": ["g", "h", "g", "h"]}, r"group: row 1, trajectory 't0', step 1: got group 'h', but row 0 .* group 'g'"),
    ({"group": ["g", None, "g", "h"]}, r"group: row 1: expected an id, got None"),
    ({"trajectory": [None, "t", "u", "v"]}, r"trajectory: row 0: expected an id, got None"),
    ({"anchor": ["a", float("nan"), "b", "c"]}, r"anchor: row 1: cannot use nan as an id: .*use None"),
    ({"anchor": ["a", [bytearray()], "b", "c"]}, r"anchor: row 1: cannot use .* unhashable"),
    ({"valid": [True, "yes", True, True]}, r"valid: row 1, trajectory 't0', step 1: expected true or false, got 'yes'"),
    ({"success": [0, 1, 2, 0]}, r"success: row 2, .* got 2"),
    ({"terminated": [None, True, True, True]}, r"terminated: row 0, .* got None"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_names_column_row_and_trajectory(change, message):
    with pytest.raises(ValueError, match=message):
        StepBatch(**{**ROWS, **change})


def test_building_a_big_batch_from_lists_is_fast():
    n = 60_000
    rows = {
        "group": [f"uid-{i // 400}" for i in range(n)],
        "trajectory": [f"uid-{i // 400}_{i // 50 % 8}" for i in range(n)],
        "step": [i % 50 for i in range(n)],
        "reward": [0.0] * n,
        "anchor": [f"state-{i % 977}" for i in range(n)],
    }
    seconds = []
    for _ in range(3):
        started = time.thread_time()
        StepBatch(**rows)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.5, "a Python loop over steps has crept in"


@pytest.mark.filterwarnings("error")
def test_missing_entries_of_pandas_are_none():
    rows = {"group": ["g"] * 4, "trajectory": [0, 1, 2, 3], "step": [0] * 4, "reward": [0.0] * 4}
    for missing in (pd.NA, pd.NaT, None, np.datetime64("NaT"), np.timedelta64("NaT")):
        extra = {"prior": [missing, 1, 2, 3], "answer": [missing, "a", "b", "c"]}
        batch = StepBatch(**rows, anchor=[missing, missing, "a", "a"], text=["x", missing, "y", "z"], extra=extra)
        assert len({*batch.anchor[:2].tolist()}) == 2
        assert batch.anchor[2] == batch.anchor[3]
        assert np.isnan(batch.extra["prior"][0])
        assert batch.extra["answer"][0] is batch.text[1] is None
        assert np.isnan(StepBatch(**rows, value=[missing, 1, 2, 3]).value).tolist() == [True, False, False, False]
        nested = StepBatch(**rows, anchor=[(missing, "a"), (None, "a"), {"a": missing}, {"a": None}]).anchor
        assert nested.tolist() == [0, 0, 1, 1]
        for name in ("group", "trajectory"):
            with pytest.raises(ValueError, match=rf"{name}: row 1: expected an id, got None"):
                StepBatch(**{**rows, name: ["x", missing, "y", "z"]})
        for name in ("valid", "success"):
            with pytest.raises(ValueError, match=rf"{name}: row 2, trajectory 2, step 0: expected true or false"):
                StepBatch(**rows, **{name: [True, False, missing, True]})
        for name in ("step", "reward"):
            with pytest.raises(ValueError, match=rf"{name}: row 0, .*got None"):
                StepBatch(**{**rows, name: [missing, 0, 0, 0]})
    table = pd.DataFrame({"valid": pd.array([True, None, True, True], dtype="boolean")})
    with pytest.raises(ValueError, match=r"valid: row 1, .*expected true or false, got None"):
        StepBatch(**rows, valid=table["valid"])


def test_a_step_too_large_for_an_integer_is_refused():
    rows = {"group": ["g"] * 2, "trajectory": [0, 0], "reward": [0.0] * 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"step: row 1, trajectory 0: expected an integer below 2\^63, got 11805"):
            StepBatch(**rows, step=[0, 2**70])
        assert StepBatch(**rows, step=[0, 2**62]).step.tolist() == [0, 2**62]


@pytest.mark.filterwarnings("error")
def test_nan_is_missing_in_texts_and_objects_and_no_id():
    """In a column of objects pandas has nan for what is missing, whatever the others are."""
    rows = {"group": ["g"] * 2, "trajectory": [0, 1], "step": [0, 0], "reward": [0.0] * 2}
    batch = StepBatch(**rows, text=["x", np.nan], extra={"answer": ["x", np.float32("nan")]})
    assert batch.text[1] is batch.extra["answer"][1] is None
    for value in (np.nan, np.float32("nan"), Decimal("nan"), ["a", np.nan]):
        for name in ("group", "trajectory", "anchor", "action"):
            with pytest.raises(ValueError, match=rf"{name}: row [01]: cannot use .* nan equals nothing"):
                StepBatch(**{**rows, name: ["x", value]})


@pytest.mark.parametrize("dtype", ["datetime64[ns]", "timedelta64[ns]", "Int64", "string"])
def test_missing_entries_of_whole_columns_are_none(dtype):
    rows = {"group": ["g"] * 4, "trajectory": [0, 1, 2, 3], "step": [0] * 4, "reward": [0.0] * 4}
    column = pd.Series([1, 1, None, None]).astype("Int64").astype(dtype)
    for anchor in (column, column.array, column.to_numpy(object if dtype == "Int64" else None)):
        assert StepBatch(**rows, anchor=anchor).anchor[0] == StepBatch(**rows, anchor=anchor).anchor[1]
        assert len({*StepBatch(**rows, anchor=anchor).anchor[1:].tolist()}) == 3


@pytest.mark.filterwarnings("error")
def test_integers_at_and_beyond_the_limits_of_a_type():
    rows = {"group": ["g"] * 2, "trajectory": [0, 0], "step": [0, 1], "reward": [0.0] * 2}
    for largest in ([0, 2**63 - 1], np.array([0, 2**63 - 1], dtype=np.uint64)):
        assert StepBatch(**{**rows, "step": largest}).step[1] == 2**63 - 1
    for name, column in {"step": [0, 2.0**63], "tokens": [0, 2**63], "reward": [0, 10**400]}.items():
        with pytest.raises(ValueError, match=rf"{name}: row 1, trajectory 0"):
            StepBatch(**{**rows, name: column})
    for name in ("value", "score", "step"):
        with pytest.raises(ValueError, match=rf"{name}: row 1, trajectory 0"):
            StepBatch(**{**rows, name: [0, 10**400]})
    assert StepBatch(**rows, extra={"key": [0, 10**400]}).extra["key"][1] == 10**400


# --- The extra columns of numbers: what is refused, and what stands for a turn that never reached the environment -----
def batch(column, valid=None, trajectory=None):
    n = len(column)
    columns = {"trajectory": trajectory or [0] * n, "valid": valid or [True] * n}
    return StepBatch(group=["g"] * n, step=range(n), reward=[0.0] * n, extra={"x": column}, **columns)


@pytest.mark.parametrize("wrong", [None, float("nan"), float("inf"), 1.5, "half"])
def test_what_is_no_number_in_range_is_named(wrong):
    with pytest.raises(ConfigError, match=r"mine: extra\.x: expected a finite number from 0 to 1 .* row 1, .* step 1"):
        step_column(batch([0.5, wrong]), "mine", "x", 0.0, 1.0)


def test_numbers_come_as_they_are():
    assert step_column(batch([1, 0.5, True]), "mine", "x").tolist() == [1.0, 0.5, 1.0]
    assert step_column(batch([]), "mine", "x").tolist() == []


VALID = [False, True, False, False, True, False]
COLUMN = [0.0, 0.2, 0.0, 0.0, 0.6, 0.0]


def test_the_state_after_an_idle_turn_is_that_before_it():
    assert value_after(batch(COLUMN, VALID), "mine", "x").tolist() == [0.0, 0.2, 0.2, 0.2, 0.6, 0.6]
    assert value_after(batch([0.5, 0.3], [True, False]), "mine", "x").tolist() == [0.5, 0.3]
    apart = batch([0.3, 0.0, 0.5], [True, False, True], ["a", "b", "c"])
    assert value_after(apart, "mine", "x").tolist() == [0.3, 0.0, 0.5]
    order = np.array([4, 0, 5, 2, 1, 3])
    shuffled = table([0.0] * 6, [0] * 6, step=order, valid=np.array(VALID)[order], x=np.array(COLUMN)[order])
    expected = value_after(batch(COLUMN, VALID), "mine", "x")[order]
    assert value_after(shuffled, "mine", "x").tolist() == expected.tolist()
