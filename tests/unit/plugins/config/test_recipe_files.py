"""Values of configuration files by their whole key."""

from __future__ import annotations

from omegaconf import OmegaConf

from verl_turnkey.plugins.config.recipe_files import leaves


def test_what_is_missing_or_leads_nowhere_is_left_out():
    node = OmegaConf.create(
        {"a": 1, "lost": "${not.there}", "b": {"todo": "???", "c": [1, 2], "same": "${a}"}, "none": None}
    )
    assert dict(leaves(node)) == {"a": 1, "b.c": [1, 2], "b.same": 1, "none": None}
