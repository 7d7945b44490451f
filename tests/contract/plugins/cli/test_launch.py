"""``turnkey train``: the line it prints is complete, passes the driver's checks, and says what was asked for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from contract_tools import Compose
from typer.testing import CliRunner
from verl.trainer.ppo.utils import need_critic

from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.checks.data import first_task
from verl_turnkey.plugins.checks.driver import resolve_and_check as check
from verl_turnkey.plugins.cli.main import app

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


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("babyia", "did you mean 'babyai'"),
        ("turnkey/Taxy-v0", "did you mean 'turnkey/Taxi-v0'"),
        ("no_such_file.py", "there is no file"),
        ("none.py", "must register one environment with gymnasium.register, not 0"),
        ("two.py", "two.py:launch/A-v0"),
        ("two.py:launch/C-v0", "launch/A-v0, launch/B-v0"),
    ],
)
def test_what_is_no_environment(tmp_path, monkeypatch, environment, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.py").write_text("x = 1\n")
    register = "import gymnasium\nfor name in 'AB':\n    gymnasium.register(f'launch/{name}-v0', entry_point='x:y')\n"
    (tmp_path / "two.py").write_text(register)
    import gymnasium

    before = dict(gymnasium.registry)
    try:
        with pytest.raises((ValueError, ImportError), match=message):
            printed(environment, "--model", "m", *SMALL)
    finally:
        gymnasium.registry.clear()
        gymnasium.registry.update(before)


def test_one_of_several_environments_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = EXAMPLE.read_text().replace("example/GuessNumber-v0", "launch/Guess-v0")
    (tmp_path / "mine.py").write_text(text + "\ngymnasium.register('launch/Other-v0', entry_point='x:y')\n")
    overrides = printed("mine.py:launch/Guess-v0", "--model", "m", *SMALL)
    assert "turnkey.env.id=launch/Guess-v0" in overrides
    assert f"turnkey.modules=[{tmp_path}/mine.py]" in overrides
