"""What `turnkey train` shows of what a run prints."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_turnkey.plugins.cli import console
from verl_turnkey.plugins.cli.console import Reader, follow
from verl_turnkey.plugins.cli.packages import turnkey

RUN = """
import sys
print("verl-turnkey 1.0: this run")
print("  estimator    gigpo")
print("  steps        2; continues after step 0")
print("  sampling     temperature 1.0")
print("  validation   before the first step: 4 tasks x 1 episode,")
print("               greedy (temperature 0)")
print("noise of vLLM")
print("\\x1b[36m(TaskRunnerV1 pid=12)\\x1b[0m WARNING:verl_turnkey.rollout: a group of one", file=sys.stderr)
print("WARNING:verl_turnkey:  a group of one", file=sys.stderr)
print("(TaskRunnerV1 pid=12) step:0 - val-core/x/acc/mean@1:np.float64(0.25)")
step = "episode/success_rate:0.5 - episode/env_return/mean:0.5 - episode/length/mean:4.0 - episode/invalid_rate:0.125"
step += " - timing_s/step:9.6"
print(f"(TaskRunnerV1 pid=12) step:1 - {step} - episode/failed:0")
print(f"(TaskRunnerV1 pid=12) step:2 - {step} - episode/failed:3 - val-core/x/acc/mean@1:0.75")
"""


def run(program: str, folder: Path, **options) -> int:
    return follow([sys.executable, "-c", program], folder, **{"verbose": False, **options})


def test_header_warnings_once_a_line_a_step_and_the_end(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(RUN, tmp_path / "run") == 0
    lines = capfd.readouterr().out.splitlines()
    assert {*lines[:7]} > {"verl-turnkey 1.0: this run", "  estimator    gigpo", "warning: a group of one"}
    assert lines[7:] == [
        "validation after step 0: success 0.250 (greedy)",
        "step 1/2  success 0.50  env return 0.50  turns 4.0  invalid 12%  seconds 10",
        "step 2/2  success 0.50  env return 0.50  turns 4.0  invalid 12%  failed 3  seconds 10",
        "validation after step 2: success 0.750 (greedy)",
        "validation (greedy): success 0.250 after step 0, 0.750 after step 2",
        "log: run/train.log; each turn: turnkey view run; evaluate: turnkey eval run",
    ]
    assert "noise of vLLM" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize(
    ("penalty", "cell"),
    [((-0.1, 0.05, 1.0), "nonzero credit 100% (penalties alone)"), ((-0.1, 0.0, 1.0), "nonzero credit 100%"), ((), "")],
)
def test_credit_of_penalties_alone_is_called_so(penalty, cell):
    metrics = {"episode/length/mean": 4.0}
    for part, numbers in (("advantage", (-0.1, 0.05, 1.0) if penalty else (0.0, 0.0, 0.0)), ("penalty", penalty)):
        names = ("mean", "std", "share_nonzero")[: len(numbers)]
        metrics |= {f"credit/{part}/{name}": number for name, number in zip(names, numbers, strict=True)}
    [line] = Reader().step(1, metrics)
    assert line == f"step 1  turns 4.0  {cell or 'nonzero credit 0%'}"


def test_verbose_shows_all_and_a_sampled_validation_is_not_called_greedy(tmp_path, capfd):
    assert run(RUN, tmp_path, verbose=True) == 0
    output = capfd.readouterr().out
    assert "noise of vLLM" in output
    assert "validation (greedy): success 0.250 after step 0, 0.750 after step 2" in output
    sampled = RUN.replace("greedy (temperature 0)", "temperature 0.7").replace("temperature 1.0", "greedy")
    assert run(sampled, tmp_path) == 0
    assert "validation: success 0.250 after step 0, 0.750 after step 2" in capfd.readouterr().out


def test_a_failure_shows_its_last_lines_without_the_page_that_ray_writes_about_a_dead_process(tmp_path, capfd):
    assert run("print('why it ended'); raise SystemExit(69)", tmp_path) == 69
    errors = capfd.readouterr().err
    assert "why it ended" in errors
    assert "exit code 69" in errors
    text = "'Eviction Stats:', 'verl-turnkey: a process of the run is dead: out of memory. To resume:', 'python -m x'"
    assert run(f"for line in ({text}): print(line)\nraise SystemExit(69)", tmp_path) == 69
    errors = capfd.readouterr().err
    assert errors.startswith("verl-turnkey: a process of the run is dead: out of memory. To resume:\npython -m x\n")
    assert "exit code 69" in errors


def test_a_run_with_hydras_record_is_resumed_on_this_console(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = tmp_path / "my run" / "hydra" / ".hydra" / "hydra.yaml"
    record.parent.mkdir(parents=True)
    record.touch()
    stopped = "verl-turnkey: SIGTERM: stopped. To resume:"
    for mode in ("", " trainer.resume_mode=auto"):
        program = f"print('{stopped}\\npython -m x{mode}'); raise SystemExit(75)"
        assert run(program, tmp_path / "my run") == 75
        assert capfd.readouterr().err.startswith(f"{stopped}\nturnkey resume 'my run'{mode}\nthe run")


@pytest.mark.parametrize(
    ("argv", "path", "command"),
    [
        (".venv/bin/turnkey", "", ".venv/bin/turnkey"),
        ("/a b/turnkey", "", "'/a b/turnkey'"),
        (".venv/bin/turnkey", ".", "turnkey"),
        ("pytest", "", "turnkey"),
    ],
)
def test_commands_to_copy_start_the_program_in_this_shell(tmp_path, monkeypatch, argv, path, command):
    """``turnkey`` is on the PATH only where the virtual environment is activated."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "turnkey").touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [argv])
    monkeypatch.setenv("PATH", path and str(tmp_path))
    assert turnkey() == command


