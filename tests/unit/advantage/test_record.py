"""The record: building, checking, and saying which row and field is wrong."""

import pickle
import time

import numpy as np
import pytest

from verl_turnkey.advantage import RECORD_VERSION, RecordError, make_record, make_step, validate_record

KEY = "uid-3_0_7"


def record(*changes, **top):
    """A valid record with its steps changed by the given dicts; a value of ... deletes the field."""
    steps = [make_step(step=i, reward=0.5) for i in range(max(len(changes), 1))]
    for entry, change in zip(steps, changes, strict=False):
        entry.update(change)
        for name in [name for name, value in change.items() if value is ...]:
            del entry[name]
    return {"version": RECORD_VERSION, "failed": None, "steps": steps, **top}


def test_builder_makes_the_documented_schema():
    entry = make_step(step=2, reward=1, anchor="s", action="go", success=True, terminated=True, extra={"role": "x"})
    assert make_record([entry]) == {
        "version": 3,
        "failed": None,
        "steps": [
            {
                "step": 2,
                "reward": 1,
                "anchor": "s",
                "action": "go",
                "valid": True,
                "penalty": 0.0,
                "terminated": True,
                "truncated": False,
                "success": True,
                "extra": {"role": "x"},
            }
        ],
    }
    composed = make_step(step=2, reward=1, composed_reward=np.float64(0.5))
    assert composed == make_step(step=2, reward=1) | {"composed_reward": 0.5}
    assert make_record([], failed="reset timed out") == {"version": 3, "failed": "reset timed out", "steps": []}
    assert make_record([entry], branch=np.int64(2)) == make_record([entry]) | {"branch": 2}
    assert make_record([entry], branch=0) == make_record([entry])
    versioned = make_step(step=2, reward=1, version=np.int64(7))
    assert versioned == make_step(step=2, reward=1) | {"version": 7}
    assert type(versioned["version"]) is int
    of_tree = {"after": 1, "request": 0, "outcome": 0.5}
    assert make_step(step=2, reward=1, **of_tree) == make_step(step=2, reward=1) | of_tree


def test_numpy_scalars_of_an_environment_become_plain():
    entry = make_step(
        step=np.int64(0),
        reward=np.float32(0.5),
        anchor=np.int64(7),
        valid=np.bool_(True),
        penalty=np.float64(0.1),
        extra={"prior": np.float32(0.25)},
    )
    kinds = {name: type(value) for name, value in entry.items()}
    assert kinds["step"] is int
    assert kinds["reward"] is float
    assert kinds["anchor"] is int
    assert kinds["valid"] is bool
    assert kinds["penalty"] is float
    assert type(entry["extra"]["prior"]) is float
    assert b"numpy" not in pickle.dumps(entry)


def test_valid_records_pass():
    validate_record(record(), KEY)
    validate_record(record({"anchor": None, "extra": {"a": 1.0, "b": "x", "c": 2}}, {"anchor": 4}), KEY)
    validate_record(record({"composed_reward": 1}, {"composed_reward": -0.5}, {}), KEY)
    validate_record(record({"composed_reward": 1, "version": 0}, {"version": 3}, {}), KEY)
    validate_record({"version": 2, "failed": "why", "steps": []}, KEY)


