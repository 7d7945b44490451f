"""``turnkey recipe``: what is printed is what a run composes, and says where each value is from."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.paper_names import PAPER_NAMES
from verl_turnkey.plugins.cli.check import dry_run, show
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config import command_line
from verl_turnkey.plugins.config.agent import STATES
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.schema import credit_modify, credit_params, loss_params, turnkey_config
from verl_turnkey.plugins.gateway.limits import PARAMETERS
from verl_turnkey.plugins.gateway.rehearsal import WHY
from verl_turnkey.plugins.rollout.strategies import read_strategy

SHOWN = yaml.safe_load((Path(__file__).parents[3] / "data/shown_recipes.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("words", SHOWN)
def test_every_value_with_its_origin(words):
    done = CliRunner().invoke(app, ["recipe", *words.split()])
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert f"# turnkey recipe {words}".replace("turnkey.env.kwargs={size:4}", "'turnkey.env.kwargs={size:4}'") in lines
    for line in SHOWN[words]:
        assert line in lines


def run(*words: str) -> object:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return OmegaConf.to_container(compose("ppo_trainer", overrides=[*words]))


def test_what_is_printed_is_a_recipe_that_composes_to_the_same(tmp_path: Path):
    words = ["+turnkey=proxmo", "+turnkey/env=search", "+turnkey/loss=a3po", "+turnkey/device=cpu"]
    words += ["turnkey.rollout.stop=['\n','a: # b']", "turnkey.rollout.system='true'", "+trainer.mine={a: [1, null]}"]
    (tmp_path / "turnkey").mkdir()
    (tmp_path / "turnkey" / "mine.yaml").write_text(show(words), encoding="utf-8")
    mine = ["+turnkey=mine", f"hydra.searchpath=[file://{tmp_path}]"]
    assert run(*mine) == run(*words)
    again = show(mine)
    assert set(re.findall(r"  # (.*)$", again, re.MULTILINE)) == {"mine"}


def test_a_recipe_of_ones_own_builds_on_a_method(tmp_path: Path):
    (tmp_path / "turnkey").mkdir()
    own = "# @package _global_\ndefaults: [gigpo, _self_]\nturnkey:\n  credit:\n    gamma: 0.5\n"
    (tmp_path / "turnkey" / "mine.yaml").write_text(own, encoding="utf-8")
    lines = [
        " ".join(line.split()) for line in show(["+turnkey=mine", f"hydra.searchpath=[file://{tmp_path}]"]).splitlines()
    ]
    for line in ("adv_estimator: gigpo # gigpo", "gamma: 0.5 # mine", "norm: mean_std # gigpo", "max_turns: 50 # base"):
        assert line in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gigop", "did you mean 'gigpo'"),
        ("gigpo +turnkey/env=babyi", "'babyai'"),
        ("gigpo turnkey.rollout.histori=3", "turnkey.rollout.histori: unknown key.*'history'"),
        ("gigpo algorithm.gama=0.9", "algorithm.gama"),
        ("gigpo +turnkey.credit.gama=0.9", "turnkey.credit.gama.*'gamma'"),
        ("gigpo turnkey.rollout.max_turns=many", "turnkey.rollout.max_turns.*an integer"),
    ],
)
def test_what_a_run_would_refuse_is_refused(words, message):
    first, *rest = words.split()
    with pytest.raises(ConfigError, match=message):
        show([f"+turnkey={first}", *rest])


# --- the line of every paper's name composes, and is read as a run reads it -------------------------------------------


def names(line: str) -> str:
    return ", ".join(entry.names.split(" / ")[0] for entry in PAPER_NAMES if entry.line == line)


@pytest.mark.parametrize("line", sorted({entry.line for entry in PAPER_NAMES}), ids=names)
def test_the_line_of_a_paper_composes(line):
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    words = shlex.split(line)
    command_line.check(words)
    config = composed(words)
    turnkey = turnkey_config(config)
    credit_params(config, turnkey), credit_modify(config, turnkey), loss_params(config, turnkey)
    read_strategy(turnkey.rollout.strategy)
    assert str(config.algorithm.adv_estimator) in ADV_ESTIMATOR_REGISTRY
    assert str(config.actor_rollout_ref.actor.policy_loss.loss_mode) in POLICY_LOSS_REGISTRY


# --- the page "Train the agent you have": its code and its commands run, and its tables are what the gateway does -----


PAGE = (Path(__file__).parents[4] / "docs" / "your-agent.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TRY, TRAIN = (shlex.split(text.replace("\\\n", " ")) for language, text in BLOCKS if language == "bash")
EVALUATION = (Path(__file__).parents[4] / "docs" / "eval.md").read_text(encoding="utf-8")
OUTPUT = next(text for language, text in BLOCKS if language == "text")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for language, text in BLOCKS:
        if language == "python":
            (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
        if language == "json" and text.startswith("["):  # a list is a script; the other block is a body
            (tmp_path / "replies.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def first_column(heading: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", section(heading), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_agent_plays_its_task(folder: Path):
    assert TRY[:2] == ["turnkey", "agent"]
    done = CliRunner().invoke(app, TRY[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(OUTPUT), done.stdout
    own = ["turnkey.agent.state=my_states.py:last_results" if "state=" in word else word for word in TRY]
    done = CliRunner().invoke(app, own[1:])
    assert done.exit_code == 0, done.output
    assert "state  5  reward  1" in done.stdout


def test_the_launch_line_passes_all_checks(
    folder: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runpy.run_path(str(folder / "make_tasks.py"))
    assert len(pd.read_parquet("train.parquet")) == 64
    monkeypatch.setattr(sys, "argv", sys.argv)
    words = [word.replace("MODEL", str(model_dir)) for word in TRAIN[3:]]
    assert TRAIN[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert dry_run([*words, "+turnkey/device=cpu"]) == 0
    header = " ".join(capsys.readouterr().out.split())
    assert "my_agent.py:play" in header
    # What the page then does with the run: its newest checkpoint is evaluated, its turns are shown.
    assert f"log each turn in {folder}/runs/my_agent/turnkey_log" in header
    assert "hydra.run.dir=runs/my_agent/hydra" in words
    trainer = composed([word for word in words if not word.startswith("hydra.")]).trainer
    assert 0 < trainer.save_freq <= int(re.findall(r"steps (\d+)", header)[0])
    assert f"--checkpoint {trainer.default_local_dir}\n" in EVALUATION


def test_the_tables_are_what_the_gateway_does():
    assert first_column("States") == {*STATES, "module:function"}
    assert first_column("Rows") == set(WHY)
    named = " ".join(re.findall(r"`([^`]+)`", section("Parameters")))
    refused = {row.name for row in PARAMETERS if row.treatment == "refused"}
    left_out = {"best_of", "functions", "function_call", "modalities", "conversation", "prompt", "output_config.format",
                "structured_outputs", *(name for name in refused if name.startswith("guided_"))}  # fmt: skip
    assert {name for name in refused - left_out if name not in named.split()} == set()
    assert "guided_*" in named
