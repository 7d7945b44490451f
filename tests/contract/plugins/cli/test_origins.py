"""``turnkey recipe``: what is printed is what a run composes, and says where each value is from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli.check import show
from verl_turnkey.plugins.cli.main import app

# words -> lines of the output, without the spaces that align it
SHOWN = {
    "gigpo": ["adv_estimator: gigpo # gigpo", "gamma: 0.95 # gigpo", "max_turns: 50 # base", "loss: {} # base"],
    "gigpo +turnkey/env=babyai algorithm.gamma=0.9": [
        'level: "BabyAI-GoToLocal-v0" # env/babyai',
        "max_turns: 64 # env/babyai",
        "step_timeout: 30.0 # base",
        "gamma: 0.9 # command line",
        "gamma: 0.95 # gigpo",
    ],
    "hgpo +turnkey/loss=psft turnkey.loss.clip_low=0.1 turnkey.credit.alpha=2": [
        "loss_mode: psft # loss/psft",
        "clip_low: 0.1 # command line",
        "clip_high: 0.28 # loss/psft",
        "alpha: 2 # command line",
    ],
    "seeupo turnkey.env.kwargs={size:4} +turnkey/env=frozenlake": [
        "order: reverse_turns # seeupo",
        "size: 4 # command line",
        "slippery: false # env/frozenlake",
    ],
    "rebn +turnkey/device=cpu": ["device: cpu # device/cpu", 'VLLM_CPU_KVCACHE_SPACE: "1" # device/cpu'],
    # not in any file: the estimator's and the loss's own
    "base algorithm.adv_estimator=rebn +turnkey.credit.gamma=0.5": [
        "gamma: 0.5 # command line",
        "std: sample # default",
        "adv_estimator: rebn # command line",
    ],
    "base algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=st_ppo": [
        "modify: [] # base",
        "clip_low: 0.2 # default",
        "divide: above_one # default",
    ],
}


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
