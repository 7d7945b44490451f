"""The parameters of the losses: what each takes at its bounds, what it refuses, and what it is if nobody sets it."""

import dataclasses

import pytest
from intervals import around

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses import losses

BOUNDS = {
    "clip_low": "[0, 1)",
    "clip_high": "[0, inf)",
    "dual_clip": "(1, inf]",
    "weight_cap": "(1, inf)",
    "n": "(0, inf)",
    "m": "[1, inf)",
    "accuracy_w": "[0, inf)",
    "tool_w": "[0, inf)",
    "eta": "(0, inf)",
    "threshold": "(0, 1]",
    "coefficient": "[0, inf)",
    "beta": "[0, inf)",
    "pg_weight": "[0, inf)",
    "lam": "[0, inf)",
    "weight": "[0, 1]",
    "is_clip": "(0, inf)",
}

#: Of the authors' papers and code, as each loss's docstring has it; those of clip_low and clip_high are 0.2.
DEFAULTS = {
    "a3po": {"weight_cap": 5.0, "current_version": "before_update"},
    "dgpo": {"n": 1.0, "m": 2.0},
    "hdpo": {"accuracy_w": 1.0, "tool_w": 0.15, "dual_clip": 3.0},
    "psft": {"clip_high": 0.28},
    "rebel": {"eta": 1.0},
    "sdar": {"coefficient": 0.01, "beta": 5.0, "pg_weight": 1.0, "dual_clip": 3.0},
    "sdpo_sampled": {"weight": 1.0, "is_clip": 2.0, "rows": "with_text", "dual_clip": 3.0},
    "skill_sd": {"lam": 0.001, "dual_clip": 3.0},
    "segment_mask": {"threshold": 0.9, "drop_zeros": False},
    "s_ppo": {"divide": "above_one"},
    "st_ppo": {"divide": "above_one"},
    "turn_ratio": {"ratio": "geometric", "aggregate": "tokens", "gradient": "turn", "dual_clip": None},
}
CASES = [(name, field.name) for name in DEFAULTS for field in dataclasses.fields(losses()[name].params)]


@pytest.mark.parametrize(("name", "key"), [case for case in CASES if case[1] in BOUNDS])
def test_a_number_reaches_its_bounds_and_no_further(name, key):
    inside, outside = around(BOUNDS[key])
    for value in inside:
        assert getattr(losses()[name].params(**{key: value}), key) == value
    for value in outside:
        with pytest.raises(ConfigError, match=f"{key}: expected .*, got {value!r}"):
            losses()[name].params(**{key: value})


@pytest.mark.parametrize(("name", "key"), CASES)
def test_the_default_is_the_one_on_record(name, key):
    usual = {"clip_low": 0.2, "clip_high": 0.2}
    assert getattr(losses()[name].params(), key) == {**usual, **DEFAULTS[name]}[key]