def test_an_earlier_start_in_the_same_log_is_not_shown_again(tmp_path, capfd):
    (tmp_path / "train.log").write_text("step:1 - episode/length/mean:4.0\n")
    assert run("print('step:2 - episode/length/mean:5.0')", tmp_path) == 0
    output = capfd.readouterr().out
    assert "step 2  turns 5.0" in output
    assert "step 1" not in output


START = Path(__file__).parents[3] / "data" / "start.txt"
"""what a run of verl 0.9.0, vLLM and Ray printed until its second step, without most of the values"""


def test_a_start_names_its_phases():
    reader = Reader()
    lines = list(reader.lines(START.open(encoding="utf-8")))
    assert [line for line in lines if not line.startswith(("  ", "verl-turnkey"))] == [
        "starting Ray ...",
        "starting verl's trainer ...",
        "reading the tasks ...",
        "loading the model ...",
        "starting vLLM ...",
        "starting the agent loops ...",
        "validating before training ...",
        "validation after step 0: success 0.148 (greedy)",
        "step 1/6 ...",
        "step 1/6  success 0.28  env return 0.28  turns 2.1  invalid 3%  seconds 25",
    ]
    assert reader.phases.current == "step 2/6"


def test_a_start_without_validation_or_from_a_checkpoint():
    text = START.read_text(encoding="utf-8").replace("before the first step, every", "every")
    text = text.replace("Checkpoint tracker file does not exist: ", "Found checkpoint: %s ").replace("| 0/6", "| 4/6")
    lines = [line for line in Reader().lines(text.splitlines()) if line.endswith(" ...")]
    phases = ["starting vLLM", "starting the agent loops", "loading the checkpoint", "step 5/6"]
    assert lines[4:] == [f"{phase} ..." for phase in phases]


def test_a_run_of_minutes_says_what_it_is_doing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY", -1.0)
    program = "import time; time.sleep(2); print('ray init kwargs: {}', flush=True); time.sleep(2)"
    assert run(program, tmp_path) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "running for 0 min"
    assert {*lines[1:-1]} == {"running for 0 min", "starting Ray ...", "running for 0 min: starting Ray"}


@pytest.mark.parametrize(
    ("metrics", "success"),
    [
        ("val-core/a/acc/mean@1:1.0 - val-core/b/acc/mean@1:0.0", "0.500"),
        # Of n samples verl also says the best of some, and the deviation of both; val-aux has the smaller numbers.
        ("val-core/a/acc/mean@4:0.25 - val-core/a/acc/best@4/mean:0.57 - val-core/a/acc/best@4/std:0.31 - "
         "val-aux/a/acc/std@4:0.4 - val-aux/a/acc/mean@3:0.9 - val-aux/a/acc/best@2/mean:0.4 - "
         "val-aux/a/acc_success_only/mean@4:0.3 - val-aux/a/failed/mean@4:0.1", "0.250"),
    ],
)  # fmt: skip
def test_the_success_of_a_validation_is_the_mean_of_all_samples_and_data_sources(metrics, success):
    assert list(Reader().lines([f"step:3 - {metrics}"])) == [f"validation after step 3: success {success}"]


def test_sigterm_reaches_the_run(tmp_path):
    program = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('on', flush=True)\n"
    program += "for _ in range(300): time.sleep(0.1)"
    code = (
        "import sys; from pathlib import Path; from verl_turnkey.plugins.cli.console import follow; "
        f"sys.exit(follow([sys.executable, '-c', {program!r}], Path({str(tmp_path)!r}), verbose=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
