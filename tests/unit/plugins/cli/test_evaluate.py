"""``turnkey eval``: what it refuses before it writes anything, and which tasks it plays."""

import warnings
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import COLUMN, Task, split_seeds
from verl_turnkey.plugins.checks.data import warn_of_shared
from verl_turnkey.plugins.checks.files import rows, shared_tasks
from verl_turnkey.plugins.cli import evaluate, launch
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.shutdown.run_files import locked

SERVER = ["--server", "http://127.0.0.1:1/v1", "--model", "m"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "frozenlake is not the folder of a run: give a RUN, or either --checkpoint or --server"),
        ([*SERVER, "--checkpoint", "c"], "give either --checkpoint or --server, not both"),
        (SERVER[:2], "needs --model"),
        (["--checkpoint", "c", "--model", "m", "--api-key-env", "K"], "--model and --api-key-env go with --server"),
        ([*SERVER, "--greedy", "--temperature", "1"], "exclude each other"),
        ([*SERVER, "--greedy", "--samples", "2"], "leave out --samples 2"),
        ([*SERVER, "--temperature", "0", "--samples", "2"], "--temperature 0 gives the same sample each time"),
        ([*SERVER, "+turnkey=gigpoo"], "did you mean 'gigpo'"),
        ([*SERVER, "turnkey.rollout.histori=3"], "turnkey.rollout.histori: unknown key; did you mean 'history'"),
        (["--checkpoint", "nowhere"], "neither a Hugging Face folder"),
    ],
)
def test_what_is_refused_before_anything_is_written(tmp_path, arguments, message):
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["eval", "frozenlake", "--out", str(out), *arguments], terminal_width=200)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split()) or message in str(done.exception)
    assert not out.exists()


def tasks_of(number: str, folder: Path, environment: str, *words: str) -> list[Task]:
    file = evaluate.task_file(number, launch.resolve(environment, words), folder)
    return [Task.from_json(text) for (text,) in rows(str(file), [COLUMN])]


def test_tasks_are_none_of_training(tmp_path):
    """However many training had; of a split that it does not use, unless one is named."""
    tasks = tasks_of("200", tmp_path, "frozenlake")
    assert {task.env_id for task in tasks} == {"turnkey/FrozenLake-v0"}
    assert not {task.seed for task in tasks} & {seed for split in split_seeds(20_000, 128, 0) for seed in split}
    assert tasks_of("3", tmp_path, "frozenlake") == tasks[:3]
    for words, kwargs in (((), {"split": "test"}), (("topk=2",), {"split": "test"}), (("split=train",), {})):
        task = tasks_of("3", tmp_path, "search", *(f"turnkey.env.kwargs.{word}" for word in words))[0]
        assert task.kwargs == kwargs


@pytest.mark.parametrize("val", [["turnkey.env.kwargs.split=all"], []])
def test_validation_on_trained_tasks_is_counted(tmp_path, val):
    launch.write_tasks(launch.resolve("search", val), tmp_path, 8, 4)
    files = {f"{split}_files": str(tmp_path / f"{split}.parquet") for split in ("train", "val")}
    trainer = {"test_freq": 5, "val_before_train": True}
    env = {"id": "turnkey/Search-v0", "kwargs": launch.resolve("search", val).kwargs}
    config = OmegaConf.create({"data": files, "trainer": trainer, "turnkey": {"env": env}})
    assert shared_tasks(config) == (4 if val else 0, 4, "environment and arguments")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_shared(config)
    assert len(caught) == bool(val)


@pytest.mark.parametrize("tasks", ["0", "none.parquet", "-3", "65537"])
def test_tasks_that_are_none(tmp_path, tasks):
    with pytest.raises(ConfigError, match="--tasks"):
        evaluate.task_file(tasks, launch.resolve("frozenlake"), tmp_path)


def test_sampling_is_that_of_training_and_the_recipe_that_of_the_line():
    assert evaluate._sampling(False, None, 4) == []
    assert evaluate._sampling(False, 0.5, 4) == ["actor_rollout_ref.rollout.temperature=0.5"]
    assert "actor_rollout_ref.rollout.temperature=0" in evaluate._sampling(True, None, 1)
    line = ["+turnkey=gigpo", "turnkey.credit.gamma=0.9"]
    assert evaluate._method(line) == ("gigpo", ["turnkey.credit.gamma=0.9"], [])


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_credit_of_an_unnamed_method_is_ignored_and_said(tmp_path, monkeypatch, prefix):
    monkeypatch.setenv("TURNKEY_DEVICE", "cpu")
    credit = f"{prefix}turnkey.credit.gamma=0.9"
    assert evaluate._method([credit, "data.max_prompt_length=9"]) == ("base", ["data.max_prompt_length=9"], [credit])
    line = [*SERVER, "--out", str(tmp_path), "--tasks", "none.parquet", credit]
    done = CliRunner().invoke(app, ["eval", "frozenlake", *line])
    assert "--tasks none.parquet" in str(done.exception)
    assert f"ignored, since credit does not affect an evaluation: {credit}" in done.output


