"""The recipe files against the dataclasses whose parameters they hold."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import write_tables
import yaml

from verl_turnkey.plugins.cli import tables
from verl_turnkey.plugins.config.recipe_files import config_dir

RECIPES = write_tables.recipes()
METHODS = [name for name in write_tables.names() if name != "base"]


def text(recipe: str) -> str:
    return (config_dir() / "turnkey" / f"{recipe}.yaml").read_text(encoding="utf-8")


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}")
    else:
        yield key, tree


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_parameters_of_a_recipe_are_the_dataclass_s(recipe):
    assert text(recipe) == write_tables.updated(recipe, text(recipe)), "`tools/write_tables.py` writes it"


SPECS = [spec for of in (tables.shipped, tables.shipped_losses, tables.shipped_modifiers) for spec in of().values()]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_each_parameter_has_a_comment(spec):
    documented = tables.attribute_docs(spec.params)
    assert [field.name for field in fields(spec.params) if not documented.get(field.name)] == []


@pytest.mark.parametrize("method", METHODS)
def test_a_method_repeats_nothing_of_base(method):
    file = yaml.safe_load(text(method))
    assert file.pop("defaults") == ["base", "_self_"]
    assert not set(map(str, leaves(file))) & set(map(str, leaves(yaml.safe_load(text("base")))))


@pytest.mark.parametrize("recipe", ["base", "seeupo", "loss/rebel", "modifier/grsd"])
def test_what_the_code_says_is_written_and_the_rest_is_left(recipe):
    as_it_is = text(recipe)
    stale = as_it_is.replace("3.0", "2.0").replace("eta: 1.0", "eta: 1.0\n    tau: 1").replace("# gymnasium", "# an")
    stale = stale.replace("bound: 0.2", "bound: 0.3")
    assert stale != as_it_is
    assert write_tables.updated(recipe, stale) == as_it_is
    own = as_it_is.replace("adv_estimator: ", "adv_estimator: my_").replace("loss_mode: ", "loss_mode: my_")
    assert write_tables.updated(recipe, own) == own


def test_a_file_without_the_key_is_named():
    with pytest.raises(ValueError, match=r"gigpo\.yaml: expected a line '  credit:'"):
        write_tables.updated("gigpo", text("gigpo").replace("credit:", "credits:"))


@pytest.mark.parametrize("recipe", ["grpo_steps", "loss/psft", "modifier/empg"])
def test_a_new_file_is_the_one_shipped(recipe):
    assert write_tables.render(recipe) == text(recipe)


def test_files_are_written_only_where_something_changed(tmp_path):
    folder = tmp_path / "recipe" / "config" / "turnkey"
    (folder / "loss").mkdir(parents=True)
    (folder / "modifier").mkdir()
    for recipe in RECIPES:
        stale = text(recipe).replace("weights: paper", "weights: code").replace("clip_high: 0.28", "clip_high: 0.2")
        (folder / f"{recipe}.yaml").write_text(stale, encoding="utf-8")
    assert write_tables.write_recipes(tmp_path) == [folder / "hgpo.yaml", folder / "loss" / "psft.yaml"]
    assert (folder / "hgpo.yaml").read_text(encoding="utf-8") == text("hgpo")
    (folder / "rebn.yaml").unlink()
    assert write_tables.write_recipes(tmp_path) == [folder / "rebn.yaml"]
    assert write_tables.write_recipes(tmp_path) == []
