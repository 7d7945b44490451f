"""Every environment that ships and is installed forks as an environment of its own does."""

from __future__ import annotations

import pytest
from clones_of import NUMBERS, forks_alike

from verl_turnkey.envs.checking.report import samples

#: Actions of those that list none.
WORDS = {"turnkey/TextArena-v0": ("up", "down", "left", "right")}
FIRST = list({env_id: (env_id, kwargs) for env_id, kwargs in reversed(samples()[0])}.values())[::-1]


@pytest.mark.parametrize(("env_id", "kwargs"), FIRST, ids=str)
def test_a_clone_goes_on_as_its_original_does(env_id, kwargs):
    assert forks_alike(env_id, kwargs, words=WORDS.get(env_id, NUMBERS)) > 1
