"""The strict parser of dataclasses, and the range of every parameter of methods and modifiers."""

from __future__ import annotations

import re
from collections import UserDict, UserList
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional, get_origin, get_type_hints

import numpy as np
import pytest
import yaml
from intervals import around

from verl_turnkey.advantage import estimators, modifiers
from verl_turnkey.advantage.params import ALIASES, ConfigError, check, did_you_mean, parse


# --- The strict dataclass parser that the plugin's whole configuration goes through -----------------------------------
@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    mode: Literal["a", "b", 3] = "a"

    def __post_init__(self) -> None:
        check(self.rate >= 0, "rate", "a number >= 0", self.rate)


@dataclass(frozen=True)
class Outer:
    name: str
    count: int = 1
    on: bool = False
    limit: float | None = None
    hosts: int | Literal["auto"] = "auto"
    old_style: Optional[int] = None  # noqa: UP045  users write it this way
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    stops: list[str] = field(default_factory=list)
    pair: tuple[int, float] = (1, 2.0)
    kwargs: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Inner] = field(default_factory=dict)


def test_all_errors_of_nested_nodes_come_at_once():
    with pytest.raises(ConfigError) as error:
        parse(Outer, {"cuont": 1, "on": "x", "inner": {"rat": 1, "mode": "c"}}, "node")
    places = re.findall(r"^\d\. ([\w.]+): ", str(error.value), re.MULTILINE)
    assert str(error.value).startswith("5 errors:\n")
    assert places == ["node.name", "node.cuont", "node.on", "node.inner.rat", "node.inner.mode"]


def test_defaults_and_values():
    assert parse(Outer, {"name": "x"}, "node") == Outer("x")
    parsed = parse(
        Outer,
        UserDict(
            name="x",
            count=np.int64(3),
            on=True,
            limit=2,
            hosts=4,
            old_style=5,
            inner={"rate": 1, "mode": 3},
            maybe={"mode": "b"},
            stops=UserList(["</action>"]),
            pair=[7, 8],
            kwargs={"size": [1, 2], "deep": {"x": None}},
            rates={"slow": {"rate": 0.1}},
        ),
        "node",
    )
    assert parsed == Outer(
        name="x",
        count=3,
        on=True,
        limit=2.0,
        hosts=4,
        old_style=5,
        inner=Inner(1.0, 3),
        maybe=Inner(mode="b"),
        stops=["</action>"],
        pair=(7, 8.0),
        kwargs={"size": [1, 2], "deep": {"x": None}},
        rates={"slow": Inner(0.1)},
    )
    assert isinstance(parsed.limit, float)
    assert isinstance(parsed.inner.rate, float)


def test_an_empty_yaml_node_means_the_defaults():
    assert parse(Inner, None, "node") == Inner()
    assert parse(Outer, {"name": "x", "inner": None, "maybe": None}, "node") == Outer("x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nmae": "y"}, r"^node\.nmae: unknown key; did you mean 'name'\? Known keys: count, hosts,"),
        ({"qqqq": 1}, r"^node\.qqqq: unknown key\. Known keys"),
        ({"inner": {"rat": 1}}, r"^node\.inner\.rat: unknown key; did you mean 'rate'\? Known keys: mode, rate$"),
        ({"maybe": {"rat": 1}}, r"^node\.maybe\.rat: unknown key; did you mean 'rate'"),
        ({"inner": {"rate": -1}}, r"^node\.inner\.rate: expected a number >= 0, got -1\.0"),
        ({"rates": {"slow": {"rate": "x"}}}, r"^node\.rates\.slow\.rate: expected a number, got 'x' \(str\)"),
        ({"inner": {"mode": "c"}}, r"^node\.inner\.mode: expected one of 'a', 'b', 3, got 'c' \(str\)"),
        ({"inner": 3}, r"^node\.inner: expected a mapping of keys, got 3 \(int\)"),
        ({"maybe": 3}, r"^node\.maybe: expected a mapping or None, got 3 \(int\)"),
        ({"name": 3}, r"^node\.name: expected a string, got 3 \(int\)"),
        ({"name": None}, r"^node\.name: expected a string, got None"),
        ({"count": 1.5}, r"^node\.count: expected an integer, got 1\.5 \(float\)"),
        ({"count": True}, r"^node\.count: expected an integer, got True \(bool\)"),
        ({"on": 1}, r"^node\.on: expected true or false, got 1 \(int\)"),
        ({"on": "true"}, r"^node\.on: expected true or false, got 'true' \(str\)"),
        ({"limit": True}, r"^node\.limit: expected a number or None, got True \(bool\)"),
        ({"hosts": "atuo"}, r"^node\.hosts: expected an integer or one of 'auto', got 'atuo'.*did you mean 'auto'\?"),
        ({"old_style": "x"}, r"^node\.old_style: expected an integer or None"),
        ({"stops": "abc"}, r"^node\.stops: expected a list, got 'abc' \(str\); write \[abc\]$"),
        ({"stops": ["a", 2]}, r"^node\.stops\[1\]: expected a string, got 2 \(int\)"),
        ({"pair": [1]}, r"^node\.pair: expected a list of 2 entries, got 1"),
        ({"pair": [1, "x"]}, r"^node\.pair\[1\]: expected a number, got 'x'"),
        ({"kwargs": [1]}, r"^node\.kwargs: expected a mapping, got \[1\] \(list\)"),
        ({"kwargs": {1: 2}}, r"^node\.kwargs \(key\): expected a string, got 1"),
    ],
)
def test_bad_values_name_the_full_key(change, message):
    with pytest.raises(ConfigError, match=message):
        parse(Outer, {"name": "x", **change}, "node")


