"""Each number that a method or a modifier takes: it reaches the bounds of its interval, and no further."""

import re
from typing import Literal, get_origin, get_type_hints

import pytest
from intervals import around

from verl_turnkey.advantage import ConfigError, estimators, modifiers
from verl_turnkey.advantage.params import parse

SHARE, FACTOR, POSITIVE, ANY = "[0, 1]", "[0, inf)", "(0, inf)", "(-inf, inf)"
BOUNDS = {
    "dual_granularity": {"beta": FACTOR},
    "dual_level": {"gamma": SHARE, "trajectory_w": FACTOR, "turn_w": FACTOR},
    "gigpo": {"gamma": SHARE, "step_advantage_w": FACTOR, "similarity": "(0, 1)", "epsilon": POSITIVE},
    "graph": {
        "decay": "(0, 1]",
        "scale": POSITIVE,
        "step_advantage_w": FACTOR,
        "epsilon": POSITIVE,
        "gamma": SHARE,
        "success_value": ANY,
    },
    "grpo_steps": {"epsilon": POSITIVE},
    "hae": {"gamma": SHARE, "lam_turn": SHARE, "lam_seg": SHARE, "keep_penalty": FACTOR},
    "hdpo": {"epsilon": POSITIVE},
    "hgpo": {"gamma": SHARE, "alpha": FACTOR, "epsilon": POSITIVE},
    "information_gain": {"gamma": SHARE},
    "loo_td": {"gamma": "(0, 1]", "lam": SHARE, "prior": POSITIVE, "lone": FACTOR},
    "marshal": {"gamma": SHARE},
    "maxrl": {"epsilon": FACTOR},
    "mc_grpo": {"floor": FACTOR, "epsilon": POSITIVE},
    "ngrpo": {"r_max": ANY, "epsilon": POSITIVE},
    "progress": {"alpha": FACTOR},
    "proxmo": {
        "gamma": SHARE,
        "alpha": POSITIVE,
        "beta": FACTOR,
        "temperature": POSITIVE,
        "step_advantage_w": FACTOR,
        "epsilon": POSITIVE,
    },
    "rae": {"decay": SHARE, "gamma": SHARE},
    "rebn": {"gamma": SHARE, "epsilon": POSITIVE},
    "rtmc": {"gamma": SHARE, "n_prior": FACTOR},
    "salt": {"epsilon": POSITIVE},
    "seeupo": {"clamp": POSITIVE},
    "siblings": {"epsilon": POSITIVE},
    "step_episode": {"alpha": FACTOR},
    "step_potential": {"alpha": SHARE, "xi": FACTOR, "saturation": ANY},
    "tree": {"trajectory_w": FACTOR, "fork_w": FACTOR, "epsilon": POSITIVE},
    "turn_gae": {"gamma": SHARE, "lam": SHARE},
    "turn_norm": {"gamma": SHARE, "turn_w": FACTOR},
    "vc_gae": {"gamma": SHARE, "lam_actor": SHARE, "lam_critic": SHARE, "length_alpha": POSITIVE},
}
OF_MODIFIERS = {
    "a_grae": {"alpha": "(0, 1]"},
    "agent_opsd": {"lam": SHARE, "bound": SHARE},
    "copo": {"gamma": FACTOR, "rho": ANY},
    "dynamo_modulation": {"a": FACTOR, "floor": SHARE, "steepness": "[0, 500]", "threshold": SHARE},
    "empg": {"k": FACTOR, "k_next": FACTOR, "zeta": FACTOR},
    "grsd": {"lam": FACTOR, "eta": FACTOR, "bound": FACTOR, "success": ANY},
    "hcapo": {"weight": FACTOR, "gamma": SHARE, "temperature": POSITIVE, "clip": "[0, 1)", "success": ANY},
    "length_gate": {"weight": FACTOR},
    "opid": {"weight": FACTOR},
    "rank_shaping": {"gain": FACTOR, "weight": FACTOR, "kappa": POSITIVE, "rate": "(0, 1]"},
    "rlsd": {"lam": SHARE, "clip": "[0, 1)"},
    "shrinkage": {"decay": "[0, 1)"},
    "tool_gate": {"weight": FACTOR},
    "trace": {"weight": FACTOR, "gamma": SHARE, "outcome": FACTOR, "offset": POSITIVE},
    "trial": {"coefficient": FACTOR},
    "unlikeliness": {"beta": SHARE},
}
WHOLE = {"hgpo": {"history": FACTOR}, "progress": {"k": "[1, inf)"}, "proxmo": {"max_features": "[1, inf)"}}
WHOLE["salt"] = {"history": FACTOR}
WHOLE["loo_td"] = {"horizon": "[1, inf)"}
WHOLE_OF_MODIFIERS = {"rlsd": {"decay_steps": "[1, inf)"}}


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
        *cases(BOUNDS),
        *cases(OF_MODIFIERS),
        *cases(WHOLE, whole=True),
        *cases(WHOLE_OF_MODIFIERS, whole=True),
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
