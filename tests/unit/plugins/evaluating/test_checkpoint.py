"""Which folder is served, and with which options."""

from __future__ import annotations

import json

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.evaluating import checkpoint
from verl_turnkey.plugins.evaluating.server import cli_words


def hugging_face(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w")
    return folder


def test_a_folder_of_hugging_face_is_served_as_it_is(tmp_path):
    folder = hugging_face(tmp_path / "model")
    assert checkpoint.resolve(folder, tmp_path / "out") == folder
    assert checkpoint.name(folder) == "model"
    assert [file.name for file in checkpoint.weights(folder)] == ["model.safetensors"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["", "global_step_20", "global_step_20/actor"])
def test_weights_that_verl_saved_for_hugging_face_are_found(tmp_path, given):
    folder = hugging_face(tmp_path / "run" / "global_step_20" / "actor" / "huggingface")
    hugging_face(tmp_path / "run" / "global_step_10" / "actor" / "huggingface")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert checkpoint.resolve(tmp_path / "run" / given, tmp_path / "out") == folder
    assert checkpoint.name(tmp_path / "run" / given) == "global_step_20"


def test_a_folder_that_is_neither_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither a Hugging Face folder"):
        checkpoint.resolve(tmp_path, tmp_path / "out")


def test_shards_are_merged_once_for_as_long_as_they_are_the_same(tmp_path, monkeypatch):
    """verl's merger is replaced: that it merges is tested with the real one."""
    actor, out = tmp_path / "global_step_3" / "actor", tmp_path / "out"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"1")
    calls: list[list[str]] = []

    def merge(command, **_):
        calls.append(command)
        target = checkpoint.Path(command[command.index("--target_dir") + 1])
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes((actor / "model_world_size_1_rank_0.pt").read_bytes())
        return type("Done", (), {"returncode": 0, "stdout": ""})

    monkeypatch.setattr(checkpoint.subprocess, "run", merge)
    for _ in range(2):
        assert checkpoint.resolve(tmp_path / "global_step_3", out) == out / "model"
    assert len(calls) == 1
    assert calls[0][calls[0].index("--backend") + 1] == "fsdp"
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"22")
    checkpoint.resolve(actor, out)
    assert len(calls) == 2
    assert (out / "model" / "model.safetensors").read_bytes() == b"22"


def test_options_of_vllm_as_words():
    options = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "quantization": None}
    words = cli_words({**options, "hf_overrides": {"a": [1]}})
    assert words[:-1] == ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--hf-overrides"]
    assert json.loads(words[-1]) == {"a": [1]}
