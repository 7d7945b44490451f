"""``turnkey check`` is verl's own main program up to Ray: what a line is told, and the header of a good one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, AdvantageEstimator

from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.losses import losses
from verl_turnkey.plugins.checks.driver import STOCK_VERL
from verl_turnkey.plugins.checks.values import with_origins
from verl_turnkey.plugins.cli.check import dry_run
from verl_turnkey.plugins.config import foreign_keys

Checked = Callable[..., tuple[int, str, str]]


@pytest.fixture
def checked(stock_overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> Checked:
    """``checked("+turnkey=gigpo", ...)``: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", sys.argv)  # put back after the test
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = dry_run([*arguments, *stock_overrides])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def header(out: str) -> dict[str, list[str]]:
    """The header's lines by label."""
    entries: dict[str, list[str]] = {}
    label = ""
    for line in out.partition(": this run\n")[2].splitlines():
        if not line.startswith("  "):
            break
        label = line[2:14].strip() or label
        text = line[15:].strip()
        if line[2:14].strip():
            entries.setdefault(label, []).append(text)
        else:
            entries[label][-1] += f" {text}"
    return entries


def test_the_first_prompt_is_shown_with_its_examples(stock_overrides, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    examples = "turnkey.rollout.examples=[{observation: a wall, action: turn around}]"
    assert dry_run(["+turnkey=gigpo", "+turnkey/env=babyai", *stock_overrides, examples], prompt=True) == 0
    out = capsys.readouterr().out
    prompt = out.partition("the first prompt, ")[2]
    assert re.match(r"\d+ of 1200 tokens \(data.max_prompt_length\):\n", prompt)
    assert "Observation: a wall\nAnswer: <action>turn around</action>" in prompt
    assert re.fullmatch(r"1 turn in every prompt as text, about \d+ tokens \(turnkey.*\)", header(out)["examples"][0])


def test_an_ascii_terminal_gets_escapes(stock_overrides: list[str]):
    words = ["+turnkey=gigpo", "+turnkey/env=babyai", *stock_overrides, "turnkey.rollout.system='Tür, öffne dich'"]
    done = subprocess.run(
        [sys.executable, "-m", "verl_turnkey", "check", "--prompt", *words, "trainer.project_name='Tür'"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert rb"T\xfcr, \xf6ffne dich" in done.stdout.partition(b"the first prompt")[2]


def test_a_good_line(checked: Checked, recwarn: pytest.WarningsRecorder):
    code, out, _ = checked(
        "+turnkey=gigpo",
        "+turnkey/env=babyai",
        "turnkey.credit.gamma=0.9",
        "turnkey.env.kwargs.level=MiniGrid-Empty-5x5-v0",
        "turnkey.credit.modify=[{name: a_grae, alpha: 0.5}]",
        "turnkey.rewards=[{name: step}, {name: outcome, label: prm, weight: 2, column: turn_score}]",
    )
    assert code == 0
    assert "ready: nothing was started" in out
    lines = header(out)
    assert lines["estimator"] == ["gigpo: gamma=0.9 (default 0.95)"]
    assert lines["modified by"] == ["a_grae: alpha=0.5 (default 1.0)"]
    assert lines["loss"] == ["vanilla (verl's)"]
    assert lines["trainer"] == ["turnkey_sync"]
    assert lines["agent loop"] == ["turnkey_env: a row per step"]
    (environment,) = lines["environment"]
    assert environment.startswith("turnkey/MiniGrid-v0 (8 tasks); default kwargs")
    assert '"level": "MiniGrid-Empty-5x5-v0"' in environment
    assert "at most 64 turns" in environment
    assert lines["per step"] == ["4 tasks x 2 = 8 episodes, 8 to 512 rows"]
    assert lines["update"] == ["2 mini-batches x 1 epoch = 2 optimizer steps per batch"]
    assert lines["reward"] == ["1.0 x step, -0.1 per invalid action"]
    assert lines["columns"] == ["turn_score = 2.0 x prm"]
    assert "ignored" not in lines
    assert "warning" not in lines
    assert not [warning for warning in recwarn if "critic" in str(warning.message)]


def test_what_is_ignored_is_said(checked: Checked, tmp_path):
    write_parquet(tmp_path / "t.parquet", [Task("turnkey/MiniGrid-v0", seed) for seed in range(5)], "x", "train")
    code, out, err = checked(
        "+turnkey=gigpo",
        "+turnkey/loss=turn_ratio",
        "turnkey.loss.ratio=product",
        "turnkey.env.id=turnkey/FrozenLake-v0",
        "turnkey.update.mini_batches=3",
        "algorithm.gamma=0.5",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    )
    assert code == 0, err
    lines = header(out)
    assert lines["loss"][0].startswith("turn_ratio: ratio=product (default geometric)")
    assert lines["update"] == ["3 mini-batches x 1 epoch = 3 optimizer steps per batch"]
    ignored = "\n".join(lines["ignored"])
    assert "turnkey.env.id=turnkey/FrozenLake-v0 where the tasks name another (turnkey/MiniGrid-v0)" in ignored
    assert "ppo_mini_batch_size=2: turnkey.update.mini_batches is set" in ignored
    for unread in ("algorithm.gamma=0.5 has no effect on gigpo", "actor.ppo_micro_batch_size_per_gpu=4 has no effect"):
        assert sum(unread in text for texts in lines.values() for text in texts) == 1


@pytest.mark.parametrize(("layout", "row"), [("merged", "conversation"), ("steps", "step")])
def test_what_a_row_of_a_conversation_is(checked: Checked, layout, row):
    keys = ("prompt=conversation", "max_tokens_per_turn=8", f"layout={layout}")
    code, out, err = checked("+turnkey=gigpo", *(f"turnkey.rollout.{key}" for key in keys))
    assert code == 0, err
    assert header(out)["agent loop"] == [f"turnkey_env: a row per {row}"]


def test_micro_batches_of_rows_are_not_ignored(checked: Checked):
    sizes = ("actor.ppo_micro_batch_size_per_gpu=4", "rollout.log_prob_micro_batch_size_per_gpu=4")
    rows = ("actor.use_dynamic_bsz=false", "rollout.log_prob_use_dynamic_bsz=false")
    code, out, err = checked("+turnkey=gigpo", *(f"actor_rollout_ref.{key}" for key in (*sizes, *rows)))
    assert code == 0, err
    assert "ignored" not in header(out)


def test_an_estimator_and_a_loop_of_verls(checked: Checked):
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    code, out, err = checked("+turnkey=base", "algorithm.adv_estimator=grpo", loop)
    assert code == 0, err
    lines = header(out)
    assert lines["estimator"] == ["grpo (verl's)"]
    assert lines["agent loop"][0].startswith("tool_agent (verl's): a row per episode")
    assert lines["per step"] == ["4 tasks x 2 = 8 episodes, 8 rows"]
    assert "environment" not in lines


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("+turnkey/env=babyai", "Add +turnkey=<method>"),
        ("+Turnkey=gigpo", "did you mean +turnkey=gigpo?"),
        ("+turnkey=gigpo trainer.v1.trainer_mode=turnky_sync", "'turnky_sync' | did you mean 'turnkey_sync'"),
        ("+turnkey=gigpo +turnkey.env.kwargs.levle=x", "'levle'"),
        ("+turnkey=gigpo trainer.total_epoch=3", "'trainer.total_epochs'? A key of your own needs a plus: +trainer."),
        ("+turnkey=gigpo trainer.default_local_dir=~/runs", "the shell does not expand this ~: write $HOME"),
        ("+turnkey=gigpo my_env.py", "my_env.py: expected an override, key=value"),
        ("+turnkey=gigpo trainer.test_freq=[1", "trainer.test_freq=[1: Hydra cannot read this override"),
    ],
)
def test_a_refused_line_ends_in_its_message(checked: Checked, line, words):
    code, out, err = checked(*line.split())
    assert code == 1
    assert all(word in err for word in words.split(" | "))
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 8  # Hydra's line with all overrides, ours, and how to see more
    assert ": this run" not in out


def test_a_value_that_nobody_set_is_called_verls_default(stock_overrides: list[str], monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    key, path = "actor_rollout_ref.model.path", "~/models/deepseek-llm-7b-chat"
    line = ["+turnkey=gigpo", *(word for word in stock_overrides if "_files=" not in word and "model.path" not in word)]
    assert dry_run(line) == 1
    err = capsys.readouterr().err
    assert "data.val_files is not set, and verl's default is ~/data/rlhf/gsm8k/test.parquet: set data.val_files=" in err
    assert f"{key}={path} (not set: verl's default): there is no such folder" in err
    assert dry_run([*line, f"{key}='{path}'"]) == 1
    assert f"{key}={path}: there is no such folder" in capsys.readouterr().err
    text, config = "data.max_response_length=512", OmegaConf.create({"data": {"max_response_length": 512}})
    for words, note in {
        "+turnkey=gigpo": " (not set: verl's default)",
        "+turnkey/preset=gigpo_webshop_1.5b": "",
        "+turnkey/preset=hgpo_webshop_7b": "",  # by the preset that it builds on
        "data={max_response_length:512}": "",
    }.items():
        sys.argv = ["turnkey check", words]
        assert with_origins(text, config) == f"{text}{note}"


def test_the_traceback_is_there_when_asked(checked: Checked, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match=r"turnkey\.rollout\.histori"):
        checked("+turnkey=gigpo", "+turnkey.rollout.histori=3")


def test_keys_of_others_in_a_configuration_file_are_found(compose):
    from verl_turnkey.advantage import ConfigError
    from verl_turnkey.plugins.checks.driver import resolve_and_check as check

    for key, value in (("algorithm.gigpo.mode", "mean_norm"), ("env.max_steps", "3")):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            check(compose("+turnkey=gigpo", f"+{key}={value}"), use_critic=False)


def test_the_command_refuses_and_so_does_a_line_of_stock_verl(checked: Checked):
    from typer.testing import CliRunner

    from verl_turnkey.plugins.cli.main import app

    done = CliRunner().invoke(app, ["check", "+turnkey=gigop", "data.train_batch_size=4"])
    assert done.exit_code == 1
    assert "'gigpo'" in done.output
    rows = "micro_batch_size_per_gpu=1"
    stock = [f"actor_rollout_ref.actor.ppo_{rows}", f"actor_rollout_ref.rollout.log_prob_{rows}"]
    code, out, err = checked("algorithm.adv_estimator=grpo", *stock)
    assert code == 1, err
    assert "Add +turnkey=<method>" in out


def test_verls_estimators_are_those_that_we_name():
    assert set(foreign_keys.VERLS_ESTIMATORS) == {member.value for member in AdvantageEstimator}
    own = {*losses(), *(f"turnkey/{name}" for name in losses())}
    assert set(foreign_keys.VERLS_LOSSES) == {*POLICY_LOSS_REGISTRY} - own


@pytest.fixture
def own_file(tmp_path: Path) -> Callable[[str], list[str]]:
    """``own_file(yaml)``: the words that choose a configuration file with verl's own in it and these values."""

    def write(values: str) -> list[str]:
        searched = "hydra: {searchpath: [pkg://verl.trainer.config]}"
        (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{searched}\n{values}\n")
        return [f"--config-path={tmp_path}", "--config-name=mine"]

    return write


@pytest.mark.parametrize(
    ("values", "key", "choice"),
    [
        ("trainer: {v1: {trainer_mode: separate_async}}", "trainer.v1.trainer_mode", "turnkey_separate_async"),
        ("trainer: {v1: {trainer_mode: turnkey_colocate_async}}", "trainer.v1.trainer_mode", "turnkey_colocate_async"),
        (
            "actor_rollout_ref: {rollout: {agent: {default_agent_loop: tool_agent}}}",
            "actor_rollout_ref.rollout.agent.default_agent_loop",
            "tool_agent or turnkey_env",
        ),
    ],
)
def test_modes_and_loops_of_a_users_file_are_not_lost(checked: Checked, own_file, values, key, choice):
    code, _, err = checked(*own_file(values), "+turnkey=gigpo")
    assert code == 1
    assert "your file has" in err
    assert f"write {key}={choice} on the launch line" in " ".join(err.split())


def test_other_values_of_a_users_file_are_named(checked: Checked, own_file):
    file = own_file("trainer: {v1: {trainer_mode: sync}}\nactor_rollout_ref: {rollout: {calculate_log_probs: false}}")
    actor = own_file("actor_rollout_ref: {actor: {loss_agg_mode: token-mean, policy_loss: {loss_mode: cispo}}}")
    code, out, err = checked(
        *actor, "+turnkey=seeupo", "actor_rollout_ref.rollout.agent.default_agent_loop=turnkey_env"
    )
    assert code == 0, err
    replaced = [line for line in header(out)["warning"] if line.startswith("replaced")]
    assert replaced == ["replaced: actor_rollout_ref.actor.policy_loss.loss_mode=cispo of your file, now gspo"]
    code, out, err = checked(*file, "+turnkey=gigpo")
    assert code == 0, err
    # The mode stays what it was, as one of this package, and false is what verl has itself.
    assert not [line for line in header(out).get("warning", ()) if line.startswith("replaced")]


def test_a_line_that_verls_main_takes(checked: Checked):
    code, out, err = checked("--config-path=./config", "--config-name=ppo_trainer", "+turnkey=gigpo")
    assert code == 0, err
    assert "ready: nothing was started" in out


def test_a_flag_without_its_value_is_left_to_hydra(stock_overrides, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert dry_run(["+turnkey=gigpo", *stock_overrides, "--config-path"]) == 1
    assert "expected one argument" in capsys.readouterr().err


def test_flags_may_stand_behind_the_overrides(stock_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    folder = tmp_path / "outputs"
    saves = ["trainer.save_freq=1", f"trainer.default_local_dir={folder}/checkpoints"]
    line = ["+turnkey=gigpo", *stock_overrides, *saves, f"hydra.run.dir={folder}", "--config-name=ppo_trainer"]
    assert dry_run(line) == 0
    assert "ready: nothing was started" in capsys.readouterr().out
    assert not folder.exists()


@pytest.mark.parametrize(
    ("method", "whole"),
    [("gigpo", {"TURNKEY_CHECK_WITH_VERL": "1"}), ("turn_gae", {})],  # a critic: the check starts itself again
)
def test_a_script_in_the_sandbox_and_by_hand(
    method: str, whole: dict[str, str], stock_overrides: list[str], tmp_path: Path
):
    """Its folder, variables and arithmetic are the script's; both ways say the same, and nothing is left behind."""
    (tmp_path / "sub").mkdir()
    script = tmp_path / "launch.sh"
    lines = ["set -eu", 'cd "$(dirname "$0")/sub"', "N=$((2 * 2))"]
    line = shlex.join(["python", "-m", "verl.trainer.main_ppo", f"+turnkey={method}", "+turnkey/env=babyai"])
    lines += [f'{line} {shlex.join(stock_overrides)} "trainer.default_local_dir=$PWD/out" data.train_batch_size=$N']
    script.write_text("\n".join(lines))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    runs = {
        "sandbox": ([sys.executable, "-m", "verl_turnkey", "check", "launch.sh"], {**env, **whole}),
        "by hand": (["bash", "launch.sh"], {**env, "TURNKEY_CHECK": "1"}),
    }
    headers: dict[str, str] = {}
    for name, (command, variables) in runs.items():
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip().endswith("ready: nothing was started")
        headers[name] = done.stdout[done.stdout.index(": this run\n") :]
        assert not (tmp_path / "sub" / "out").exists()
        if name == "sandbox":
            assert "launch.sh: run in a sandbox; it calls verl.trainer.main_ppo with" in done.stdout
            assert not [*(tmp_path / "sub").iterdir()]
    assert headers["sandbox"] == headers["by hand"]
    assert "4 tasks x 2" in headers["sandbox"]


def test_by_hand_a_line_of_stock_verl_is_told_from_ours(stock_overrides: list[str], tmp_path: Path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", *stock_overrides]
    command += ["actor_rollout_ref.actor.use_dynamic_bsz=true"]
    env = {**os.environ, "TURNKEY_CHECK": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (1, [STOCK_VERL]), done.stderr
