"""What the CPU's configuration chooses by machine and model."""

from __future__ import annotations

import json
import os

import pytest
from omegaconf import OmegaConf

from verl_turnkey.plugins.config import machine


@pytest.fixture
def model(tmp_path):
    """A folder with a model's ``config.json``, made of the given values."""

    def make(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make


def flags(monkeypatch, *names):
    monkeypatch.setattr(machine, "_flags", lambda: frozenset(names))


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_a_large_model_computes_in_bfloat16_where_the_processor_does(monkeypatch, model, flag):
    folder = model(hidden_size=576)
    for names, expected in (((flag, "avx2"), ("bf16", "bfloat16")), (("avx2",), ("fp32", "float32"))):
        flags(monkeypatch, *names)
        assert (machine.choose("param_dtype", folder), machine.choose("rollout_dtype", folder)) == expected


def test_a_small_model_stays_in_float32_on_a_thread(monkeypatch, model):
    flags(monkeypatch, "avx512_bf16")
    folder = model(hidden_size=64)
    assert [machine.choose(choice, folder) for choice in ("param_dtype", "rollout_dtype", "threads")] == [
        "fp32",
        "float32",
        "1",
    ]


@pytest.mark.parametrize("config", [{"hidden_size": 576}, {"text_config": {"hidden_size": 576}}, {}])
def test_a_large_model_gets_all_cores(model, config):
    assert machine.choose("threads", model(**config)) == str(len(os.sched_getaffinity(0)))


def test_a_model_on_the_hub_counts_as_large():
    assert machine.choose("threads", "someone/model") == str(len(os.sched_getaffinity(0)))


def test_choices_are_written_down_and_a_value_of_the_user_stays(monkeypatch, model):
    flags(monkeypatch, "amx_bf16")
    machine.register()
    keys = {key: f"${{turnkey_cpu:{choice},{model(hidden_size=576)}}}" for key, choice in (
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", "param_dtype"),
        ("actor_rollout_ref.rollout.dtype", "rollout_dtype"),
    )}  # fmt: skip
    config = OmegaConf.create({"critic": {"fsdp": {"mixed_precision": {"param_dtype": "fp32"}}}})
    for key, value in keys.items():
        OmegaConf.update(config, key, value)
    OmegaConf.set_struct(config, True)
    machine.settle(config)
    plain = OmegaConf.to_container(config, resolve=False)
    assert plain["actor_rollout_ref"] == {
        "actor": {"fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}},
        "rollout": {"dtype": "bfloat16"},
    }
    assert plain["critic"] == {"fsdp": {"mixed_precision": {"param_dtype": "fp32"}}}


def test_flags_are_those_of_this_processor():
    assert "sse2" in machine._flags()
