"""Adapters alike: they refuse wrong arguments by name, gymnasium accepts them, and their episodes can be cloned."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from clones_of import NUMBERS, forks_alike
from gymnasium.utils.env_checker import check_env

from verl_turnkey.envs import errors, make
from verl_turnkey.envs.adapters.textarena import GAMES
from verl_turnkey.envs.checking.report import samples

REFUSED = yaml.safe_load((Path(__file__).parents[2] / "data/refused_arguments.yaml").read_text(encoding="utf-8"))
CASES = [(env_id, *case) for env_id, cases in REFUSED.items() for case in cases]
#: Actions of those that list none.
WORDS = {"turnkey/TextArena-v0": ("up", "down", "left", "right")}
#: Seeds whose random actions do not end a short game before it is cloned; others: 1.
SEEDS = {"turnkey/EZPoints-v0": 2, "turnkey/BlackJack-v0": 45}
FIRST = list({env_id: (env_id, kwargs) for env_id, kwargs in reversed(samples()[0])}.values())[::-1]


@pytest.mark.parametrize(("env_id", "kwargs", "error", "words"), CASES, ids=str)
def test_wrong_arguments_are_refused(env_id, kwargs, error, words):
    assert (env_id, error) != ("turnkey/TextArena-v0", "UnknownEnvironmentError") or kwargs["game"] not in GAMES
    with pytest.raises(getattr(errors, error), match=words):
        make(env_id, kwargs)


@pytest.mark.filterwarnings("ignore:Game .* is not fully supported")  # of jericho, about every game
@pytest.mark.parametrize(("env_id", "kwargs"), [("GEM", {"num_boxes": 1}), ("TextWorld", {"level": 3, "games": 1})])
def test_gymnasium_accepts_it(env_id, kwargs):
    check_env(make(f"turnkey/{env_id}-v0", kwargs).unwrapped, skip_render_check=True)


@pytest.mark.parametrize(("env_id", "kwargs"), FIRST, ids=str)
def test_a_clone_goes_on_as_its_original_does(env_id, kwargs):
    assert forks_alike(env_id, kwargs, SEEDS.get(env_id, 1), WORDS.get(env_id, NUMBERS)) > 1