def test_the_sizes_on_a_server_are_those_of_gpus(tmp_path, monkeypatch):
    """Whatever is here, the model runs elsewhere; what a training line says of its method is no obstacle."""
    monkeypatch.setattr(launch, "device_here", lambda: ("cpu", 0))
    monkeypatch.setenv("TURNKEY_DEVICE", "cpu")
    line = [*SERVER, "--out", str(tmp_path), "--tasks", "none.parquet", "+turnkey=gigpo", "turnkey.credit.gamma=0.9"]
    done = CliRunner().invoke(app, ["eval", "frozenlake", *line])
    assert "--tasks none.parquet" in str(done.exception)
    sizes = "prompt 2048 tokens (data.max_prompt_length), response 512 (data.max_response_length)"
    assert sizes in done.output


def test_a_second_evaluation_in_a_folder_writes_nothing(tmp_path):
    """Neither tasks nor a merged model: the first one is playing with them."""
    actor = tmp_path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"1")
    out = tmp_path / "out"
    with locked(out, "", ""):
        for model in (SERVER, ["--checkpoint", str(actor)]):
            done = CliRunner().invoke(app, ["eval", "frozenlake", "--out", str(out), *model])
            assert "another turnkey eval is writing there" in str(done.exception)
        assert [path.name for path in out.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("words", "player"),
    [
        (["--checkpoint", "org/small"], "small"),
        (["--checkpoint", "kuhn/checkpoints/global_step_5"], "kuhn-global_step_5"),
        (["--checkpoint", "kuhn/checkpoints/global_step_5", "--tag", "late"], "late"),
        (SERVER, "m"),
    ],
)
def test_a_player_is_named_by_run_and_checkpoint(tmp_path, monkeypatch, words, player):
    """And a model of the hub by its name there, not by the folder that it was downloaded to."""
    (tmp_path / "kuhn" / ".hydra").mkdir(parents=True)
    (tmp_path / "kuhn" / ".hydra" / "config.yaml").write_text(
        "{turnkey: {env: {id: turnkey/FrozenLake-v1}}, trainer: {default_local_dir: checkpoints}}"
    )
    monkeypatch.setenv("TURNKEY_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    for folder in (weights := tmp_path / "0a1b2c", tmp_path / "kuhn" / "checkpoints" / "global_step_5"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(evaluate.checkpoints, "downloaded", lambda path: path if path.exists() else weights)
    monkeypatch.setattr(evaluate.Evaluation, "with_settings_of_run", lambda evaluation, _: evaluation)
    monkeypatch.setattr(evaluate.Evaluation, "checked", lambda evaluation: composed(evaluation.words()))
    monkeypatch.setattr(evaluate.Evaluation, "weights", lambda *_: None)
    monkeypatch.setattr(evaluate.Evaluation, "tasks", lambda *_: tmp_path / "tasks.parquet")
    monkeypatch.setattr(evaluate, "counted", lambda *_: "")
    players = []
    monkeypatch.setattr("verl_turnkey.plugins.eval.run.evaluate", lambda settings, **_: players.append(settings.player))
    CliRunner().invoke(app, ["eval", "frozenlake", "--out", str(tmp_path / "out"), *words])
    assert players == [player]


def test_the_bar_tells_success_of_what_was_played_and_how_many_failed():
    progress = evaluate._progress()
    with progress as begin:
        advance = begin(0, 5)
        for success in (True, False, False, None):
            advance(success)
        (bar,) = progress._bar.tasks
        assert (bar.description, bar.completed, bar.total) == ("success 0.33, 1 failed", 4, 5)


def test_without_a_terminal_there_is_a_line_a_minute(monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "LINE_EVERY", -1.0)
    with evaluate._progress() as begin:
        advance = begin(3, 8)
        for success in (True, None, False):
            advance(success)
    assert capsys.readouterr().err.splitlines() == [
        "4 of 8 samples, success 1.00",
        "5 of 8 samples, success 1.00, 1 failed",
        "6 of 8 samples, success 0.50, 1 failed",
    ]
