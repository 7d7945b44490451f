"""``turnkey train``: the line it prints is complete, passes the driver's checks, and says what was asked for."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from pprint import pformat

import datasets
import pytest
import ray
import verl
from contract_tools import Compose
from tqdm import tqdm
from typer.testing import CliRunner
from verl.trainer.ppo.utils import need_critic

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage import registry as estimator_registry
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.losses import registry as loss_registry
from verl_turnkey.plugins.checks.data import check_data, first_task
from verl_turnkey.plugins.checks.driver import resolve_and_check as check
from verl_turnkey.plugins.cli.check import dry_run
from verl_turnkey.plugins.cli.console import PHASES, PROGRESS
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config import machine
from verl_turnkey.plugins.config.overrides import override, values
from verl_turnkey.plugins.config.schema import turnkey_config

EXAMPLE = Path(__file__).parents[4] / "examples" / "custom_env.py"
SMALL = ["--train", "8", "--val", "4", "--print", "--device", "cpu"]


def printed(*arguments: str) -> list[str]:
    """The overrides of the line that ``turnkey train`` prints, as a shell would read them."""
    done = CliRunner().invoke(app, ["train", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    line = done.stdout[done.stdout.index("python -m verl") :]
    python, m, module, *overrides = shlex.split(line.replace("\\\n", " "))
    assert (python, m, module) == ("python", "-m", "verl.trainer.main_ppo")
    return overrides


@pytest.mark.parametrize(
    ("environment", "device"),
    [("babyai", "cpu"), ("turnkey/FrozenLake-v0", "gpu"), (str(EXAMPLE), "cpu")],
)
def test_the_line_passes_the_checks(compose: Compose, tmp_path, model_dir, environment, device):
    tasks = ["--train", "16", "--val", "4", "--print", "--device", device]
    overrides = printed(environment, "--model", str(model_dir), "--out", str(tmp_path), *tasks)
    config = compose(*overrides, "data.max_prompt_length=1200")
    check(config, use_critic=need_critic(config))
    assert config.algorithm.adv_estimator == "gigpo"
    assert config.trainer.device == ("cpu" if device == "cpu" else "cuda")
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.actor_rollout_ref.model.path == str(model_dir)
    assert first_task(config.data.train_files).env_id == config.turnkey.env.id
    assert Path(config.data.val_files).is_file()
    metrics = Path(config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_ROOT)
    assert metrics.parent == tmp_path / "metrics"
    assert "file" in config.trainer.logger


def test_a_language_model_learns_more_slowly_than_a_small_one(tmp_path, model_dir):
    def rate(model: object) -> str:
        line = printed("babyai", "--model", str(model), "--out", str(tmp_path / Path(str(model)).name), *SMALL)
        return next(entry for entry in line if entry.startswith("actor_rollout_ref.actor.optim.lr="))

    assert rate(model_dir).endswith("=0.0001"), "one of a few million parameters"
    assert rate("a/language-model").endswith("=1e-5")


@pytest.mark.parametrize(
    ("device", "steps", "further", "every", "keep"),
    [
        ("cpu", 1, [], 1, "2"),
        ("cpu", 6, [], 2, "2"),
        ("cpu", 10, [], 3, "2"),
        ("cpu", 200, [], 25, "2"),
        ("cpu", 6, ["trainer.save_freq=5"], 5, "2"),
        ("cpu", 6, ["trainer.max_actor_ckpt_to_keep=4"], 2, "4"),
        ("cpu", 6, ["turnkey.stop.whole_checkpoints=2"], 2, None),
        ("gpu", 6, [], 6, "2"),
        ("gpu", 200, [], 25, "2"),
        ("gpu", 6, ["trainer.max_actor_ckpt_to_keep=null"], 6, None),
    ],
)
def test_checkpoints(compose: Compose, tmp_path, model_dir, device, steps, further, every, keep):
    arguments = ["--model", str(model_dir), "--out", str(tmp_path), *SMALL, "--device", device]
    arguments += ["--steps", str(steps), "--train", "16"]
    config = compose(*printed("babyai", *arguments, *further), "data.max_prompt_length=1200")
    check(config, use_critic=need_critic(config))
    limit = config.trainer.max_actor_ckpt_to_keep  # which the checks raise where it is too low
    assert (config.trainer.save_freq, limit and str(limit)) == (every, keep)


@pytest.mark.parametrize(("device", "turn"), [("cpu", 32), ("gpu", 512)])
def test_a_conversation_has_room_for_turns(tmp_path, device, turn):
    def sizes(*words: str) -> tuple[list[str], ...]:
        line = printed(*words, "--model", "m", "--out", str(tmp_path / words[0]), *SMALL, "--device", device)
        keys = "data.max_response_length=", "turnkey.rollout.max_tokens_per_turn="
        return tuple([entry for entry in line if entry.startswith(key)] for key in keys)

    budget = f"data.max_response_length={16 * turn}"
    assert sizes("search") == ([budget], [f"turnkey.rollout.max_tokens_per_turn={turn}"])
    assert sizes("frozenlake") == ([f"data.max_response_length={turn}"], [])


@pytest.mark.parametrize(
    ("vocabulary", "words", "tokens"),
    [
        (32_000, ["babyai"], 16384),
        (151_936, ["babyai"], 16384),  # float32 logits of 9.96 GB
        (262_144, ["babyai"], 9216),
        (None, ["babyai"], 9216),  # a model that is not here
        (262_144, ["search"], 16 * 512 + 2048),  # a row has to fit
        (262_144, ["babyai", "data.max_prompt_length=20000"], 20512),
        (262_144, ["babyai", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"], 4096),
    ],
)
def test_the_logits_of_a_micro_batch_have_a_limit(compose: Compose, tmp_path, vocabulary, words, tokens):
    (tmp_path / "m").mkdir()
    if vocabulary is not None:
        (tmp_path / "m" / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    options = ["--model", str(tmp_path / "m"), "--out", str(tmp_path / "run"), *SMALL, "--device", "gpu"]
    config = compose(*printed(*words, *options)).actor_rollout_ref
    assert config.actor.ppo_max_token_len_per_gpu == config.rollout.log_prob_max_token_len_per_gpu == tokens


@pytest.mark.parametrize(("gpu", "tokens"), [("4090", 5120), ("48GB", 9216), ("h200:8", 16384)])
def test_a_smaller_gpu_gets_smaller_micro_batches(compose: Compose, tmp_path, monkeypatch, gpu, tokens):
    monkeypatch.setenv(machine.GPU, gpu)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"vocab_size": 151_936}))
    words = ["babyai", "--model", str(tmp_path / "m"), "--out", str(tmp_path / "run"), *SMALL, "--device", "gpu"]
    config = compose(*printed(*words)).actor_rollout_ref
    assert config.actor.ppo_max_token_len_per_gpu == config.rollout.log_prob_max_token_len_per_gpu == tokens


def test_a_row_fits_into_a_micro_batch_on_a_cpu(compose: Compose, tmp_path, model_dir):
    words = ["service", "--model", str(model_dir), "--out", str(tmp_path), *SMALL, "data.max_response_length=8192"]
    assert compose(*printed(*words)).actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 512 + 8192


def test_further_overrides_win_and_stand_once(tmp_path):
    overrides = printed(
        "babyai", "--model", "m", "--method", "rebn", "--out", str(tmp_path), *SMALL, "data.train_batch_size=2"
    )
    assert overrides[0] == "+turnkey=rebn"
    assert [entry for entry in overrides if entry.startswith("data.train_batch_size=")] == ["data.train_batch_size=2"]
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=2" in overrides


def test_arguments_of_the_environment_count_when_the_tasks_are_written(tmp_path):
    arguments = ["frozenlake", "--model", "m", "--out", str(tmp_path), *SMALL]
    assert "turnkey.env.kwargs.size=5" in printed(*arguments, "turnkey.env.kwargs.size=5")
    with pytest.raises(TypeError, match=r"size must be"):
        printed(*arguments[:4], str(tmp_path / "other"), *SMALL, "turnkey.env.kwargs.size=none")


def test_tasks_that_are_there_stay_and_must_be_of_the_environment(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for split in ("train", "val"):
        write_parquet(folder / f"{split}.parquet", [Task("turnkey/FrozenLake-v0", 77)], "lake", split)
    printed("frozenlake", "--model", "m", "--tasks", str(folder), "--out", str(tmp_path), *SMALL)
    assert first_task(str(folder / "train.parquet")).seed == 77
    with pytest.raises(ValueError, match=r"holds tasks of 'turnkey/FrozenLake-v0', not of 'turnkey/MiniGrid-v0'"):
        printed("babyai", "--model", "m", "--tasks", str(folder), "--out", str(tmp_path), *SMALL)


# --- the lines that ``turnkey new`` prints ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "chosen"), [("estimator", "estimator    fresh_one: "), ("loss", "loss         fresh_one: ")]
)
def test_the_line_starts(stock_overrides: list[str], tmp_path, monkeypatch, capsys, kind, chosen):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)  # put back after the test
    output = CliRunner().invoke(app, ["new", kind, "fresh_one"], catch_exceptions=False).output
    [line] = [line for line in output.splitlines() if "verl.trainer.main_ppo" in line]
    _, _, _, *arguments, dots = shlex.split(line)
    assert dots == "..."
    try:
        code = dry_run([*arguments, "+turnkey/env=babyai", *stock_overrides])
    finally:
        estimator_registry._ESTIMATORS.pop("fresh_one", None)
        loss_registry._LOSSES.pop("fresh_one", None)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert chosen in captured.out


# --- a folder whose path needs quotes of Hydra's and of the shell's ---------------------------------------------------


TURNKEY = str(Path(sys.executable).with_name("turnkey"))


@pytest.fixture
def hard(tmp_path: Path, model_dir: Path) -> Path:
    """A folder with a model and an environment, below a name with all that Hydra, shells and globs read otherwise."""
    folder = tmp_path / "é日 = (a,b) [x] {y} 'q' \"d\" & #;!~"
    folder.mkdir()
    shutil.copytree(model_dir, folder / "model")
    shutil.copy(EXAMPLE, folder / "my,env.py")
    (folder / "my_rewards.py").write_text("def none(steps):\n    return [0.0 for _ in steps]\n")
    return folder


def test_the_printed_line_is_ready(hard: Path):
    further = "turnkey.rewards=[{name: step}, {name: 'my_rewards:none'}]"  # a module of the current folder
    small = ["--device", "cpu", "--train", "8", "--val", "4", "--print"]
    command = [TURNKEY, "train", "my,env.py", "--model", str(hard / "model"), *small, further]
    train = subprocess.run(command, cwd=hard, capture_output=True, text=True)
    assert train.returncode == 0, train.stderr
    line = train.stdout[train.stdout.index("python -m verl.trainer.main_ppo") :]
    checked = line.replace("python -m verl.trainer.main_ppo", f"{TURNKEY} check", 1)
    check = subprocess.run(["bash", "-c", checked], cwd=hard, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr
    assert "ready: nothing was started" in check.stdout
    assert "example/GuessNumber-v0 (8 tasks)" in check.stdout


def test_verl_reads_the_data_files_that_turnkey_train_writes(hard: Path):
    from verl_turnkey.plugins.cli import launch

    played = launch.Played("turnkey/FrozenLake-v0")
    launch.write_tasks(played, hard, 8, 4)
    lines = launch.overrides(played, model="m", method="gigpo", device="cpu", gpus=1, steps=1, tasks=hard, out=hard)
    (path,) = values([word for line in lines for word in line], "data.train_files")
    assert len(datasets.load_dataset("parquet", data_files=path)["train"]) == 8


def test_a_path_that_verl_reads_as_another_pattern_is_refused(compose: Compose, tmp_path: Path):
    folder = tmp_path / "data [1]"
    write_parquet(folder / "t.parquet", [Task("turnkey/FrozenLake-v0", seed) for seed in range(8)], "lake", "train")

    def check(path: str) -> list[str]:
        config = compose("+turnkey=gigpo", override("data.train_files", path))
        return check_data(config, turnkey_config(config), ["turnkey_env"])

    with pytest.raises(ConfigError, match=r"brackets.*data\.train_files=.*data \[\[\]1\]/t\.parquet"):
        check(f"{folder}/t.parquet")
    assert check(f"{tmp_path}/data [[]1]/t.parquet") == [f"{folder}/t.parquet"]
    assert check(f"{tmp_path}/data*/*.parquet") == [f"{folder}/t.parquet"]


def test_the_current_folder_is_on_the_path_unless_python_was_told_not_to(hard: Path):
    (hard / "my_envs.py").write_text((hard / "my,env.py").read_text())
    tasks = [TURNKEY, "tasks", "out", "--env", "example/GuessNumber-v0", "--module", "my_envs", "--train", "1"]
    safe = {**os.environ, "PYTHONSAFEPATH": "1"}
    assert subprocess.run(tasks, cwd=hard, capture_output=True).returncode == 0
    assert subprocess.run(tasks, cwd=hard, capture_output=True, env=safe).returncode == 2


# --- the phases of a start are told by texts that verl, vLLM and Ray print --------------------------------------------


PACKAGES = Path(verl.__file__).parents[1], Path(ray.__file__).parents[1]
# The text of a phase -> the file that prints it, and how.
PRINTED = {
    "ray init kwargs: ": ("verl/trainer/main_ppo.py", 'print(f"ray init kwargs: {'),
    "Started a local Ray instance.": ("ray/_private/worker.py", 'info_str = "Started a local Ray instance."'),
    "Connected to Ray cluster.": ("ray/_private/worker.py", 'info_str = "Connected to Ray cluster."'),
    "Using dataset class: ": ("verl/utils/dataset/rl_dataset.py", 'print(f"Using dataset class: {'),
    "colocated worker base class ": ("verl/single_controller/ray/base.py", 'print(f"colocated worker base class {'),
    "['serve',": ("verl/workers/rollout/vllm_rollout/vllm_async_server.py", "pprint(server_args)"),
    "LLMServerManager: [": ("verl/workers/rollout/llm_server.py", 'print(f"LLMServerManager: {self.server_addresses}'),
    "Found checkpoint: ": ("verl/utils/checkpoint/checkpoint_manager.py", 'print("Found checkpoint: '),
    "Creating file logger at ": ("verl/utils/tracking.py", 'print(f"Creating file logger at {'),
}


def source(path: str) -> str:
    return next(root / path for root in PACKAGES if (root / path).is_file()).read_text(encoding="utf-8")


def test_the_table_is_complete():
    assert [text for _, text in PHASES] == [*PRINTED]


@pytest.mark.parametrize("text", PRINTED)
def test_it_is_printed(text):
    path, code = PRINTED[text]
    assert code in source(path)


def test_the_arguments_of_the_server_begin_as_they_are_printed():
    assert 'server_args = ["serve", ' in source(PRINTED["['serve',"][0])
    assert pformat(["serve", "a/model", *(f"--option_{number}" for number in range(9))]).startswith("['serve',\n")


def test_the_bar_of_steps(capsys):
    assert 'initial=self.global_steps, desc="Training Progress")' in source("verl/trainer/ppo/v1/trainer_base.py")
    tqdm(total=6, initial=4, desc="Training Progress").close()
    assert PROGRESS.findall(capsys.readouterr().err)[-1] == ("4", "6")
