"""``turnkey train`` and ``check`` in a folder whose path needs quotes of Hydra's and of the shell's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from contract_tools import Compose

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.checks.data import check_data
from verl_turnkey.plugins.config.overrides import override, values
from verl_turnkey.plugins.config.schema import turnkey_config

EXAMPLE = Path(__file__).parents[4] / "examples" / "custom_env.py"
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
