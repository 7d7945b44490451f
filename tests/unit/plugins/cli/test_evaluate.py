"""``turnkey eval``: what it refuses before it writes anything, and which tasks it plays."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import split_seeds
from verl_turnkey.plugins.checks.files import rows
from verl_turnkey.plugins.cli import evaluate, launch
from verl_turnkey.plugins.cli.main import app

SERVER = ["--server", "http://127.0.0.1:1/v1", "--model", "m"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "either --checkpoint or --server"),
        ([*SERVER, "--checkpoint", "c"], "either --checkpoint or --server"),
        (SERVER[:2], "needs --model"),
        ([*SERVER, "--greedy", "--temperature", "1"], "exclude each other"),
        ([*SERVER, "--greedy", "--samples", "2"], "leave out --samples 2"),
        ([*SERVER, "turnkey.rollout.histori=3"], "turnkey.rollout.histori: unknown key; did you mean 'history'"),
        (["--checkpoint", "nowhere"], "neither a Hugging Face folder"),
    ],
)
def test_what_is_refused_before_anything_is_written(tmp_path, arguments, said):
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["eval", "frozenlake", "--out", str(out), *arguments], terminal_width=200)
    assert done.exit_code != 0
    assert said in " ".join(done.output.split()) or said in str(done.exception)
    assert not out.exists()


def test_tasks_are_those_on_which_training_validates(tmp_path):
    """Whatever their number; no task of them is one that `turnkey train` trains on."""
    played = launch.resolve("frozenlake")
    launch.write_tasks(played, tmp_path / "train", 1024, 8)

    def texts(file):
        return [text for (text,) in rows(str(file), ["turnkey_task"])]

    validation = texts(tmp_path / "train" / "val.parquet")
    assert texts(evaluate._task_file("8", played, tmp_path)) == validation
    assert texts(evaluate._task_file("3", played, tmp_path)) == validation[:3]
    assert evaluate.TRAINING_TASKS == 1024
    assert not {*split_seeds(1024, 128, 0)[0]} & {*split_seeds(1024, 128, 0)[1]}


@pytest.mark.parametrize("tasks", ["0", "none.parquet", "-3"])
def test_tasks_that_are_none(tmp_path, tasks):
    with pytest.raises(ConfigError, match="--tasks"):
        evaluate._task_file(tasks, launch.resolve("frozenlake"), tmp_path)


def test_sampling_without_options_is_that_of_training():
    assert evaluate._sampling(False, None, 4) == []
    assert evaluate._sampling(False, 0.5, 4) == ["actor_rollout_ref.rollout.temperature=0.5"]
    assert "actor_rollout_ref.rollout.temperature=0" in evaluate._sampling(True, None, 1)