@pytest.mark.parametrize("version", [1, 2])
def test_records_of_earlier_versions_are_still_read(version):
    validate_record({"version": version, "failed": "why", "steps": []}, KEY)
    validate_record(record({"composed_reward": 1.0}, {}, version=version), KEY)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, r"expected the record to be a dict, got None; build it with make_record"),
        ([], r"expected the record to be a dict, got \[\] \(list\)"),
        ({}, r"version: expected 1 or 2 or 3, got None"),
        (record(version=4), r"version: expected 1 or 2 or 3, got 4 \(int\)"),
        (record(branch=-1), r"branch: expected an int >= 0, or left out, got -1 \(int\)"),
        (record(branch=True), r"branch: expected an int >= 0, or left out, got True"),
        (record(brunch=1), r"brunch: unknown field; did you mean 'branch'\?"),
        (record({"version": -1}), r"version: expected an int >= 0, or left out, got -1"),
        (record({"version": 1.0}), r"version: expected an int >= 0, or left out, got 1\.0 \(float\)"),
        (record({"version": True}), r"version: expected an int >= 0, or left out, got True"),
        (record({"version": None}), r"version: expected an int >= 0, or left out, got None"),
        (record(fialed=None), r"fialed: unknown field; did you mean 'failed'\?"),
        ({"version": 1, "failed": None}, r"steps: missing field"),
        (record(steps={}), r"steps: expected a list of dicts, got \{\} \(dict\)"),
        (record(steps=[]), r"steps: expected at least one step, got none"),
        (record(steps=[3]), r"expected a step to be a dict, got 3 \(int\); build it with make_step"),
        (record(failed="x"), r"steps: expected none, because failed is 'x', got 1"),
        (record(failed=True), r"failed: expected None or the reason as a str, got True \(bool\)"),
        (record(failed="", steps=[]), r"failed: expected None or the reason as a str, got ''"),
        (record({"reward": ...}), r"reward: missing field"),
        (record({"rewrad": 1.0}), r"rewrad: unknown field; did you mean 'reward'\?"),
        (record({"reward": float("nan")}), r"reward: expected a float from -1e18 to 1e18, got nan \(float\)"),
        (record({"reward": float("inf")}), r"reward: expected a float from -1e18 to 1e18, got inf"),
        (record({"reward": -1e308}), r"reward: expected a float from -1e18 to 1e18, got -1e\+308"),
        (record({"penalty": 1e300}), r"penalty: expected a float from 0 to 1e18 .*got 1e\+300"),
        (record({"reward": "1"}), r"reward: expected a float from -1e18 to 1e18, got '1' \(str\)"),
        (record({"reward": None}), r"reward: expected a float from -1e18 to 1e18, got None"),
        (record({"composed_reward": float("nan")}), r"composed_reward: expected a float from -1e18 to 1e18, got nan"),
        (record({"composed_reward": -1e19}), r"composed_reward: expected a float from -1e18 to 1e18, got -1e\+19"),
        (record({"composed_reward": None}), r"composed_reward: expected a float from -1e18 to 1e18, got None"),
        (record({"composed_reward": True}), r"composed_reward: expected a float from -1e18 to 1e18, got True"),
        (record({"composed_rewrad": 1.0}), r"composed_rewrad: unknown field; did you mean 'composed_reward'\?"),
        (record({"reward": ..., "composed_reward": 1.0}), r"reward: missing field"),
        (record({"reward": np.float32(1)}), r"reward: expected a float from -1e18 to 1e18, got .*\(float32\)"),
        (record({"step": -1}), r"step: expected an int >= 0, got -1 \(int\)"),
        (record({"step": 1.0}), r"step: expected an int >= 0, got 1\.0 \(float\)"),
        (record({"step": True}), r"step: expected an int >= 0, got True \(bool\)"),
        (
            record({"anchor": [1]}),
            r"anchor: expected a str, an int or None \(hash a structured state to a str\), got \[1\]",
        ),
        (record({"action": 3}), r"action: expected a str or None, got 3 \(int\)"),
        (record({"valid": 1}), r"valid: expected a bool, got 1 \(int\)"),
        (record({"success": None}), r"success: expected a bool, got None"),
        (record({"terminated": "no"}), r"terminated: expected a bool, got 'no'"),
        (record({"truncated": 0}), r"truncated: expected a bool, got 0"),
        (record({"penalty": -0.1}), r"penalty: expected a float from 0 to 1e18 .*got -0\.1"),
        (record({"penalty": float("nan")}), r"penalty: expected a float from 0 to 1e18 .*got nan"),
        (record({"extra": None}), r"extra: expected a dict of float or str by name, got None"),
        (record({"extra": {"a": [1]}}), r"extra\.a: expected a float or a str under a str name, got \[1\] \(list\)"),
        (record({"extra": {1: "a"}}), r"extra\.1: expected a float or a str under a str name"),
        (record({}, {"reward": None}), r"steps\[1\]: reward: expected a float from -1e18 to 1e18"),
        (record({}, {"step": 0}), r"steps: expected each step number once, got 2 steps, 1 numbers"),
    ],
)
def test_errors_name_row_and_field(bad, message):
    with pytest.raises(RecordError, match=rf"^{KEY}: {message}"):
        validate_record(bad, KEY)


def test_the_builder_refuses_at_once():
    with pytest.raises(RecordError, match=r"^make_step: reward: expected a float from -1e18 to 1e18, got nan"):
        make_step(step=0, reward=float("nan"))
    with pytest.raises(RecordError, match=r"^make_step: anchor: .*got \(1, 2\) \(tuple\)"):
        make_step(step=0, reward=0.0, anchor=(1, 2))
    with pytest.raises(
        RecordError, match=r"make_step: extra: expected a dict of float or str by name, got \[1\] \(list"
    ):
        make_step(step=0, reward=0.0, extra=[1])
    with pytest.raises(RecordError, match=r"^make_record: steps: expected none, because failed is 'x', got 1"):
        make_record([make_step(step=0, reward=0.0)], failed="x")
    with pytest.raises(RecordError, match=r"^make_record: steps: expected at least one step"):
        make_record([])
    with pytest.raises(RecordError, match=r"^make_record: steps: expected a list of steps .*got \{'step': 0"):
        make_record(make_step(step=0, reward=0.0))
    with pytest.raises(RecordError, match=r"^make_record: expected a step to be a dict, got 'a' "):
        make_record(["a"])


def test_checking_a_batch_is_fast():
    record = make_record([make_step(step=0, reward=0.0, anchor="s", action="go", extra={"a": 1.0})])
    started = time.thread_time()
    for _ in range(20_000):
        validate_record(record, KEY)
    assert time.thread_time() - started < 1
