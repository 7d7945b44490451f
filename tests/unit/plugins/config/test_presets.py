"""Published settings: every value says where it is from, and the reader reads what YAML does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_turnkey.advantage import estimators
from verl_turnkey.losses import losses
from verl_turnkey.plugins.config import presets
from verl_turnkey.plugins.config.recipe_files import config_dir

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
def test_each_value_has_a_source(name):
    preset = presets.read(name)
    words = {*preset.sources, presets.CONVERTED, presets.REQUIRED}
    for setting in preset.settings:
        first = re.split(r"\W", setting.source)[0]
        assert first in words, (
            f"{name}.yaml, {setting.key}: expected a comment that begins with one of {sorted(words)}, "
            f"as `# script`, not {setting.source!r}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_each_source_is_used_and_says_what_it_is(name):
    preset = presets.read(name)
    sources = " ".join(setting.source for setting in preset.settings)
    for word, text in preset.sources.items():
        assert re.search(rf"\b{word}\b", sources), f"{name}.yaml explains {word!r}, which no value names"
        assert re.search(r"arXiv:\d{4}\.\d{5}", text) if word == "paper" else True
        assert re.search(r"[\w.-]+/[\w./-]+ at [0-9a-f]{8}\b", text) if word == "script" else True


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_reads_what_yaml_does(name):
    tree = yaml.safe_load((presets.folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    tree.pop("defaults", None)
    node = tree["turnkey"].pop("preset")
    preset = presets.read(name)
    assert node["name"] == name
    settings = {setting.key: setting.value for setting in preset.settings}
    assert dict(flat(tree)).items() <= settings.items()
    base = presets.read(preset.base).settings if preset.base else ()
    assert settings.keys() == dict(flat(tree)).keys() | {setting.key for setting in base}
    assert {key: value for key, value in node.items() if key != "name"}.items() <= vars(preset).items()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_preset_is_for_is_there(name):
    preset = presets.read(name)
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
