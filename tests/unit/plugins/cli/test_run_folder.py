"""The folder of a run as an argument: what is read from it, and what an evaluation takes from there."""

import shutil
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.report import FOLDERS
from verl_turnkey.plugins.cli.run_folder import RunFolder, metrics_of_start
from verl_turnkey.plugins.config.composing import composed, verls_config_dir
from verl_turnkey.plugins.config.overrides import read

FURTHER = (
    "turnkey.rollout.action_format=xml_think",
    "turnkey.rollout.max_turns=7",
    "turnkey.env.kwargs.size=5",
    "data.max_response_length=99",
    "actor_rollout_ref.rollout.temperature=0.7",
)


def words(folder: Path, further=FURTHER) -> list[str]:
    """The launch line, without words for Hydra itself."""
    played = launch.resolve("frozenlake", further)
    sizes = {"model": "a/b", "method": "gigpo", "device": "cpu", "gpus": 1, "steps": 3}
    lines = launch.overrides(played, **sizes, tasks=folder / "tasks", out=folder, further=further)
    return [word for line in lines for word in line if not word.startswith("hydra.")]


def run_in(folder: Path) -> RunFolder:
    run = RunFolder.of(folder)
    assert run is not None
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What Hydra leaves of ``turnkey train frozenlake``, and the folder of a checkpoint."""
    folder = tmp_path / "frozen"
    record = folder / "hydra" / ".hydra"
    record.mkdir(parents=True)
    line = words(folder)
    OmegaConf.save(composed(line), record / "config.yaml")
    sources = [{"path": str(verls_config_dir()), "schema": "file", "provider": "main"}]
    hydra = {
        "overrides": {"task": line, "hydra": [f"hydra.run.dir={folder / 'hydra'}"]},
        "job": {"config_name": "ppo_trainer"},
        "runtime": {"cwd": str(tmp_path), "config_sources": sources},
    }
    OmegaConf.save(OmegaConf.create({"hydra": hydra}), record / "hydra.yaml")
    (folder / "checkpoints" / "global_step_3" / "actor").mkdir(parents=True)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def test_it_is_found_by_its_folder_and_by_its_checkpoints(run: Path) -> None:
    for path in (run, run / "checkpoints", run / "checkpoints" / "global_step_3"):
        folder = run_in(path)
        assert (folder.folder, folder.checkpoints) == (run, run / "checkpoints")
        assert folder.env_id == launch.resolve("frozenlake").id
    assert RunFolder.of(run.parent / "elsewhere") is None
    (run.parent / "other").mkdir()
    assert RunFolder.of(run.parent / "other") is None


def test_what_it_plays_with_is_exactly_what_differs_from_the_recipe(run: Path) -> None:
    overrides = run_in(run).playing(composed(words(run, further=())))
    assert sorted(word.lstrip("+") for word in overrides) == sorted(FURTHER)
    assert run_in(run).playing(composed(words(run))) == []
    changed = run_in(run).differing(["turnkey.rollout.max_turns=9", "turnkey.env.kwargs.size=5", "trainer.save_freq=1"])
    assert changed == ["turnkey.rollout.max_turns=9 (the run: 7)"]


TOOLS = (
    "turnkey.rollout.action_format=tools",
    "turnkey.env.step_timeout=90.0",
    "++turnkey.mcp.servers={my.pad: {command: serve,env: {a.b: c}}}",
    "turnkey.mcp.shared=[my.pad]",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path=/x/tools.py",
    "turnkey.rollout.strategy=tree",
)


def test_it_plays_with_the_tools_of_the_run_and_without_what_only_trains(run: Path) -> None:
    record = run / "hydra" / ".hydra" / "config.yaml"
    plain = words(run, further=())
    OmegaConf.save(composed([*plain, *TOOLS]), record)
    overrides = run_in(run).playing(composed(plain))
    assert sorted(word.lstrip("+") for word in overrides) == sorted(word.lstrip("+") for word in TOOLS[:-1])
    assert run_in(run).playing(composed([*plain, *overrides])) == []


@pytest.mark.parametrize("how", ["copied", "moved", "moved with all", "relative", "linked"])
def test_a_run_elsewhere_goes_on_where_it_is(run: Path, tmp_path: Path, monkeypatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    record, rest = run / "hydra" / ".hydra", ["turnkey.modules=[mine.py]", "trainer.experiment_name=frozen"]
    hydra = OmegaConf.load(record / "hydra.yaml")
    hydra.hydra.overrides.task += rest
    OmegaConf.save(hydra, record / "hydra.yaml")
    if how == "relative":
        for file in record.iterdir():
            file.write_text(file.read_text().replace(f"{run}/", "frozen/"))
    there, cwd = tmp_path / "my (second)", tmp_path
    if how == "moved":
        shutil.move(run, there)
    elif how == "linked":
        there.symlink_to(run)
    elif how == "moved with all":
        cwd = tmp_path.with_name(f"{tmp_path.name}-moved")
        shutil.copytree(tmp_path, cwd)
        shutil.rmtree(run)
        there = cwd / "frozen"
        OmegaConf.update(hydra, "hydra.runtime.cwd", str(tmp_path / "gone"))
        for file in (there / "hydra" / ".hydra").iterdir():
            file.write_text(file.read_text().replace(str(tmp_path), f"{tmp_path}/gone"))
    else:
        shutil.copytree(run, there)
    assert run_in(there).checkpoints.resolve() == (there / "checkpoints").resolve()
    assert run_in(there).task_files("val") == [str((run if how == "linked" else there) / "tasks" / "val.parquet")]
    folder, line = run_in(there).launch()
    assert folder == cwd
    assert {*rest} <= {*line}
    named = {read(word)[1] for word in line if word.partition("=")[0] in FOLDERS}
    assert named == {str((run if how == "linked" else there) / name) for name in FOLDERS.values()}
    if how != "linked":
        assert not [word for word in line if f"{run}/" in word]


def test_metrics_of_a_start_are_behind_those_of_a_clock_that_is_ahead(tmp_path: Path) -> None:
    """Else `turnkey compare` would take the earlier start for the later one."""
    assert metrics_of_start(tmp_path / "metrics").parent == tmp_path / "metrics"
    (tmp_path / "20991231-235959").mkdir()
    (tmp_path / "of-mine").mkdir()  # says no time
    assert metrics_of_start(tmp_path).name == "21000101-000000"


def test_an_evaluation_of_a_run_says_what_it_takes_from_it(run: Path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "device_here", lambda: ("cpu", 0))
    monkeypatch.setenv("TURNKEY_DEVICE", "cpu")
    arguments = ["eval", str(run), "--server", "http://127.0.0.1:1/v1", "--model", "m", "--tasks", "none.parquet"]
    done = CliRunner().invoke(app, [*arguments, "--greedy", "--out", str(run / "out")])
    assert "--tasks none.parquet" in str(done.exception)
    assert f"settings  of the run in {run}" in done.output
    assert "response 99 (data.max_response_length)" in done.output
    assert "sampling  greedy" in done.output
    assert "temperature=0 (the run: 0.7)" in done.output


def test_going_on_with_it_repeats_its_line(run: Path) -> None:
    done = CliRunner().invoke(app, ["resume", str(run), "--print", "--steps", "5"])
    assert done.exit_code == 0, done.output
    for word in ("+turnkey=gigpo", "turnkey.rollout.max_turns=7", f"hydra.run.dir={run}/hydra"):
        assert word in done.output
    assert done.output.rstrip().endswith("trainer.total_training_steps=5")


PRINTS = """
import os
print("noise of vLLM in " + os.getcwd())
print("verl-turnkey 1.0: this run")
print("  steps        5; continues after step 3")
print("(TaskRunnerV1 pid=12) step:4 - episode/length/mean:4.0")
"""


def test_going_on_shows_the_console_of_train(run: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    lines = []
    monkeypatch.setattr(launch, "command", lambda line: lines.append(line) or [sys.executable, "-c", PRINTS])
    monkeypatch.chdir(run)
    arguments = ["resume", ".", "--steps", "5"]
    with pytest.raises(SystemExit, match=r"^0$"):
        app(arguments)
    assert capfd.readouterr().out.splitlines() == [
        "continues . after step 3 of 5; turnkey train --out FOLDER starts a new run",
        "verl-turnkey 1.0: this run",
        "  steps        5; continues after step 3",
        "step 4/5  turns 4.0",
        "log: train.log; each turn: turnkey view .; evaluate: turnkey eval .",
    ]
    assert lines[0][1] == ["trainer.total_training_steps=5"]
    with pytest.raises(SystemExit, match=r"^0$"):
        app([*arguments, "--verbose"])
    assert f"noise of vLLM in {run.parent}\n" in capfd.readouterr().out
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(SystemExit, match=r"^0$"):
        app(arguments)
    assert capfd.readouterr().out.startswith(". has no checkpoint yet: it starts over from step 0\nverl-turnkey 1.0:")


def test_going_on_after_the_last_step_trains_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    done = CliRunner().invoke(app, ["resume", run.name])
    assert done.exit_code == 0
    assert done.output.startswith(f"nothing was trained: {run.name} has ended: its last checkpoint is from step 3")
    (run.parent / "empty").mkdir()
    refused = CliRunner().invoke(app, ["resume", "empty"])
    assert refused.exit_code == 2
    assert "is not the folder of a run" in refused.output
