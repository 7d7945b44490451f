"""A second `turnkey train` into a run's folder continues the run, or says that it has ended."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.run_folder import announce
from verl_turnkey.plugins.shutdown.run_files import locked


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of step 3, and a module and examples older than its checkpoint."""
    monkeypatch.chdir(tmp_path)
    checkpoints = tmp_path / "runs" / "x" / "checkpoints"
    (checkpoints / "global_step_3").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    for name in ("my_env.py", "examples.yaml"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    return tmp_path / "runs" / "x"


def line(run: Path, steps: int | None, *further: str) -> list[str]:
    words = [f"trainer.default_local_dir={run / 'checkpoints'}", "turnkey.modules=[my_env.py]"]
    words += [] if steps is None else [f"trainer.total_training_steps={steps}"]
    return [*words, "turnkey.rollout.examples=examples.yaml", *further]


def test_a_new_run_says_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert announce(line(run.with_name("y"), 3), "runs/y", started=False)
    assert announce(line(run, 3, "trainer.resume_mode=disable"), "runs/x", started=False)
    assert announce(line(run, 3, "trainer.default_local_dir=${trainer.project_name}/x"), "runs/x", started=True)
    assert announce(line(run, 3, "trainer.val_only=true"), "runs/x", started=True)
    assert capsys.readouterr().out == ""


def test_a_run_without_a_checkpoint_starts_over(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.with_name("y") / "checkpoints").mkdir(parents=True)
    assert announce(line(run.with_name("y"), 3), "runs/y", started=True)
    assert announce(line(run, 3, "trainer.resume_mode=disable"), "runs/x", started=True)
    assert capsys.readouterr().out.splitlines() == [
        "runs/y has no checkpoint yet: it starts over from step 0",
        "runs/x starts over from step 0, since trainer.resume_mode=disable",
    ]
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")  # the run itself looks for an older one
    assert announce(line(run, 9), "runs/x", started=True)
    assert announce(line(run.with_name("y"), 3, "+ray_kwargs.ray_init.address=auto"), "runs/y", started=True)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert announce(line(run.with_name("y"), 3), "runs/y", started=True)
    assert capsys.readouterr().out == ""


def test_of_two_in_a_folder_the_second_is_refused(run: Path) -> None:
    small = ["--model", "m", "--device", "cpu", "--train", "1", "--val", "1"]
    lines = (["train", "frozenlake", *small, "--out", str(run)], ["resume", str(run)])
    config = run / "hydra" / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(f"turnkey: {{env: {{id: a}}}}\ntrainer: {{default_local_dir: {run / 'checkpoints'}}}\n")
    sources = "[{path: hydra.conf, provider: hydra}, {path: /verl/trainer/config, provider: main}]"
    runtime = f"{{cwd: {run.parents[1]}, config_sources: {sources}}}"
    job, overrides = "{config_name: ppo_trainer}", "{hydra: [], task: ['a=1']}"
    (config.parent / "hydra.yaml").write_text(f"hydra: {{overrides: {overrides}, job: {job}, runtime: {runtime}}}\n")
    with locked(run, "", ""):
        before = sorted(run.rglob("*"))
        for line in lines:
            error = str(CliRunner().invoke(app, line).exception)
            assert f"{run}: another turnkey train or resume is at work there (process {os.getpid()} on " in error
        assert sorted(run.rglob("*")) == before
        for line in lines:
            assert CliRunner().invoke(app, [*line, "--print"]).exit_code == 0


@pytest.mark.parametrize(("steps", "end"), [(9, " of 9"), (None, "")])
def test_steps_left(run: Path, capsys: pytest.CaptureFixture[str], steps: int | None, end: str) -> None:
    assert announce(line(run, steps), "runs/x", started=True)
    says = f"continues runs/x after step 3{end}; turnkey train --out FOLDER starts a new run\n"
    assert capsys.readouterr().out == says


def test_changed_files_are_a_warning_while_steps_are_left_and_then_an_error(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not announce(line(run, 3), "runs/x", started=True)
    ended = "nothing was trained: runs/x has ended: its last checkpoint is from step 3"
    assert capsys.readouterr().out.startswith(ended)
    (run.parents[1] / "examples.yaml").write_text("- new")
    assert announce(line(run, 9), "runs/x", started=True)
    assert "warning: examples.yaml changed after the last checkpoint" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^examples.yaml changed after .*, but runs/x has ended.*--out FOLDER"):
        announce(line(run, 3), "runs/x", started=True)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("turnkey.agent.run=new.py:play", "new.py"),
        ("turnkey.agent.run=[python, {here}/new.py, --x]", "new.py"),
        ("turnkey.agent.readable=[tools]", "tool.py"),
        ("turnkey.mcp.servers=mcp.json", "mcp.json"),
        ("+turnkey.mcp.servers.pad={{command: python, args: [new.py]}}", "new.py"),
        ("turnkey.teacher.template=words.txt", "words.txt"),
        ("+turnkey.teacher.source.name=new.py:text", "new.py"),
        ("turnkey.rollout.summary=new.py:summary", "new.py"),
        ("turnkey.rewards=[{{name: new.py:paid}}]", "new.py"),
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path=new.py", "new.py"),
        ("reward.custom_reward_function.path=new.py", "new.py"),
        ("turnkey.agent.run=old.py:play", None),
        ("turnkey.agent.cwd=tools", None),
        ("turnkey.rollout.system=new.py", None),
    ],
)
def test_every_field_that_names_a_file_is_looked_at(
    run: Path, capsys: pytest.CaptureFixture[str], word: str, name: str | None
) -> None:
    here = run.parents[1]
    (here / "tools").mkdir()
    for file in ("new.py", "old.py", "mcp.json", "words.txt", "tools/tool.py"):
        (here / file).touch()
    os.utime(here / "old.py", (1, 1))
    os.utime(run / "checkpoints" / "latest_checkpointed_iteration.txt", (9, 9))
    assert announce(line(run, 9, word.format(here=here)), "runs/x", started=True)
    warning = f"warning: {name} changed after the last checkpoint: the remaining steps use the new files\n"
    assert capsys.readouterr().out.partition("\n")[2] == (warning if name else "")
