"""Every recipe composes and passes; every bad input is refused in the driver, with the key to change."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import cycle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import write_tables
from contract_tools import AWKWARD, Compose
from launch_lines import write_llava, write_qwen_vl
from omegaconf import OmegaConf
from pyarrow import parquet
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import need_critic
from verl.utils import hf_processor
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_turnkey.advantage import ConfigError, estimators
from verl_turnkey.envs.errors import ModuleImportError, TaskFormatError
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.losses import losses
from verl_turnkey.plugins.checks import driver, images
from verl_turnkey.plugins.checks.driver import resolve_and_check as check
from verl_turnkey.plugins.cli import tables
from verl_turnkey.plugins.config.recipe_files import config_dir
from verl_turnkey.plugins.config.schema import RolloutConfig, turnkey_config
from verl_turnkey.plugins.credit.trainer_columns import OF_TEACHER, SOURCES
from verl_turnkey.plugins.log.writer import SEGMENT, write_segment
from verl_turnkey.plugins.rollout.worker import recorded
from verl_turnkey.plugins.verl_api import internals


def groups(folder: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / "turnkey" / folder).glob("*.yaml"))


def checked(config) -> None:
    check(config, use_critic=need_critic(config))


# --- what must work ---------------------------------------------------------------------------------------------------


ON = [None, *groups("device")]
#: Methods, losses and environments in turn with others; the last: whether the environment is played, which takes a
#: second and does not depend on the others.
COMBINATIONS = [
    *((name, "vanilla", "babyai", ON[i % len(ON)], False) for i, name in enumerate(write_tables.names())),
    *(
        ("hdpo" if loss == "hdpo" else "gigpo", loss, "babyai", None, False)
        for loss in groups("loss")
        if loss != "vanilla"
    ),
    *(
        (method, "vanilla", env, None, True)
        for env, method in zip(groups("env"), cycle(write_tables.names()), strict=False)
    ),
]


@pytest.mark.parametrize(("method", "loss", "env", "device", "probe"), COMBINATIONS)
def test_recipes_combine_freely(compose: Compose, tmp_path, method, loss, env, device, probe):
    tasks = [Task("", seed) for seed in range(4)]  # the id is the recipe's
    write_parquet(tmp_path / "tasks.parquet", tasks, "x", "train")
    files = [f"data.{key}={tmp_path}/tasks.parquet" for key in ("train_files", "val_files")]
    overrides = [f"+turnkey={method}", f"+turnkey/loss={loss}", f"+turnkey/env={env}"]
    overrides += [f"+turnkey/device={device}"] if device else []
    config = compose(*overrides, *files, *(["algorithm.adv_estimator=grpo"] if method == "base" else []))
    recipe = OmegaConf.load(config_dir() / "turnkey" / "env" / f"{env}.yaml")
    if (
        recipe.rollout.get("prompt") == "conversation"
        and recipe.rollout.max_tokens_per_turn > config.data.max_response_length
    ):
        # The budget of a conversation is not the environment's to say.
        with pytest.raises(ConfigError, match=r"Raise data\.max_response_length"):
            checked(config)
        config.data.max_response_length = 8192
    probe = probe and recipe.env.id == "turnkey/MiniGrid-v0"  # the tasks here are, and all packages are there
    config.turnkey.env.probe = probe
    if config.turnkey.teacher.source is not None:
        config.turnkey.teacher.source = "group_success"  # which needs no column of the data
    columns = [] if method == "base" else [c for c in estimators()[method].needs if c.startswith("extra.")]
    config.turnkey.rewards += [{"name": "step", "label": c, "column": c.removeprefix("extra.")} for c in columns]
    checked(config)
    assert config.trainer.v1.trainer_mode == "turnkey_sync"
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "turnkey_env"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == loss
    assert config.turnkey.env.id == recipe.env.id
    assert dict(config.turnkey.rollout) == {**vars(RolloutConfig()), **recipe.rollout}
    assert config.trainer.device == (device or "cuda")
    assert {**config.turnkey.loss} == ({} if loss == "vanilla" else vars(losses()[loss].params()))
    if method != "base":
        assert config.algorithm.adv_estimator == method
        expected = estimators()[method].params
        assert {**config.turnkey.credit} == {"modify": [], **vars(expected())}


def test_every_group_has_a_test_above():
    folders = {path.name for path in (config_dir() / "turnkey").iterdir() if path.is_dir()}
    # presets: test_presets.py; agents: envs/agents; modifiers: below
    assert folders == {"loss", "env", "device", "preset", "agent", "modifier"}
    assert groups("") == sorted([*write_tables.names(), *write_tables.COMBINED])
    assert groups("loss") == sorted(["vanilla", *tables.shipped_losses()])


@pytest.mark.parametrize("name", groups("modifier"))
def test_the_recipe_of_a_modifier_is_its_defaults_and_a_text_where_it_needs_one(compose: Compose, name):
    config = compose("+turnkey=rebn", f"+turnkey/modifier={name}")
    assert name in tables.shipped_modifiers()
    spec = tables.shipped_modifiers()[name]
    assert config.turnkey.credit.modify == [{"name": name, **vars(spec.params())}]
    assert (config.turnkey.teacher.source is not None) == bool(OF_TEACHER & {*spec.needs})
    if config.turnkey.teacher.source is not None:
        config.turnkey.teacher.source = "group_success"  # which needs no column of the data
    own = [column for column in spec.needs if column.startswith("extra.") and column not in SOURCES]
    config.turnkey.rewards += [{"name": "step", "label": c, "column": c.removeprefix("extra.")} for c in own]
    checked(config)


def test_a_package_that_is_not_installed_is_named_before_ray(compose: Compose, monkeypatch: pytest.MonkeyPatch):
    config = compose("+turnkey=proxmo", "+turnkey/env=babyai")
    checked(config)
    monkeypatch.setattr("verl_turnkey.advantage.methods.proxmo.ProxmoParams.requires", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"'no_such_package'.*verl-turnkey\[proxmo\]"):
        checked(config)


def test_the_driver_names_each_start_of_a_logged_run(compose: Compose, tmp_path: Path):
    """Whatever the configuration says of an earlier one; without a log there is nothing to name."""
    switches = ["+turnkey=gigpo", "turnkey.log.segment=20260102T030405_00ff"]
    named = []
    for line in ([], [f"turnkey.log.trajectories={tmp_path}/log"], [f"turnkey.log.trajectories={tmp_path}/log"]):
        config = compose(*switches, *line)
        driver.validate(config, False, need_critic(config), lambda *_: None)
        named.append(config.turnkey.log.segment)
    assert named[0] == "20260102T030405_00ff"
    assert all(SEGMENT.fullmatch(name) for name in named)
    assert len(set(named)) == 3
    assert not (tmp_path / "log").exists()  # only the run itself writes


def test_the_driver_refuses_the_log_of_another_run(compose: Compose, tmp_path: Path):
    log = f"turnkey.log.trajectories={tmp_path}/log"
    earlier = compose("+turnkey=gigpo", "trainer.experiment_name=earlier", log)
    write_segment(tmp_path / "log", "20260102T030405_00ff", {"config": OmegaConf.to_container(earlier, resolve=True)})
    checked(earlier)
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name=earlier, here "):
        checked(compose("+turnkey=gigpo", log))


def test_the_driver_counts_the_tasks_of_a_validation(compose: Compose, tmp_path: Path, task_files: Path):
    """Of which turnkey.log.episodes_per_step are logged; verl takes data.val_max_samples of them."""
    held = parquet.read_metadata(task_files / "val.parquet").num_rows
    assert held > 1
    counted = []
    for line in (
        [],
        ["data.val_max_samples=1"],
        [f"data.val_files=[{task_files}/val.parquet,{task_files}/val.parquet]"],
    ):
        config = compose("+turnkey=gigpo", f"turnkey.log.trajectories={tmp_path}/log", *line)
        driver.validate(config, False, need_critic(config), lambda *_: None)
        counted.append(config.turnkey.log.validation_tasks)
    assert counted == [held, 1, 2 * held]


def test_a_run_that_does_not_mention_us_is_left_alone(compose: Compose, monkeypatch):
    monkeypatch.setattr(internals, "SUPPORTED_VERL", "<0.1")
    checked(compose("data.train_batch_size=1000", "actor_rollout_ref.actor.use_dynamic_bsz=false"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("fsdp_config.strategy=fsdp3", "fsdp_config.strategy=fsdp3: verl refuses this launch line: strategy fsdp3"),
        ("optim.warmup_style=cosin", "optim.warmup_style=cosin: verl refuses this launch line: assert self.warmup"),
    ],
)
def test_what_verl_itself_refuses_is_named(compose: Compose, setting: str, message: str):
    """Its assertions may say nothing."""
    config = compose("+turnkey=gigpo", "turnkey.env.probe=false", f"actor_rollout_ref.actor.{setting}")
    with pytest.raises(driver.Refused, match=re.escape(message)):
        driver.validate(config, False, need_critic(config), validate_config)


PIXELS = [np.zeros((28, 28, 3), np.uint8)]


def test_a_model_that_verl_can_show_images_is_not_refused(
    compose: Compose, tmp_path: Path, model_dir: Path, monkeypatch
):
    """Its files say so: torchvision, which its processor needs, may be missing here."""
    write_llava(tmp_path / "llava", model_dir)
    write_qwen_vl(tmp_path / "qwen_vl", model_dir)
    (tmp_path / "smol").mkdir()
    named = {"config": {"vision_config": {}}, "processor_config": {"processor_class": "SmolVLMProcessor"}}
    for name, content in named.items():
        (tmp_path / "smol" / f"{name}.json").write_text(json.dumps(content))
    for model, name in (("llava", "LlavaProcessor"), ("smol", "SmolVLMProcessor")):
        config = compose(f"actor_rollout_ref.model.path={tmp_path / model}")
        with pytest.raises(ConfigError, match=f"cannot take them: verl's hf_processor does not know {name}; choose"):
            images.check_images(config, turnkey_config(config), PIXELS)
    config = compose(f"actor_rollout_ref.model.path={tmp_path / 'qwen_vl'}")
    with pytest.raises(ConfigError, match="Qwen2_5_VLProcessor, which needs torchvision"):
        images.check_images(config, turnkey_config(config), PIXELS)
    monkeypatch.setattr(images, "find_spec", lambda name: name)
    images.check_images(config, turnkey_config(config), PIXELS)


def test_the_processors_of_the_rule_are_those_of_verl():
    code = inspect.getsource(hf_processor)
    assert {*re.findall(r'case "(\w+)"', code)} == {*images.KNOWN}


@pytest.mark.parametrize(("height", "width"), [(28, 28), (1, 1), (30, 200), (224, 224), (5000, 5000), (41, 43)])
def test_tokens_of_an_image_are_those_of_transformers(tmp_path, model_dir, height, width):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    write_qwen_vl(tmp_path, model_dir)
    rows, columns = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=12845056)
    assert images._tokens(images._files(tmp_path), height, width) == rows * columns // 28**2


# --- bad input: the message names the key and the closest match -------------------------------------------------------


def test_group_not_found_because_the_search_path_was_missing(compose: Compose):
    from omegaconf import open_dict

    config = compose()
    with open_dict(config):
        config.turnkey = "gigpo"
    with pytest.raises(ConfigError, match=r"is loaded"):
        checked(config)


@pytest.mark.parametrize(
    ("column", "method"),
    [
        ("turn_value", "progress"),
        ("prover_value", "progress"),
        ("gold_probability", "information_gain"),
        ("gold_probability", "grpo_steps +turnkey/modifier=trace"),
    ],
)
@pytest.mark.parametrize(
    "entry", ["name: scorer, url: 'http://h/c'", "name: judge, per: step, url: 'http://h', model: m"]
)
def test_what_rates_a_step_by_its_outcome_is_no_column_of_the_state_before(compose: Compose, column, method, entry):
    """The episode up to and including step t would be taken for the state that step t was taken in."""
    rewards = "turnkey.rewards=[{name: step}, {%s, column: %s}]"
    with pytest.raises(ConfigError, match=rf"rewards\[1\] \(.*, column: {column}\).*state before .* of your own"):
        checked(compose(*f"+turnkey={method}".split(), rewards % (entry, column)))
    checked(compose("+turnkey=gigpo", rewards % (entry, "turn_score")))


@pytest.mark.parametrize("task", ["{'question': '1 + 1?'}", {"question": "1 + 1?"}, "[1]", None])
def test_malformed_task_of_an_agent(compose: Compose, tmp_path, task_files, task):
    """A dict written as it is, and its ``str``; a row without a task gives the agent its prompt."""
    rows = pd.read_parquet(task_files / "train.parquet")
    rows["turnkey_task"] = [task] * len(rows)
    rows.to_parquet(tmp_path / "bad.parquet")
    agent = ("turnkey.agent.run=verl_turnkey.envs:make", "turnkey.rollout.max_tokens_per_turn=8")
    line = compose("+turnkey=gigpo", *agent, f"data.train_files={tmp_path}/bad.parquet")
    if task is None:
        checked(line)
        return
    with pytest.raises(TaskFormatError, match=r"bad\.parquet, row 0: column .*1.*Write it with json\.dumps"):
        checked(line)


def test_functions_in_files_are_found_from_every_working_directory(compose: Compose, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def act(text, admissible): ...\ndef summary(turns): ...\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "baseline.json").write_text('{"a": 1}')
    rewards = [
        "{name: step}",
        '{name: scorer, url: "http://h/classify", cache: kept, column: turn_score}',
        "{name: contrastive, file: baseline.json}",
        '{name: r1_router, embed: "own.py:act"}',
    ]
    config = compose(
        "+turnkey=gigpo",
        "turnkey.rollout.action_format=own.py:act",
        "turnkey.rollout.summary=own.py:summary",
        f"turnkey.rewards=[{', '.join(rewards)}]",
    )
    checked(config)
    paths = [config.turnkey.rewards[i][key] for i, key in enumerate(("cache", "file", "embed"), 1)]
    assert paths == [f"{tmp_path}/{name}" for name in ("kept", "baseline.json", "own.py:act")]
    assert config.turnkey.rollout.action_format == f"{tmp_path}/own.py:act"
    assert config.turnkey.rollout.summary == f"{tmp_path}/own.py:summary"


def test_options_that_are_no_paths_of_ours_stay_as_they_are(compose: Compose, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def score(steps, file): return [0.0] * len(steps)\n")
    monkeypatch.chdir(tmp_path)
    mine = '{name: "own.py:score", file: part one}'
    shipped = '{name: judge, url: "http://h/v1", model: m, cache: "s3://kept"}'
    config = compose("+turnkey=gigpo", f"turnkey.rewards=[{mine}, {shipped}]")
    checked(config)
    assert config.turnkey.rewards[0] == {"name": f"{tmp_path}/own.py:score", "file": "part one"}
    assert config.turnkey.rewards[1]["cache"] == "s3://kept"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"on_reset": "raise"}, r"contract/Awkward-v0.*\(reset\).*the reset is broken(.|\n)*turnkey\.env\.probe=false"),
        ({"on_reset": "hang"}, r"longer than 15 s; raise turnkey\.env\.reset_timeout(.|\n)*awkward_env\.py\", line"),
        ({"on_reset": "die"}, r"\(process\).*ended with exit status 5"),
        ({"on_reset": "none"}, r"info must be a dict, not NoneType None"),
        ({"observation": "raise"}, r"\(step\).*the step is broken"),
        ({"observation": "nan"}, r"\(reward\).*must be a finite number, not float nan"),
    ],
)
def test_environment_that_cannot_be_played(compose: Compose, tmp_path, kwargs, message):
    tasks = [Task("contract/Awkward-v0", seed, kwargs) for seed in range(4)]
    write_parquet(tmp_path / "t.parquet", tasks, "x", "train")
    overrides = ["+turnkey=gigpo", f"data.train_files={tmp_path}/t.parquet", f"turnkey.modules=[{AWKWARD}]"]
    overrides += ["turnkey.env.reset_timeout=15"] if "hang" in kwargs.values() else []
    with pytest.raises(ConfigError, match=message):
        checked(compose(*overrides))
    checked(compose(*overrides, "turnkey.env.probe=false"))


def test_a_column_that_nobody_gives_is_named_before_ray(compose: Compose, tmp_path):
    """Environment and components together; what both give, and what only the probe can tell."""
    say, mute = ({"says_more": more} for more in (True, False))
    for name, kwargs in (("say", say), ("mute", mute)):
        tasks = [Task("contract/Awkward-v0", seed, kwargs) for seed in range(4)]
        write_parquet(tmp_path / f"{name}.parquet", tasks, "x", "train")

    def drive(file: str, method: str, *overrides: str) -> None:
        files = [f"data.{key}={tmp_path}/{file}.parquet" for key in ("train_files", "val_files")]
        checked(compose(f"+turnkey={method}", *files, f"turnkey.modules=[{AWKWARD}]", *overrides))

    scorer = "turnkey.rewards=[{name: step}, {name: outcome, label: scorer, column: %s}]"
    drive("say", "step_potential")  # the environment's own
    drive("mute", "step_potential", scorer % "potential")
    drive("mute", "step_potential", "turnkey.env.probe=false")
    with pytest.raises(ConfigError, match=r"step_potential needs the column 'extra\.potential'.*column: potential"):
        drive("mute", "step_potential")
    with pytest.raises(ConfigError, match=r"needs the column 'extra\.potential'"):
        drive("mute", "step_potential", scorer % "turn_score")
    with pytest.raises(ConfigError, match=r"environment gives info\['extra'\]\['potential'\] itself"):
        drive("say", "step_potential", scorer % "potential")


def test_a_column_of_the_state_before_a_step_is_looked_for_there(compose: Compose, tmp_path):
    """In the answers up to the last but one, that of the reset among them."""
    module = tmp_path / "one_step.py"
    module.write_text(ONE_STEP)
    for when in ("before", "after"):
        tasks = [Task("contract/OneStep-v0", seed, {"when": when}) for seed in range(4)]
        write_parquet(tmp_path / f"{when}.parquet", tasks, "x", "train")

    def drive(when: str) -> None:
        files = [f"data.{key}={tmp_path}/{when}.parquet" for key in ("train_files", "val_files")]
        checked(compose("+turnkey=marshal", *files, f"turnkey.modules=[{module}]"))

    drive("before")
    with pytest.raises(ConfigError, match=r"marshal needs the column 'extra\.role'.*with the reset and every step"):
        drive("after")


def test_a_modifiers_column_of_the_state_before_a_step_is_recorded_as_that(compose: Compose):
    config = compose("+turnkey=gigpo", "+turnkey/modifier=trace")
    assert recorded(config, turnkey_config(config)) == (False, {"gold_probability"})


ONE_STEP = """
import gymnasium

