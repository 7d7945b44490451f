"""Published settings: every value says where it is from, and the reader reads what YAML does."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from intervals import around
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError, estimators
from verl_turnkey.losses import losses
from verl_turnkey.plugins.config import machine, presets
from verl_turnkey.plugins.config.recipe_files import config_dir, leaves
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify, credit_params, estimator_of, turnkey_config

NAMES = presets.names()
#: Of the machine, of the user's folders, or of neither paper nor method.
FOREIGN = re.compile(r"path|_files|_dir|nnodes|gpus|parallel|gpu_memory|offload|logger|project|experiment|probe|hosts")


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from flat(value, f"{key}.{name}".lstrip("."))
    else:
        yield key, tree


@pytest.mark.parametrize("name", NAMES)
def test_a_preset(name):
    preset = presets.read(name)
    words = {*preset.sources, presets.CONVERTED, presets.REQUIRED}
    for setting in preset.settings:
        first = re.split(r"\W", setting.source)[0]
        assert first in words, (
            f"{name}.yaml, {setting.key}: expected a comment that begins with one of {sorted(words)}, "
            f"as `# script`, not {setting.source!r}"
        )
    sources = " ".join(setting.source for setting in preset.settings)
    for word, text in preset.sources.items():
        assert re.search(rf"\b{word}\b", sources), f"{name}.yaml explains {word!r}, which no value names"
        assert re.search(r"arXiv:\d{4}\.\d{5}", text) if word == "paper" else True
        assert re.search(r"[\w.-]+/[\w./-]+ at [0-9a-f]{8}\b", text) if word == "script" else True
    tree = yaml.safe_load((presets.folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    tree.pop("defaults", None)
    node = tree["turnkey"].pop("preset")
    assert node["name"] == name
    settings = {setting.key: setting.value for setting in preset.settings}
    assert dict(flat(tree)).items() <= settings.items()
    base = presets.read(preset.base).settings if preset.base else ()
    assert settings.keys() == dict(flat(tree)).keys() | {setting.key for setting in base}
    assert {key: value for key, value in node.items() if key != "name"}.items() <= vars(preset).items()
    assert preset.title
    assert preset.method in estimators()
    assert preset.loss is None or preset.loss in losses()
    assert preset.env is None or (config_dir() / "turnkey" / "env" / f"{preset.env}.yaml").is_file()
    assert not {setting.key for setting in preset.settings} & set(preset.not_found)
    assert [setting.key for setting in preset.settings if FOREIGN.search(setting.key)] == []
    assert preset.switches[0] == f"+turnkey={preset.method}"
    assert preset.switches[-1] == f"+turnkey/preset={name}"


FILE = """\
# @package _global_
# Mine on a thing,
# in two lines
# paper: Mine, arXiv:0000.00000
# not found: a.b, c
turnkey:
  preset:
    name: mine
    method: gigpo
  rewards: [{name: step, weight: 10}]  # paper
data:
  deep:
    number: 1.0e-06  # script: of "this" # and that
    nothing: null
  text: ${data.deep.number}  # paper
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(presets, "folder", lambda: tmp_path)
    (tmp_path / "mine.yaml").write_text(FILE, encoding="utf-8")
    return tmp_path


def test_a_file_is_read(own):
    preset = presets.read("mine")
    assert preset.title == "Mine on a thing, in two lines"
    assert (preset.method, preset.loss, preset.env) == ("gigpo", None, None)
    assert preset.sources == {"paper": "Mine, arXiv:0000.00000"}
    assert preset.not_found == ("a.b", "c")
    assert [(setting.key, setting.value, setting.source) for setting in preset.settings] == [
        ("turnkey.rewards", [{"name": "step", "weight": 10}], "paper"),
        ("data.deep.number", 1e-6, 'script: of "this" # and that'),
        ("data.deep.nothing", None, ""),
        ("data.text", "${data.deep.number}", "paper"),
    ]


def test_one_that_builds_on_another_has_its_settings(own):
    more = "# @package _global_\n# More\ndefaults: [mine, _self_]\nturnkey:\n  preset:\n    name: more\n"
    (own / "more.yaml").write_text(f"{more}data:\n  text: other  # paper\n  new: 1  # paper\n", encoding="utf-8")
    preset, base = presets.read("more"), presets.read("mine")
    assert (preset.name, preset.base, preset.title, preset.method) == ("more", "mine", "More", "gigpo")
    assert preset.sources == base.sources
    assert preset.not_found == base.not_found
    assert {setting.key: setting.value for setting in preset.settings} == {
        **{setting.key: setting.value for setting in base.settings},
        "data.text": "other",
        "data.new": 1,
    }
    assert presets.names() == ["mine", "more"]


def test_a_line_that_is_none_is_named(own):
    (own / "mine.yaml").write_text(f"{FILE}list:\n- 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.yaml: expected .* not '- 1'"):
        presets.read("mine")


# --- Values of configuration files by their whole key -----------------------------------------------------------------
def test_what_is_missing_or_leads_nowhere_is_left_out():
    node = OmegaConf.create(
        {"a": 1, "lost": "${not.there}", "b": {"todo": "???", "c": [1, 2], "same": "${a}"}, "none": None}
    )
    assert dict(leaves(node)) == {"a": 1, "b.c": [1, 2], "b.same": 1, "none": None}


