"""``turnkey train --seed``: the keys of a seed, and a run for each of several seeds."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.train import SEEDS
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.overrides import values
from verl_turnkey.plugins.view.runs import SEED, flat

MAIN = """
import json, sys
from pathlib import Path

words = {word.rpartition("=")[0].rpartition(".")[2]: word.rpartition("=")[2] for word in sys.argv}
seed = int(words["data_loader_seed"])
if seed == 13:
    sys.exit(3)
record, metrics = Path(words["dir"], ".hydra"), Path(words["VERL_FILE_LOGGER_ROOT"])
for folder in (record, metrics):
    folder.mkdir(parents=True)
config = {"data": {"seed": seed}, "algorithm": {"adv_estimator": "gigpo"}, "critic": {"data_loader_seed": seed}}
(record / "config.yaml").write_text(json.dumps(config))
data = [{"step": step, "data": {"episode/success_rate": step / 10 + seed / 100}} for step in (1, 2)]
(metrics / "x.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\\n" for row in data))
"""
"""in the place of verl's main program: Hydra's record and two steps of metrics"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def in_place_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    python = [sys.executable, "-c", MAIN]
    monkeypatch.setattr(launch, "command", lambda lines: [*python, *(word for line in lines for word in line)])


def train(*words: str) -> Any:
    sizes = ["--model", "m", "--device", "cpu", "--steps", "2", "--train", "4", "--val", "2"]
    return CliRunner().invoke(app, ["train", "frozenlake", *sizes, *words])


@pytest.mark.parametrize(
    ("words", "folders"),
    [
        (["--seed", "3"], {"runs/frozenlake-3": 3}),
        (["--seed", "3", "--out", "mine"], {"mine": 3}),
        (["--seed", "0,1,2"], {"runs/frozenlake-0": 0, "runs/frozenlake-1": 1, "runs/frozenlake-2": 2}),
        (["--seed", "1,0", "--out", "mine"], {"mine-1": 1, "mine-0": 0}),
        (["--seed", "4", "trainer.total_training_steps=1"], {"runs/frozenlake-4": 4}),
        ([], {"runs/frozenlake": None}),
    ],
)
def test_a_run_per_seed_in_a_folder_of_its_own(folder, words, folders):
    done = train(*words, "--print")
    lines = [shlex.split(line.replace("\\\n", "")) for line in re.findall(r"python -m (?:.*\\\n)*.*", done.stdout)]
    assert [values(line, "trainer.default_local_dir") for line in lines] == [
        [str(folder / name / "checkpoints")] for name in folders
    ]
    for line, seed in zip(lines, folders.values(), strict=True):
        assert [values(line, key) for key in SEEDS] == [[] if seed is None else [seed]] * len(SEEDS)
    first, *others = [(folder / name / "tasks/train.parquet").read_bytes() for name in folders]
    assert all(tasks == first for tasks in others)


def test_the_keys_of_a_seed_are_all_that_verl_reads():
    """The others count with full determinism alone, or for a reward model."""
    config = dict(flat(OmegaConf.to_container(composed(["+turnkey=gigpo"]), resolve=False)))
    assert {key for key in config if SEED.search(key) and not re.search(r"fsdp|reward\.", key)} == {*SEEDS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "x"], "expected an integer"),
        (["--seed", "-1"], "expected an integer"),
        (["--seed", "0,,1"], "expected an integer"),
        (["--seed", "4294967296"], "up to nine digits"),
        (["--seed", "0,1,0"], "names a seed twice"),
        (["--seed", "0,1", "data.seed=5"], "--seed sets data.seed: leave out"),
        (["--seed", "1", "+critic.data_loader_seed=5"], "--seed sets critic.data_loader_seed: leave out"),
        (["--seed", "0,1", "trainer.default_local_dir=x"], "all seeds would share trainer.default_local_dir"),
        (["--seed", "0,1", "turnkey.log.trajectories=x"], "all seeds would share turnkey.log.trajectories"),
        (["--seed", "0,1", "hydra.run.dir=x"], "all seeds would share hydra.run.dir"),
    ],
)
def test_what_is_no_seed_is_refused_before_anything_is_written(folder, words, message):
    done = train(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", "").split())
    assert not list(folder.iterdir())


def test_several_seeds_are_trained_and_compared(in_place_of_verl):
    done = train("--seed", "0,4,7")
    assert done.exit_code == 0, done.stdout + str(done.exception)
    assert "turnkey compare runs/frozenlake-0 runs/frozenlake-4 runs/frozenlake-7\n" in done.stdout
    table = done.stdout.split("turnkey compare")[1]
    assert re.search(r"gigpo\S* +3 +0\.237 +0\.200 to 0\.270", table), table


def test_a_seed_that_fails_ends_the_series(folder, in_place_of_verl):
    done = train("--seed", "13,0")
    assert done.exit_code == 3
    assert [path.name for path in (folder / "runs").iterdir()] == ["frozenlake-13"]
    assert "turnkey compare" not in done.stdout
    assert "run the same command again" in done.stderr


def test_one_seed_may_have_its_folders_named_and_several_no_log():
    for words in (["--seed", "0,1", "turnkey.log.trajectories=null"], ["--seed", "0", "trainer.default_local_dir=x"]):
        assert train(*words, "--print").exit_code == 0


def test_a_run_of_another_seed_is_refused(folder, in_place_of_verl):
    assert train("--seed", "3", "--out", "mine").exit_code == 0
    done = train("--seed", "4", "--out", "mine")
    assert done.exit_code == 2
    assert "--seed 4: mine was trained with seed 3" in " ".join(done.stderr.replace("│", "").split())
    config = next(folder.glob("mine/**/.hydra/config.yaml"))
    config.write_text(config.read_text().replace('"seed": 3', '"seed": null', 1))
    done = train("--seed", "4", "--out", "mine")
    assert "mine was trained with no seed" in " ".join(done.stderr.replace("│", "").split())


def test_a_comparison_that_fails_is_a_line(in_place_of_verl, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("they validate\non other panels")

    monkeypatch.setattr("verl_turnkey.plugins.cli.train.compare", refuse)
    done = train("--seed", "0,4")
    assert done.exit_code == 0
    assert done.stdout.endswith("turnkey compare runs/frozenlake-0 runs/frozenlake-4\n")
    assert done.stderr.endswith("no comparison: they validate on other panels\n")


def test_a_seed_that_has_ended_does_not_end_the_series(folder, in_place_of_verl):
    assert train("--seed", "3", "--out", "mine-3").exit_code == 0
    saved = folder / "mine-3/checkpoints/global_step_2"
    saved.mkdir(parents=True)
    (tracker := saved.parent / "latest_checkpointed_iteration.txt").write_text("2")
    os.utime(tracker, (1, 1))
    (folder / "own.py").touch()
    done = train("--seed", "3,4", "--out", "mine", "turnkey.modules=[own.py]")
    assert done.exit_code == 0, done.stderr + str(done.exception)
    assert "warning: own.py changed after the last checkpoint of mine-3" in done.stdout
    assert "nothing was trained: mine-3 has ended" in done.stdout
    assert any(folder.glob("mine-4/**/.hydra"))
    alone = train("--seed", "3", "--out", "mine-3", "turnkey.modules=[own.py]")
    assert isinstance(alone.exception, ConfigError)