class OneStep(gymnasium.Env):
    def __init__(self, when="before"):
        self.when = when
    def reset(self, *, seed=None, options=None):
        return "a room", {"extra": {"role": "a"} if self.when == "before" else {}}
    def step(self, action):
        return "a room", 1.0, True, False, {"extra": {"role": "a"} if self.when == "after" else {}}

gymnasium.register("contract/OneStep-v0", entry_point=OneStep)
"""


def test_entropies_that_verl_does_not_compute_are_refused_where_nobody_else_gives_them(
    compose: Compose, tmp_path, task_files
):
    rows = pd.read_parquet(task_files / "train.parquet")
    rows["agent_name"] = "turnkey_env"
    rows.to_parquet(tmp_path / "loops.parquet")

    def drive(*overrides: str, recipe: str = "dynamo_modulation") -> None:
        checked(compose(f"+turnkey={recipe}", "algorithm.rollout_correction.bypass_mode=true", *overrides))

    message = r"'extra\.entropy' of each step.*bypass_mode=true: set it to false"
    with pytest.raises(ConfigError, match=f"dynamo_modulation needs {message}"):
        drive()
    with pytest.raises(ConfigError, match=rf"empg \(turnkey\.credit\.modify\) needs {message}"):
        drive("turnkey.credit.modify=[empg]", recipe="gigpo")
    with pytest.raises(ConfigError, match=f"dynamo_modulation needs {message}"):
        drive("actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent")
    drive("turnkey.rewards=[{name: step}, {name: step, label: e, column: entropy}]")
    with pytest.raises(
        ConfigError, match=f"dynamo_modulation needs {message}"
    ):  # rows that name turnkey_env are its own
        drive(*(f"data.{key}={tmp_path}/loops.parquet" for key in ("train_files", "val_files")))
    drive("turnkey.env.probe=false")  # the first step will tell whether the environment gives them


def test_missing_environment_package_names_the_extra(compose: Compose, tmp_path, monkeypatch):
    absent = "raise ModuleNotFoundError(\"No module named 'minigrid'\", name='minigrid')"
    (tmp_path / "minigrid.py").write_text(absent)
    monkeypatch.syspath_prepend(tmp_path)  # an environment's process has the path of its parent
    with pytest.raises(ConfigError, match=r'pip install "verl-turnkey\[minigrid\]"'):
        checked(compose("+turnkey=gigpo", "+turnkey/env=babyai"))


def test_a_module_that_ends_the_process_is_an_import_error(compose: Compose, tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ModuleImportError, match=r"leaves\.py.*SystemExit: 3"):
        checked(compose("+turnkey=gigpo", f"turnkey.modules=[{tmp_path}/leaves.py]"))


def test_unsupported_verl_is_a_warning(compose: Compose, monkeypatch):
    monkeypatch.setattr(internals, "SUPPORTED_VERL", "<0.9")
    with pytest.warns(UserWarning, match=r"outside the supported range <0\.9"):
        checked(compose("+turnkey=gigpo"))


def test_no_gpu_and_no_opt_in_is_a_hint(compose: Compose, monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = compose("+turnkey=gigpo")
    checked(config)
    assert "turnkey/device=cpu" not in capsys.readouterr().err
    monkeypatch.delenv("TURNKEY_DEVICE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the same on a machine that has one
    checked(config)
    assert "add +turnkey/device=cpu" in capsys.readouterr().err


def test_a_run_that_joins_a_cluster_cannot_say_what_it_has(compose: Compose, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cpu = ("+turnkey=gigpo", "+turnkey/device=cpu")
    checked(compose(*cpu, "+ray_kwargs.ray_init.address=local"))
    message = r"num_cpus=64 and ray_kwargs\.ray_init\.num_gpus=1: .* Set ray_kwargs\.ray_init\.num_cpus=null ray_kwargs"
    with pytest.raises(ConfigError, match=message):
        checked(compose(*cpu, "+ray_kwargs.ray_init.address=10.0.0.1:6379"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=message):
        checked(compose(*cpu))
    checked(compose(*cpu, "ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null"))


# --- the real command line --------------------------------------------------------------------------------------------


def test_stock_command_line_stops_before_ray(stock_overrides, tmp_path: Path):
    assert any(point.value == "verl_turnkey.plugins.entry" for point in entry_points(group="verl.plugins"))
    ray_folder = Path("/tmp") / f"tkn{os.getpid()}"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+turnkey=gigpo", "+turnkey/env=babyai"]
    command += ["+turnkey/device=cpu", *stock_overrides, "+turnkey.rollout.histori=3"]
    command += [f"+ray_kwargs.ray_init._temp_dir={ray_folder}", f"hydra.run.dir={tmp_path}"]
    env = {name: value for name, value in os.environ.items() if name != "TURNKEY_DEVICE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env, cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(r"turnkey\.rollout\.histori: unknown key.*'history'", done.stderr)
    assert "verl-turnkey" in done.stdout
    assert "+turnkey=gigpo +turnkey/env=babyai +turnkey/device=cpu" in done.stdout
    assert "ray init kwargs" not in done.stdout
    assert not ray_folder.exists()


def test_verls_loss_of_bypass_mode_reads_what_algorithm_says(compose: Compose):
    """verl's V1 trainers leave it at its defaults, PPO's clipping without rejection."""
    correction = "algorithm.rollout_correction"
    lines = ("actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode", f"{correction}.bypass_mode=true")
    config = compose("+turnkey=gigpo", *lines, f"{correction}.loss_type=reinforce", f"{correction}.rollout_is=token")
    checked(config)
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    new, old, advantages = torch.tensor([[[-1.0, -2.0]], [[-2.0, -1.0]], [[1.0, 3.0]]])
    mask = torch.ones(1, 2)
    loss, _ = core_algos.get_policy_loss_fn("bypass_mode")(old, new, advantages, mask, "token-mean", actor)
    ratio = torch.tensor([[math.e, 1 / math.e]]).clamp(max=config.algorithm.rollout_correction.rollout_is_threshold)
    torch.testing.assert_close(loss, -(ratio * new * advantages).mean())


def test_a_limit_that_follows_the_actors_is_not_refused_beside_it(compose: Compose):
    actor, rollout = (f"actor_rollout_ref.{name}_max_token_len_per_gpu" for name in ("actor.ppo", "rollout.log_prob"))
    for words, keys in (([], [actor]), ([f"{rollout}=700"], [actor, rollout])):
        with pytest.raises(ConfigError) as error:
            checked(compose("+turnkey=gigpo", "turnkey.env.probe=false", f"{actor}=600", *words))
        assert re.findall(r"(\S+)=\d+ is too small", str(error.value)) == keys
