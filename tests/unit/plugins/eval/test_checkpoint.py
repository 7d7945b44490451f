"""Which folder is served, and with which options."""

from __future__ import annotations

import json
import shutil

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.eval import checkpoint
from verl_turnkey.plugins.eval.server import cli_words


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


@pytest.mark.parametrize("path", ["", "global_step_20", "global_step_20/actor"])
def test_weights_that_verl_saved_for_hugging_face_are_found(tmp_path, path):
    folder = hugging_face(tmp_path / "run" / "global_step_20" / "actor" / "huggingface")
    hugging_face(tmp_path / "run" / "global_step_10" / "actor" / "huggingface")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert checkpoint.resolve(tmp_path / "run" / path, tmp_path / "out") == folder
    assert checkpoint.name(tmp_path / "run" / path) == "global_step_20"


def test_a_folder_that_is_neither_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither a Hugging Face folder"):
        checkpoint.resolve(tmp_path, tmp_path / "out")


@pytest.fixture
def merger(tmp_path, monkeypatch):
    """A checkpoint of verl's, and the commands of its merger, which is replaced: the real one is tested with vLLM."""
    actor = tmp_path / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"1")
    calls: list[list[str]] = []

    def merge(command, **_):
        calls.append(command)
        target = checkpoint.Path(command[command.index("--target_dir") + 1])
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes((actor / "model_world_size_1_rank_0.pt").read_bytes())
        if (actor / "lora_train_meta.json").exists():
            (target / "lora_adapter").mkdir()
            (target / "lora_adapter" / "adapter_config.json").write_text("{}")
        return type("Done", (), {"returncode": 0, "stdout": ""})

    monkeypatch.setattr(checkpoint.subprocess, "run", merge)
    return actor, calls


def test_shards_are_merged_once_for_as_long_as_they_are_the_same(merger, tmp_path):
    (actor, calls), out = merger, tmp_path / "out"
    for _ in range(2):
        assert checkpoint.resolve(tmp_path / "global_step_3", out) == out / "model"
    assert len(calls) == 1
    assert calls[0][calls[0].index("--backend") + 1] == "fsdp"
    assert "--trust-remote-code" not in calls[0]
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"22")
    checkpoint.resolve(actor, out, trust_remote_code=True)
    assert len(calls) == 2
    assert "--trust-remote-code" in calls[1]
    assert (out / "model" / "model.safetensors").read_bytes() == b"22"


def test_other_shards_than_those_evaluated_are_refused_before_they_are_merged(merger, tmp_path):
    (actor, calls), out = merger, tmp_path / "out"
    checkpoint.check_shards(actor, out)
    checkpoint.resolve(actor, out)
    (out / "eval.json").write_text(json.dumps({"model": {"sha256": "1"}}))
    checkpoint.check_shards(actor, out)
    elsewhere = tmp_path / "copy"
    shutil.copytree(actor, elsewhere)
    checkpoint.check_shards(elsewhere, out)  # the same shards at another place
    for content in (b"2", b"22"):
        (elsewhere / "model_world_size_1_rank_0.pt").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"(?s)of the shards in {actor}, not of {elsewhere}.*--new"):
            checkpoint.check_shards(elsewhere, out)
    (out / "eval.json").write_text(json.dumps({"model": {"name": "m", "tag": None}}))
    with pytest.raises(ConfigError, match="of the model m of a server"):
        checkpoint.check_shards(actor, out)
    assert len(calls) == 1


def test_a_difference_anywhere_in_a_large_shard_that_training_changed_is_seen(tmp_path):
    shard = tmp_path / "model_world_size_1_rank_0.pt"
    content = bytearray(100 * checkpoint.SAMPLED)
    shard.write_bytes(content)
    before = checkpoint._sampled(tmp_path)
    content[50 * checkpoint.SAMPLED : 60 * checkpoint.SAMPLED] = b"1" * 10 * checkpoint.SAMPLED
    shard.write_bytes(content)
    assert checkpoint._sampled(tmp_path) != before


def test_an_adapter_that_the_merger_leaves_beside_the_weights_is_refused(merger, tmp_path):
    """At each call, without merging again; the folder that the message names stays."""
    (actor, calls), out = merger, tmp_path / "out"
    (actor / "lora_train_meta.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"(?s)model/lora_adapter is a LoRA adapter.*merge_and_unload"):
            checkpoint.resolve(actor, out)
    assert len(calls) == 1
    assert (out / "model" / "lora_adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize("place", [".", "lora_adapter"])
def test_a_folder_of_hugging_face_with_an_adapter_is_refused(tmp_path, place):
    folder = hugging_face(tmp_path / "model")
    (folder / place).mkdir(exist_ok=True)
    (folder / place / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a LoRA adapter, which would be left out"):
        checkpoint.resolve(folder, tmp_path / "out")


def test_options_of_vllm_as_words():
    options = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "quantization": None}
    words = cli_words({**options, "hf_overrides": {"a": [1]}})
    assert words[:-1] == ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--hf-overrides"]
    assert json.loads(words[-1]) == {"a": [1]}