def test_missing_key_and_no_mapping():
    with pytest.raises(ConfigError, match=r"^node\.name: missing; expected a string, and there is no default"):
        parse(Outer, {}, "node")
    with pytest.raises(ConfigError, match=r"^node: expected a mapping of keys, got \['name'\] \(list\)"):
        parse(Outer, ["name"], "node")
    with pytest.raises(ConfigError, match=r"^name: missing"):
        parse(Outer, {}, "")


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("mode", ("norm", "gamma"), "norm"),  # verl-agent
        ("enable_similarity", ("similarity", "epsilon"), "similarity"),
        ("step_reward_weight", ("step_advantage_w",), "step_advantage_w"),  # ROLL
        ("high_level_gamma", ("gamma", "lam"), "gamma"),  # RAGEN
        ("grpo", ("hgpo", "grpo_steps"), "grpo_steps"),
        ("GAE", ("vc_gae", "turn_gae"), "turn_gae"),
        ("gigop", ("gigpo", "hgpo"), "gigpo"),
        ("mode", ("model",), "model"),  # nothing here that the other framework means
    ],
)
def test_what_others_call_it(name, known, expected):
    assert did_you_mean(name, known) == f"; did you mean {expected!r}?"


@pytest.mark.parametrize("name", ["remax", "gdpo"])
def test_a_method_of_others_is_no_misspelling(name):
    assert did_you_mean(name, ("proxmo", "hgpo", "hdpo", "rebn", "salt")) == ""


def test_aliases_are_not_our_names():
    assert not {"norm", "gamma", "step_advantage_w", "similarity", *estimators()} & set(ALIASES)


# --- Each number that a method or a modifier takes: it reaches the bounds of its interval, and no further -------------
SHARE, FACTOR, POSITIVE, ANY = "[0, 1]", "[0, inf)", "(0, inf)", "(-inf, inf)"
RANGES = yaml.safe_load((Path(__file__).parents[2] / "data" / "ranges.yaml").read_text(encoding="utf-8"))

#: How errors call an interval; null is one more value of the parameters that may be None.
WORDS = {
    SHARE: "a number in [0, 1]",
    FACTOR: "a finite number >= 0",
    POSITIVE: "a finite number > 0",
    ANY: "a finite number",
    "(0, 1]": "a number in (0, 1]",
    "[0, 1)": "a number in [0, 1)",
    "[0, 500]": "a number in [0, 500]",
}
#: Those that are called otherwise.
OTHER_WORDS = {
    ("gigpo", "similarity"): "in (0, 1)",
    ("loo_td", "prior"): "null, averaged or a finite number > 0",
    ("rank_shaping", "kappa"): "a positive number",
    ("rank_shaping", "rate"): "a number above 0, at most 1",
    ("rlsd", "decay_steps"): "positive",
    ("proxmo", "max_features"): "an integer > 0",
}
SPECS = {**estimators(), **modifiers()}


def cases(table, whole=False):
    words = {FACTOR: "an integer >= 0", "[1, inf)": "an integer >= 1"} if whole else WORDS
    return [
        pytest.param(name, key, *around(interval, whole), OTHER_WORDS.get((name, key)) or words[interval])
        for name, intervals in table.items()
        for key, interval in intervals.items()
    ]


@pytest.mark.parametrize(
    ("name", "key", "inside", "outside", "words"),
    [
        *(case for kind in ("methods", "modifiers") for case in cases(RANGES[kind])),
        *(case for kind in ("methods", "modifiers") for case in cases(RANGES[f"{kind}, whole"], whole=True)),
    ],
)
def test_a_number_reaches_its_bounds_and_no_further(name, key, inside, outside, words):
    params = SPECS[name].params
    for value in inside:
        assert getattr(params(**{key: value}), key) == value
        parse(params, {key: value}, name)
    for value in outside:
        with pytest.raises(ConfigError, match=rf"^{key}: expected (null or )?{re.escape(words)}, got {value!r}"):
            params(**{key: value})
        with pytest.raises(ConfigError, match=rf"^{name}\.{key}: expected"):
            parse(params, {key: value}, name)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (name, key)
        for name, spec in SPECS.items()
        for key, hint in get_type_hints(spec.params).items()
        if hint is bool or get_origin(hint) is Literal
    ],
)
def test_a_choice_is_one_of_those_that_there_are(name, key):
    for value in ("no such choice", 7):
        with pytest.raises(ConfigError, match=rf"^{name}\.{key}: expected (true or false|one of .*), got {value!r}"):
            parse(SPECS[name].params, {key: value}, name)
