"""The page on rewards names every component and option, with the right defaults, and its code runs."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml

from verl_turnkey.envs.rewards import compose, rewards

PAGE = (Path(__file__).parents[4] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for kind in ("python", "yaml")}


@pytest.mark.parametrize("name", sorted(set(rewards()) - {"arena", "judge", "scorer", "r1_router"}))
def test_a_component_with_its_options_and_defaults(name):
    [row] = re.findall(rf"^\| `{name}` \|.*\| (.*)\|$", PAGE, re.MULTILINE)
    options = fields(rewards()[name].cls)
    assert re.findall(r"`(\w+)`", row) == [option.name for option in options]
    for option in options:
        if option.default is not MISSING:
            default = (
                "null"
                if option.default is None
                else f"{option.default:g}"
                if isinstance(option.default, float)
                else str(option.default).lower()
                if isinstance(option.default, bool)
                else option.default
            )
            assert re.search(rf"`{option.name}` \({default}\b", row)


def test_costs():
    [names] = re.findall(r"^(.*): they need a `weight`", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", names)) == {name for name, spec in rewards().items() if spec.cost}


def test_the_options_of_the_judge():
    table = PAGE.split("## A model as the judge\n")[1].split("\n## ")[0]
    cells = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    options = {option.name: option for option in fields(rewards()["judge"].cls)}
    assert {*cells, "url", "model"} == set(options)
    for name in (
        "api_key_env",
        "per",
        "system",
        "score_key",
        "score_range",
        "timeout",
        "retries",
        "backoff",
        "concurrency",
        "cache",
        "cache_size",
    ):
        default = options[name].default
        assert yaml.safe_load(cells[name]) == (list(default) if isinstance(default, tuple) else default)


def test_the_options_of_the_scorer():
    section = PAGE.split("## A process reward model\n")[1]
    cells = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    [others] = re.findall(r"^(`api_key_env`.*) are those of the judge", section, re.MULTILINE)
    options = {option.name: option for option in fields(rewards()["scorer"].cls)}
    assert {*cells, *re.findall(r"`(\w+)`", others)} == set(options)
    for name in ("model", "api", "max_chars"):
        assert yaml.safe_load(cells[name]) == options[name].default
    judged = {option.name: option.default for option in fields(rewards()["judge"].cls)}
    assert all(options[name].default == judged[name] for name in re.findall(r"`(\w+)`", others))


def test_the_examples(monkeypatch, tmp_path):
    (tmp_path / "my_rewards.py").write_text(next(block for block in BLOCKS["python"] if "my_rewards.py" in block))
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in BLOCKS["yaml"]:
        assert compose(yaml.safe_load(block)["turnkey"]["rewards"]).labels
    for block in BLOCKS["python"]:
        comments = re.findall(r"print\(.*\)  # (.*)", block)
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, "docs/rewards.md", "exec"), {})
        assert printed.getvalue().splitlines() == comments
    assert BLOCKS["yaml"]
