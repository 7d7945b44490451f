"""``turnkey list``: what there is, under papers' names too, for a terminal, a page and scripts."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import write_tables
import yaml
from typer.testing import CliRunner

from verl_turnkey.advantage.paper_names import ABSENT, PAPER_NAMES, PaperName, absent, paper_name, plain
from verl_turnkey.envs.rewards import rewards
from verl_turnkey.plugins.cli import tables
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.tables import explain, shipped, shipped_losses, shipped_modifiers
from verl_turnkey.plugins.config.recipe_files import config_dir
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.rollout.strategies import strategies

PARTS = {"modifier": shipped_modifiers(), "loss": shipped_losses(), "reward": rewards(), "strategy": strategies()}
WORDS = re.compile(r"(?:the (?P<kind>modifier|loss|reward)s? |)(?P<name>\w+)(?: and (?P<second>\w+))?")


def listed(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["list", *words], catch_exceptions=bool(code))
    assert done.exit_code == code, done.output
    return done


@pytest.mark.parametrize("command", ["methods", "modifiers", "losses", "rewards", "keys", "columns", "envs", "presets"])
def test_lists_are_for_a_terminal_for_a_page_or_json_for_scripts(command):
    output, page = listed(command).output, listed(command, "--markdown").output
    assert page.startswith("| ")
    assert "|---|" in page
    assert "|" not in output
    assert max(map(len, output.splitlines())) <= 190
    rows = json.loads(listed(command, "--json").output)
    assert len(rows) == len(page.splitlines()) - 2
    assert all(row.keys() == rows[0].keys() for row in rows)


def test_environments_fit_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = listed("envs").output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "turnkey/ALFWorld-v0  +turnkey/env=alfworld" in lines
    assert len(lines) < 110


def test_a_preset_is_shown_with_switches_values_and_sources():
    output = listed("presets", "gigpo_webshop_7b").output
    assert "+turnkey=gigpo +turnkey/env=webshop +turnkey/preset=gigpo_webshop_7b" in output
    assert re.search(r"turnkey\.credit\.gamma +0\.95 ", output)
    assert "paper: GiGPO, arXiv:2505.10978" in output
    assert "| `turnkey.credit.gamma` | `0.95` |" in listed("presets", "gigpo_webshop_7b", "--markdown").output
    assert "did you mean 'gigpo_webshop_7b'?" in listed("presets", "gigpo_webshp_7b", code=2).output


def test_a_narrow_terminal_shows_the_whole_table():
    markdown = tables.methods()
    narrow = tables.on_terminal(markdown, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    assert all(f" +turnkey={name} " in narrow for name in shipped())
    short = tables.on_terminal(tables.overview(), 80).splitlines()
    assert max(map(len, short)) <= 80
    assert next(line for line in short if "+turnkey=gigpo " in line).count("compares each trajectory") == 1
    wide = tables.on_terminal(markdown, 400)
    row = next(line for line in wide.splitlines() if "+turnkey=rebn " in line)
    assert "normalizes each step" in row
    assert "arXiv:2510.01051" in row
    assert "gamma=0.9, std=sample, epsilon=1.0e-09" in wide


# --- names of papers: what they are called here is registered, and what is called absent is not ours ------------------


@pytest.mark.parametrize("entry", PAPER_NAMES, ids=lambda entry: plain(entry.names.split(" / ")[0]))
def test_what_is_here_is_registered(entry: PaperName):
    if entry.ours.startswith("verl's "):
        return
    if entry.ours.startswith("turnkey."):
        node = TurnkeyConfig()
        for part in entry.ours.split(".")[1:]:
            node = getattr(node, part)
        return
    main, _, rest = entry.ours.partition(" with ")
    match = WORDS.fullmatch(main)
    assert match, entry.ours
    for name in filter(None, (match["name"], match["second"])):
        assert name in (PARTS[match["kind"]] if match["kind"] else shipped()), entry.ours
    for kind in ("strategy", "reward", "loss"):
        if part := re.search(rf"the {kind} (\w+)", rest):
            assert part[1] in PARTS[kind]


def test_every_method_modifier_and_loss_is_in_the_table():
    names = [entry.ours for entry in PAPER_NAMES]
    for kind, registered in (("", shipped()), ("the modifier ", shipped_modifiers()), ("the loss ", shipped_losses())):
        for name, spec in registered.items():
            also_a_method = bool(kind) and name in shipped()
            named = any(re.match(rf"{kind}{name}\b", ours) for ours in names)
            assert spec.paper == "this project's own" or also_a_method or named, name


def test_what_is_absent_is_not_ours_and_has_one_reason():
    names = [name for entry in ABSENT for name in entry.names.split(" / ")]
    assert len({plain(name) for name in names}) == len(names)
    assert [name for name in names if paper_name(name) or plain(name) in map(plain, shipped())] == []
    assert absent("hi_agent") is ABSENT[0]
    assert absent("gigpo") is None
    why = "the formula of its foresight advantage is not published"
    assert " ".join(listed("methods", "arXiv:2510.14388").output.split()) == f"arXiv:2510.14388 is not here: {why}"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        # papers have other names for them
        ("gtpo", ["here, gtpo is turn_norm (also: group turn policy optimization, 2511.14846)",
                  "\n    +turnkey=turn_norm\n", "note: statistics are of the group", "  turnkey.credit.over=group",
                  "page: docs/methods/turn_norm.md"]),
        # ours
        ("hae", ["hae is a method of this package (also: HiPER, 2602.16165)\n\n    +turnkey=hae\n",
                 "  needs extra.switch"]),
        # parts beside the method
        ("SPO", ["method progress: ", "loss segment_mask: ", "strategy spo_chain: ", "  turnkey.loss.threshold=0.9"]),
        ("empg", ["\nmodifier empg: "]),
        ("rank_shaping", ["rank_shaping is a modifier of this package (also: VERL, 2509.23808)", "\ndiffers: "]),
        ("dynamo_modulation", ["dynamo_modulation is a method of this package\n"]),
        ("StarPO", ["\ndiffers: "]),
    ],
)  # fmt: skip
def test_a_name_is_explained(name, parts):
    output = listed("methods", name).output
    assert output.startswith((f"{name} is ", f"here, {name} is "))
    assert [part for part in parts if part not in output] == []


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("rtmc", ["Q(s, a) = mean of gamma^(T-1-t) R", "Source: arXiv:2604.11037", "  turnkey.credit."]),
        ("SPO", ["method progress: ", "V(t+1) - V(t)", "  turnkey.credit.alpha=",
                 "loss segment_mask: ", "Source: arXiv", "  turnkey.loss.threshold=",
                 "strategy spo_chain: ", "whose probability was below 'below'", "  every=5"]),
    ],
)  # fmt: skip
def test_a_formula_is_shown_with_its_source_and_then_the_parameters(name, texts):
    output = listed("methods", name, "--formula").output
    assert re.search(".*".join(map(re.escape, texts)), output, re.DOTALL)
    assert "Source: arXiv" not in listed("methods", name).output


@pytest.mark.parametrize("name", [*shipped(), *(entry.names.split(" / ")[0] for entry in PAPER_NAMES)])
def test_a_formula_has_no_markup(name):
    text = explain(name, formula=True)
    assert re.findall(r"``|::|:\w+:|\*\w+\*|Raises:", text) == []
    prose = [line for line in text.splitlines() if not line.startswith("    ")]
    assert all(len(line) <= 80 for line in prose if " " in line.strip())


@pytest.mark.parametrize("words", [("methods", "gigpo", "--json"), ("rewards", "length", "--markdown")])
def test_an_explanation_has_one_form(words):
    assert "leave out NAME" in " ".join(listed(*words, code=2).output.split())


def test_an_unknown_name_is_refused_with_the_closest():
    assert "'vinepo'; did you mean 'VinePPO'?" in str(listed("methods", "vinepo", code=1).exception)


@pytest.mark.parametrize("name", sorted(rewards()))
def test_a_component_of_rewards_is_explained_with_all_its_options(name):
    output = listed("rewards", name).output
    assert re.findall(r"^  (\w+)(?==|  )", output, re.MULTILINE) == [
        entry.name for entry in fields(rewards()[name].cls)
    ]


def test_an_unknown_component_is_refused_with_the_closest():
    assert "'jdge'; did you mean 'judge'?" in str(listed("rewards", "jdge", code=1).exception)


@pytest.mark.parametrize("name", [*shipped(), *(entry.names.split(" / ")[0] for entry in PAPER_NAMES)])
def test_every_name_is_explained_in_80_columns(name):
    lines = explain(name).splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("    +") and " " in line.strip())


# --- recipe files, against the dataclasses whose parameters they hold -------------------------------------------------


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


def test_a_key_is_listed_with_its_default_and_its_meaning() -> None:
    rows = {row["key"]: row for row in json.loads(listed("keys", "--json").output)}
    assert rows["turnkey.env.restarts"]["default"] == "100"
    assert rows["turnkey.env.kwargs"]["default"] == "{}"
    assert all(row["meaning"] and "=" not in key for key, row in rows.items())
    assert "null: every task of the data names its own" in " ".join(listed("keys").output.split())
