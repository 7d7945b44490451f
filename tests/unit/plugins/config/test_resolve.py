"""The writes to the configuration that need no verl."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from verl_turnkey.plugins.config.resolve import absolute_paths

OWN = {"name": "mine.py:reward", "file": "part one"}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (OWN, {**OWN, "name": "{here}/mine.py:reward"}),
        ({"name": "arena", "compare": "mine.py:better"}, {"name": "arena", "compare": "{here}/mine.py:better"}),
        ({"name": "verl", "path": "mine.py"}, {"name": "verl", "path": "{here}/mine.py"}),
        ({"name": "judge", "cache": "kept"}, {"name": "judge", "cache": "{here}/kept"}),
        ({"name": "contrastive", "file": "b.json"}, {"name": "contrastive", "file": "{here}/b.json"}),
        ({"name": "arena", "compare": "package.module:better"}, None),
        ({"name": "verl", "path": "file:///there/mine.py"}, None),
        ({"name": "judge", "cache": "s3://kept"}, None),
    ],
)
def test_those_of_a_component_stay_right_in_other_folders(tmp_path, monkeypatch, entry, expected):
    """Of the episode's rewards, and of the one by which a strategy judges answers."""
    monkeypatch.chdir(tmp_path)
    strategy = {"name": "probe", "reward": entry}
    config = OmegaConf.create({"turnkey": {"rewards": [{"name": "step"}, entry], "rollout": {"strategy": strategy}}})
    change = absolute_paths(config)
    assert (change is None) == (expected is None)
    there = {key: value.format(here=tmp_path) for key, value in (expected or entry).items()}
    assert OmegaConf.to_container(config.turnkey) == {
        "rewards": [{"name": "step"}, there],
        "rollout": {"strategy": {"name": "probe", "reward": there}},
    }
