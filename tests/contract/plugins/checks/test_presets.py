"""Every preset composes with what it is for, passes the driver's checks, and all that it sets arrives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from contract_tools import driven
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import estimators
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.checks.header import header
from verl_turnkey.plugins.config import presets

#: What a launch line gives where a preset has found nothing, and verl's default does not do.
GIVEN = {
    "data.max_prompt_length": "2048",
    "data.max_response_length": "4096",
    "data.train_batch_size": "256",
    "actor_rollout_ref.rollout.n": "8",
    "turnkey.rollout.max_tokens_per_turn": "1024",
    "turnkey.rollout.max_turns": "20",
    "actor_rollout_ref.actor.optim.lr": "1e-6",
    "actor_rollout_ref.actor.kl_loss_coef": "0.001",
}

#: Their steps are more than a few tasks have, in the epochs that they set or verl's.
LONG = ("hdpo_tools_8b", "slate_search_7b")

Run = Callable[..., tuple[DictConfig, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(*words)`` goes the way of the driver up to the start of Ray: the configuration, and what it printed."""
    folder = tmp_path_factory.mktemp("presets")
    for name, env_id in (("recipes", ""), ("own", "turnkey/MiniGrid-v0")):
        for more, number in (("", 256), ("_many", 10_000)):
            tasks = [Task(env_id, seed) for seed in range(number)]
            write_parquet(folder / f"{name}{more}.parquet", tasks, "x", "train")

    def run(*words: str, tasks: str = "recipes") -> tuple[DictConfig, str]:
        line = [*words, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=some/model"]
        line += ["trainer.n_gpus_per_node=8"]
        line += ["turnkey.env.probe=false"] if words[0].startswith("+turnkey=") else []
        line += [f"data.{key}={folder}/{tasks}.parquet" for key in ("train_files", "val_files")]
        return driven(line)

    return run


def own_lines(preset: presets.Preset, model: Path) -> list[str]:
    """The words that the preset leaves to the launch line."""
    columns = [c.removeprefix("extra.") for c in estimators()[str(preset.method)].needs if c.startswith("extra.")]
    supplied = ("turnkey.rollout.strategy.", "turnkey.prm.")
    if any(setting.key.startswith(supplied) for setting in preset.settings):
        columns = []  # the strategy or the model gives them
    parts = ["{name: step}", *(f"{{name: step, label: {name}, column: {name}}}" for name in columns)]
    values = {**GIVEN, "turnkey.rewards": f"[{','.join(parts)}]"}
    critic = [f"critic.model.path={model}"] if "value" in estimators()[str(preset.method)].needs else []
    return [*critic, *(f"{key}={values[key]}" for key in preset.not_found)]


@pytest.mark.parametrize("name", ["gigpo_alfworld_1.5b", "turn_ppo_sokoban"])
def test_a_preset_goes_with_a_device(run: Run, model_dir: Path, name: str):
    preset = presets.read(name)
    switch, *others = preset.switches
    ranks = "ray_kwargs.ray_init.num_gpus=8"  # some set the GPUs of their paper
    config, printed = run(switch, "+turnkey/device=cpu", *others, *own_lines(preset, model_dir), ranks)
    assert f"  preset       {name}" in printed
    assert config.trainer.device == "cpu"


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_passes_and_arrives(run: Run, model_dir: Path, name: str):
    preset = presets.read(name)
    plays = preset.env or any(setting.key == "turnkey.env.id" for setting in preset.settings)
    tasks = ("recipes" if plays else "own") + "_many" * (name in LONG)
    config, printed = run(*preset.switches, *own_lines(preset, model_dir), tasks=tasks)
    for setting in preset.settings:
        value = OmegaConf.select(config, setting.key, throw_on_missing=True)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        if str(setting.value).startswith("${"):
            assert value == OmegaConf.select(config, setting.value.strip("${}"))
        else:
            assert value == setting.value, setting.key
    assert config.algorithm.adv_estimator == preset.method
    assert f"  preset       {name}, all as published" in printed
    # Of the test's own files: it validates on what it trains.
    assert all("validation tasks share their" in text for text in re.findall(r"^  warning +(.*)", printed, re.M))


def test_the_header_says_what_the_line_changes(run: Run):
    preset = presets.read("gigpo_webshop_7b")
    _, printed = run(*preset.switches, "trainer.total_training_steps=20", "turnkey.rewards=[{name: step}]")
    header = " ".join(printed.split())
    assert "preset gigpo_webshop_7b, except" in header
    assert "turnkey.rewards=[{'name': 'step'}] (published [{'name': 'step', 'weight': 10}])" in header
    assert "trainer.total_training_steps=20 (published 150)" in header
    assert "max_turns" not in header.split("estimator")[0]


def test_a_preset_of_ones_own_is_named(run: Run):
    config, _ = run("+turnkey=gigpo", "+turnkey/env=babyai", "turnkey.preset.name=mine", "data.train_batch_size=256")
    assert header(config)[1] == "  preset       mine"