# --- What the node ``turnkey:`` takes at the edges of its ranges, and under which names methods are found -------------
NUMBERS = {
    "rollout.invalid_action_penalty": "[0, inf]",
    "env.step_timeout": "(0, inf]",
    "env.reset_timeout": "(0, inf]",
    "update.ratio_clip": "(0, 1)",
    "groups.keep": "(0, 1]",
    "groups.hint_high": "[0, 1]",
    "groups.hint_low": "[0, 0]",  # no more than hint_high
    "groups.decay": "[0, 1]",
    "log.share": "[0, 1]",
}
WHOLE = {
    **dict.fromkeys(("rollout.history", "env.restarts"), "[0, inf)"),
    **dict.fromkeys(("rollout.max_turns", "rollout.max_tokens_per_turn", "env.hosts"), "[1, inf)"),
    **dict.fromkeys(("update.mini_batches", "log.episodes_per_step", "log.keep_texts"), "[1, inf)"),
    **dict.fromkeys(("groups.n_low", "groups.n_high"), "[1, inf)"),
}


@pytest.mark.parametrize(("key", "interval"), [*NUMBERS.items(), *WHOLE.items()])
def test_what_is_just_possible_and_what_is_just_not(key, interval):
    part, name = key.split(".")
    inside, outside = around(interval, whole=key in WHOLE)
    for value in inside:
        assert getattr(getattr(turnkey_config({"turnkey": {part: {name: value}}}), part), name) == value
    for value in outside:
        message = rf"^turnkey\.{part}\.{name}: expected .*, got {re.escape(str(value))}$"
        with pytest.raises(ConfigError, match=message):
            turnkey_config({"turnkey": {part: {name: value}}})


@pytest.mark.parametrize(
    "node",
    [
        {"log": {"episodes_per_step": None, "keep_texts": None}},
        {"update": {"order": "reverse_turns", "mini_batches": None}},
        {"groups": {"keep": 0.01, "keep_by": "spread"}},
    ],
)
def test_what_goes_together(node):
    parsed = turnkey_config({"turnkey": node})
    for part, values in node.items():
        assert {key: getattr(getattr(parsed, part), key) for key in values} == values


def test_what_excludes_each_other():
    with pytest.raises(ConfigError, match=r"^turnkey\.rollout\.stop: expected .*, got \[''\]$"):
        turnkey_config({"turnkey": {"rollout": {"stop": [""]}}})
    with pytest.raises(ConfigError, match=r"^turnkey\.update\.mini_batches: expected null with order=reverse_turns"):
        turnkey_config({"turnkey": {"update": {"order": "reverse_turns", "mini_batches": 2}}})
    with pytest.raises(ConfigError, match=r"^turnkey\.groups\.keep_by: expected groups with keep=1, got 'spread'"):
        turnkey_config({"turnkey": {"groups": {"keep_by": "spread"}}})


@pytest.mark.parametrize("name", ["gigpo", "turnkey/gigpo"])
def test_an_estimator_is_ours_under_both_names_and_modifiers_are_no_parameters_of_it(name):
    config = {"algorithm": {"adv_estimator": name}}
    assert estimator_of(config).name == "gigpo"
    turnkey = TurnkeyConfig(credit={"gamma": 0.5, "modify": [{"name": "a_grae", "alpha": 0.5}, "empg"]})
    assert credit_params(config, turnkey).gamma == 0.5
    assert [modifier.spec.name for modifier in credit_modify(config, turnkey)] == ["a_grae", "empg"]
    assert credit_modify(config, turnkey)[0].params.alpha == 0.5
    assert credit_modify(config, TurnkeyConfig()) == ()
    with pytest.raises(
        ConfigError, match=r"turnkey\.credit\.modify\[0\]: unknown modifier 'a_gra'; did you mean 'a_grae'"
    ):
        credit_modify(config, TurnkeyConfig(credit={"modify": ["a_gra"]}))


def test_an_estimator_of_verls_is_not():
    config = {"algorithm": {"adv_estimator": "grpo"}}
    assert estimator_of(config) is None
    assert credit_modify(config, TurnkeyConfig(credit={"modify": ["empg"]})) == ()
    assert credit_params(config, TurnkeyConfig(credit={"gamma": 0.5})) is None


# --- What the CPU's configuration chooses by machine and model --------------------------------------------------------
@pytest.fixture
def model(tmp_path):
    """A folder with a model's ``config.json``, made of the given values."""

    def make(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make


def flags(monkeypatch, *names):
    monkeypatch.setattr(machine, "_flags", lambda: frozenset(names))


@pytest.mark.parametrize(
    ("flag", "config", "dtypes"),
    [
        ("avx512_bf16", {"hidden_size": 576}, ["bf16", "bfloat16"]),
        ("amx_bf16", {"text_config": {"hidden_size": 576}}, ["bf16", "bfloat16"]),
        ("amx_bf16", {}, ["bf16", "bfloat16"]),
        ("avx2", {"hidden_size": 576}, ["fp32", "float32"]),
        ("avx512_bf16", {"hidden_size": 64}, ["fp32", "float32"]),
    ],
)
def test_a_large_model_has_all_cores_and_bfloat16_where_the_processor_does(monkeypatch, model, flag, config, dtypes):
    flags(monkeypatch, flag, "sse2")
    threads = "1" if config.get("hidden_size") == 64 else str(len(os.sched_getaffinity(0)))
    choices = [machine.choose(choice, model(**config)) for choice in ("param_dtype", "rollout_dtype", "threads")]
    assert choices == [*dtypes, threads]
    assert machine.choose("threads", "someone/model") == str(len(os.sched_getaffinity(0)))  # of the hub


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
