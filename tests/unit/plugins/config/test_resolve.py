"""What a field of the configuration is: every one says it, and paths are made absolute by it."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from verl_turnkey.plugins.config.leaves import every
from verl_turnkey.plugins.config.resolve import absolute_paths
from verl_turnkey.plugins.config.roles import Leaf

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


def test_every_field_says_what_it_is():
    """A new field is annotated, as ``Played[...]``; without a use no list that loops over fields would know of it."""
    lacking = [key for key, leaf in every().items() if leaf.use is None]
    assert not lacking, f"say what these decide, with the words of plugins/config/roles.py: {', '.join(lacking)}"
    assert len(every()) > 130
    assert Leaf.of("turnkey.x", int | None).use is None


PAD = {"command": "python", "args": ["serve.py", "gone.py"], "cwd": None}


@pytest.mark.parametrize(
    ("key", "value", "absolute"),
    [
        ("turnkey.mcp.servers", "mcp.json", "{here}/mcp.json"),
        ("turnkey.mcp.servers", {"pad": PAD}, {"pad": {**PAD, "args": ["{here}/serve.py", "gone.py"]}}),
        ("turnkey.mcp.servers", {"pad": {**PAD, "cwd": "x"}}, {"pad": {**PAD, "cwd": "{here}/x"}}),
        ("turnkey.agent.readable", ["tools", "/usr/lib"], ["{here}/tools", "/usr/lib"]),
        ("turnkey.agent.run", "serve.py:play", "{here}/serve.py:play"),
        ("turnkey.agent.run", ["python", "serve.py"], ["python", "serve.py"]),
        ("turnkey.prm.path", "model", "{here}/model"),
        ("turnkey.prm.path", "some/name", "some/name"),
        ("turnkey.teacher.source", {"name": "serve.py:text"}, {"name": "{here}/serve.py:text"}),
        ("turnkey.rollout.template", "default", "default"),
        ("turnkey.rollout.template", "serve.py", "{here}/serve.py"),
        ("turnkey.rollout.examples", [{"observation": "serve.py", "action": "x"}], None),
        ("turnkey.env.kwargs", {"data": "model", "name": "model"}, {"data": "{here}/model", "name": "model"}),
        ("turnkey.log.trajectories", "~/log", "{home}/log"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "serve.py", "{here}/serve.py"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "of/verl.yaml", "of/verl.yaml"),
    ],
)
def test_paths_are_absolute_for_workers_elsewhere(tmp_path, monkeypatch, key, value, absolute):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    (tmp_path / "model").mkdir()
    for name in ("serve.py", "default"):
        (tmp_path / name).touch()
    config = OmegaConf.create({})
    OmegaConf.update(config, key, value)
    absolute_paths(config)
    expected = json.dumps(absolute or value).replace("{here}", str(tmp_path)).replace("{home}", "/somewhere")
    left = OmegaConf.select(config, key)
    assert (OmegaConf.to_container(left) if OmegaConf.is_config(left) else left) == json.loads(expected)
