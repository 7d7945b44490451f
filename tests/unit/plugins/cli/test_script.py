"""`turnkey check launch.sh` checks the words that bash passes to verl's main program, and nothing else happens."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli import check, script, script_stubs, without_torch
from verl_turnkey.plugins.cli.check import may_sweep
from verl_turnkey.plugins.cli.without_torch import Absent, Mark, NeedsVerl, possible
from verl_turnkey.plugins.config import machine

SCRIPTS = [
    "python -m verl.trainer.main_ppo +turnkey=gigpo data.train_batch_size=16",
    "#!/usr/bin/env bash\nset -x\npython3 -m verl.trainer.main_ppo \\\n    +turnkey=gigpo \\\n"
    "    trainer.logger=[console,file]\n",
    'MODEL=Qwen/Qwen3-0.6B\nexport N=8  \nROOT="/data/my runs"\n# python -m verl.trainer.main_ppo old\n'
    'python -u -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL "trainer.default_local_dir=${ROOT}/a b" '
    "actor_rollout_ref.rollout.n=${N:-4} trainer.nnodes=${NODES:-2} $@ 2>&1 | tee log",
    "python -m verl.trainer.main_ppo 'turnkey.rewards=[{name: step},{name: length, weight: -0.01}]' "
    "'data.val_files=${data.train_files}' --config-name ppo_trainer && echo done",
    "python -m verl.trainer.main_ppo a.b=1; ray stop",
    "python -m verl.trainer.main_ppo a.b=1 > train.log &",
    "python -m verl.trainer.main_ppo a.b=run#1 '' \"c=\" d.e=2 # don't keep $LOG",
    "python -m verl.trainer.main_ppo \"a=\\${data.train_files}\" b=\\${c.d} 'e=\"$F\"' 'g=$H'",
    'ROOT=/data\nNAME="a b"\npython -m verl.trainer.main_ppo a=${DIR:-$ROOT/x} b=${C:-${D:-3}} "e=${NAME}" f=$NAME',
    "STAMP=$(date)\npython -m verl.trainer.main_ppo a=1 | tee $STAMP.log",
    "DATA=(\n    a.b=1  # one\n    'c.d=[1, 2]'\n)\nDATA+=(e=3)\nMORE='f=4'\nMORE+=' g=5'\n"
    'python -m verl.trainer.main_ppo \\\n    "${DATA[@]}" \\\n    $MORE h.i=6 "$@"\n',
    "python -m verl.trainer.main_ppo a=x\\\ny 'b={c: 1,\n d: 2}'\necho done",
    "(OMP_NUM_THREADS=1 python -m verl.trainer.main_ppo a=1)",
    'if [ -n "$HOME" ]; then N=16; else N=2; fi\npython -m verl.trainer.main_ppo a=$((N * 2)) b=$(pwd) c=`expr 3 + 4`',
    "bash -c 'python -m verl.trainer.main_ppo a=1 b=\"c d\"'",
    "set -eu\nmkdir -p logs\nexec python3 -m verl.trainer.main_ppo a=1 > logs/x.log",
    "for K in 1 2; do python -m verl.trainer.main_ppo a=1; done",
    "turnkey check a=1 --prompt\ngit checkout -- verl/trainer/main_ppo.py || true\npython -m verl.trainer.main_ppo a=1",
]
PYTHON = f"""#!{sys.executable}
import json, sys
if "verl.trainer.main_ppo" in sys.argv:
    words = sys.argv[sys.argv.index("verl.trainer.main_ppo") + 1 :]
    open("words.json", "w").write(json.dumps(words))
"""


@pytest.mark.parametrize("text", SCRIPTS)
def test_words_are_those_of_bash(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("python", "python3", "ray"):
        (tmp_path / name).write_text(PYTHON)
        (tmp_path / name).chmod(0o755)
    launch = tmp_path / "launch.sh"
    launch.write_text(text)
    before = sorted(tmp_path.iterdir())
    words = script.read(launch).arguments
    assert sorted(tmp_path.iterdir()) == before
    path = f"{tmp_path}:/usr/bin:/bin"
    subprocess.run(["bash", str(launch)], check=True, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL)
    for _ in range(100):  # a script that runs it in the background ends first
        if (tmp_path / "words.json").exists() and (tmp_path / "words.json").read_text():
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert words == json.loads((tmp_path / "words.json").read_text())
    assert words


def run(text: str, folder: Path) -> script.Call:
    (folder / "launch.sh").write_text(text)
    return script.read(folder / "launch.sh")


def test_programs_that_do_something_are_not_run_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").write_text("of a run")
    lines = ["set -e", "ulimit -n 999999999999", "pip install x", "conda activate y", "ray start --head"]
    lines += ["python prepare.py --out data", "rm train.log", "no_such_program 1", "N=$(python3 -c 'print(2 + 3)')"]
    lines += ["cd /", "export WHERE='a b' PYTHONPATH=/own:$PYTHONPATH"]
    lines += [f"{sys.executable} -m verl.trainer.main_ppo n=$N > {tmp_path}/train.log"]
    call = run("\n".join(lines), tmp_path)
    assert call.arguments == ["n=5"]
    assert (call.cwd, call.env["WHERE"]) == ("/", "a b")
    programs = ["pip install x", "conda activate y", "ray start --head", "python prepare.py --out data"]
    assert call.skipped == [*programs, "no_such_program 1"]
    assert (tmp_path / "train.log").read_text() == "of a run"
    assert script.arguments(["launch.sh"]) == (
        ["n=5"],
        [
            "launch.sh: run in a sandbox; it calls verl.trainer.main_ppo with 1 arguments",
            *(f"    not run: {line}" for line in call.skipped),
        ],
    )


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("ray job submit --no-wait -- bash -c 'python3 -m verl.trainer.main_ppo a=$((1 + 1))'", "a=2"),
        ("torchrun --nproc_per_node=2 -m verl.trainer.main_ppo a=3", "a=3"),
        ("(echo > /dev/tcp/127.0.0.1/22) 2>&1 || A=none\npython -m verl.trainer.main_ppo a=$A", "a=none"),  # no network
    ],
)
def test_what_a_job_of_ray_and_a_launcher_start_is_read_without_a_network(text: str, argument: str, tmp_path: Path):
    assert run(text, tmp_path).arguments == [argument]


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("nvidia-smi -L | wc -l", "2"),
        ("nvidia-smi --list-gpus | tail -1", "GPU 1: NVIDIA H100 (UUID: GPU-1)"),
        ("nvidia-smi --query-gpu=index,name --format=csv,noheader | tail -1", "1, NVIDIA H100"),
        ("nvidia-smi --query-gpu=memory.total --format=csv | tail -1", "81539 MiB"),
        ("nvidia-smi --query-gpu=memory.total --format=csv,nounits,noheader | head -1", "81539"),
        ("nvidia-smi --query-gpu=memory.total --format=csv,nounits | head -1", "memory.total [MiB]"),
        ("nvidia-smi --query-gpu=gpu_name,gpu_uuid --format=noheader,csv | tail -1", "NVIDIA H100, GPU-1"),
        ("nvidia-smi -i 1 --query-gpu=index --format=csv,noheader", "1"),
        ("nvidia-smi --id=0 -L", "GPU 0: NVIDIA H100 (UUID: GPU-0)"),
        ("nvidia-smi --format=csv --query-gpu=uuid,index -i GPU-0 | tail -1", "GPU-0, 0"),
    ],
)
def test_questions_about_gpus_are_answered_by_those_of_the_check(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(machine.GPU, "h100:2")
    call = run(f'python -m verl.trainer.main_ppo "a=$({command})"', tmp_path)
    assert (call.arguments, call.skipped) == ([f"a={output}"], [])


@pytest.mark.parametrize("words", ["", "-L -i 2", "--query-gpu --format", "--query-gpu=index --format=csv -l"])
def test_what_no_answer_is_known_to_is_not_run(words: str) -> None:
    assert script_stubs.gpus(2, "NVIDIA H100", 81539, words.split()) is None


COUNTED = "trainer.n_gpus_per_node"
FOUND_NONE = f"    {COUNTED}=0, and nvidia-smi was not run: "


@pytest.mark.parametrize(
    ("gpu", "question", "further", "added"),
    [
        ("", f"{COUNTED}=$(nvidia-smi -L | wc -l)", [], f"{FOUND_NONE}add --gpu h100:8, or write the number out"),
        ("h100", f"{COUNTED}=$(nvidia-smi -L | wc -l)", [], f"{FOUND_NONE}add --gpu h100:8, or write the number out"),
        ("h100:2", f"{COUNTED}=$(nvidia-smi topo -m | wc -l)", [], f"{FOUND_NONE}write the number out"),
        ("", f"{COUNTED}=$(nvidia-smi -L | wc -l)", [f"{COUNTED}=2"], None),
        ("h100:2", f"{COUNTED}=2 data.train_batch_size=0", [], None),
        ("", f"trainer.nnodes=$(nvidia-smi -L | wc -l) {COUNTED}=2", [], None),
    ],
)
def test_an_unanswered_question_about_gpus_is_named_where_their_number_is_0(
    gpu: str, question: str, further: list[str], added: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # As on a machine without the program.
    without = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", machine.GPU: gpu}
    monkeypatch.setattr(os, "environ", {**os.environ, **without})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\nexec {script.INSIDE}/bin/.skipped nvidia-smi "$@"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "launch.sh").write_text(f"nvidia-smi\npython -m verl.trainer.main_ppo {question}\n")
    notes = script.arguments(["launch.sh", *further])[1]
    assert notes[1] == "    not run: nvidia-smi"
    assert [line for line in notes[1:] if not line.startswith("    not run: ")] == [added] * (added is not None)


def test_the_gpus_of_this_machine_are_counted_where_the_check_names_none(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(machine.GPU, raising=False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\necho GPU 1\necho GPU 2\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    call = run(f"python -m verl.trainer.main_ppo {COUNTED}=$(nvidia-smi -L | wc -l)", tmp_path)
    assert (call.arguments, call.skipped) == ([f"{COUNTED}=3"], [])


def test_folder_and_variables_of_the_call_are_those_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("KEPT", "1"), ("PYTHONPATH", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = os.environ["PATH"]
    (tmp_path / "sub").mkdir()
    call = run("cd sub\nexport KEPT=2\nPYTHONPATH=own python -m verl.trainer.main_ppo a=1 c=3", tmp_path)
    script.enter(call)
    assert Path.cwd() == tmp_path / "sub"
    assert (os.environ["KEPT"], os.environ["PATH"]) == ("2", path)
    assert sys.path[0] == str(tmp_path / "sub" / "own")
    assert "TURNKEY_CHECK" not in os.environ
    with pytest.raises(ConfigError, match="made, a folder that it makes itself: make it first"):
        script.enter(replace(call, cwd=str(tmp_path / "made")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo nothing", "expected one call of verl.trainer.main_ppo, found 0"),
        ("python -m recipe.dapo.main_dapo a=1", "found 0; it calls python -m recipe.dapo.main_dapo a=1"),
        ("python -m verl.trainer.main_ppo a=1\npython -m verl.trainer.main_ppo a=2", "found 2"),
        ("set -u\npython -m verl.trainer.main_ppo a=$NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE: unbound variable"),
        ("python -m verl.trainer.main_ppo 'a=1", "unexpected EOF"),
        ("python -m verl.trainer.main_ppo a=1 > /usr/x.log", r"found 0 \(bash: .*Read-only file system\)"),
    ],
)
def test_a_script_without_one_call_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(text, tmp_path)


LINE = ["+turnkey=gigpo", "a.b=1"]


@pytest.mark.parametrize(
    "words",
    [
        LINE,
        ["python", "-m", "verl.trainer.main_ppo", *LINE],
        ["PASTED=1", "/opt/bin/python3.11", "-u", "-m", "verl.trainer.main_ppo", *LINE],
        ["python3", "/src/verl/trainer/main_ppo.py", *LINE],
        ["ray", "job", "submit", "--", "python3", "-m", "verl.trainer.main_ppo", *LINE],
        ["turnkey", "check", *LINE],
        ["PASTED=1 python3 -m verl.trainer.main_ppo \\\n  +turnkey=gigpo 'a.b=1' 2>&1 | tee train.log"],
        ["+turnkey=gigpo a.b=1"],
        ["+turnkey=gigpo \\\n a.b=1 \\\n"],
        ["+turnkey=gigpo a.b=$PASTED_BEFORE 2>&1 | tee train.log"],
        ["python", "-m", "debugpy", "--listen", "5678", "-m", "verl.trainer.main_ppo", *LINE],
        ["cd . && python3 -m verl.trainer.main_ppo > train.log +turnkey=gigpo 2>&1 'a.b=1' && echo python -m a.b"],
        ['set -x; export HERE=1; WHAT=$HERE\npython3 -m verl.trainer.main_ppo +turnkey=gigpo a.b=$WHAT "$@"'],
        ["PASTED=0", "env", "PASTED=1", "python", "-m", "verl.trainer.main_ppo", *LINE],
        ["turnkey", "check", "python", "-m", "verl.trainer.main_ppo", *LINE],
        ["bash -c 'python -m verl.trainer.main_ppo +turnkey=gigpo a.b=$((2 - 1))'"],
        ["bash", "-c", "python -m verl.trainer.main_ppo +turnkey=gigpo a.b=1"],
        ["python3 -m verl.trainer.main_ppo \\\r\n +turnkey=gigpo \\\r\n a.b=${PASTED_BEFORE} # don't keep\r\n"],
    ],
)
def test_a_pasted_command_is_its_arguments(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ, "PASTED_BEFORE": "1"})
    assert script.arguments(words)[0] == LINE
    assert os.environ.get("PASTED") == ("1" if words[0].startswith("PASTED") else None)


def test_one_override_before_the_end_of_a_line_is_an_override() -> None:
    assert script.arguments(["a.b=1 \\\n"]) == (["a.b=1"], [])


def test_folder_and_variables_of_a_pasted_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ, "PYTHONPATH": "/before"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    text = "cd src && PYTHONPATH=own:$PYTHONPATH NONE=x:$NOT_SET python -m verl.trainer.main_ppo 'a.b=${c.d}'"
    assert script.arguments([text])[0] == ["a.b=${c.d}"]
    assert (Path.cwd(), sys.path[0]) == (tmp_path / "src", str(tmp_path / "src" / "own"))
    assert os.environ["NONE"] == "x:"
    with pytest.raises(ConfigError, match=r"^the command: expected one call .*, found 0 \(bash: .* src: No such file"):
        script.arguments([text])


@pytest.mark.parametrize(
    "words",
    [
        ["a.b=c d"],
        ["a.b='c"],
        ["-m", "a.b=1,2"],
        [],
        ["turnkey.agent.run=python -m my.agent"],
        ["turnkey.rollout.system=x=1 y=2"],
        ["+a=b | c.d=1"],
        ["trainer.default_local_dir=/ckpt/turnkey", "trainer.n_gpus_per_node=1"],
        ["--config-dir", "conf/turnkey", *LINE],
        ["--config-name", "turnkey", "a.b=1"],
    ],
)
def test_other_words_stay_as_they_are(words: list[str]) -> None:
    assert script.arguments(words) == (words, [])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["launch.sh", "a=1"], ["b=none", "a=1"]),  # behind the script's
        (["bash", "launch.sh", "a=1"], ["b=a=1"]),  # the script's own
        (["PASTED=1 2", "nohup", "bash", "-x", "launch.sh", "a=1"], ["b=a=1"]),
        (["source env.sh && bash launch.sh a=1 2>&1 | tee log"], ["b=a=1"]),
        (["PASTED='1 2' ./launch.sh a=1 &"], ["b=a=1"]),
    ],
)
def test_the_script_of_a_pasted_command(
    words: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.sh").touch()
    (tmp_path / "launch.sh").write_text("#!/bin/bash\npython -m verl.trainer.main_ppo b=${1:-none}\n")
    (tmp_path / "launch.sh").chmod(0o755)
    passed, notes = script.arguments(words)
    assert (passed, notes[1:]) == (expected, ["    not run: tee log"] * ("tee" in words[-1]))
    assert os.environ.get("PASTED") == ("1 2" if words[0].startswith("PASTED") else None)


@pytest.mark.parametrize(
    ("name", "shebang", "is_script"),
    [
        ("launch.bash", "", True),
        ("launch.sbatch", "#!/bin/bash -l", True),
        ("launch.slurm", "", True),
        ("launch", "#!/bin/bash", True),
        ("launch", "#!/usr/bin/env bash", True),
        ("launch", "#!/usr/bin/env -S bash -e", True),
        ("launch", "#! /bin/sh", True),
        ("launch", "#!/usr/bin/env python3", False),
        ("launch", "", False),
        ("launch.txt", "#!/bin/bash", False),
    ],
)
def test_a_shell_script_is_known_by_its_suffix_or_its_first_line(
    name: str, shebang: str, is_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(f"{shebang}\npython -m verl.trainer.main_ppo a.b=1\n")
    if is_script:
        assert script.arguments([name, "c.d=2"])[0] == ["a.b=1", "c.d=2"]
    else:
        with pytest.raises(ConfigError, match=f"^{name}: expected overrides"):
            script.arguments([name])


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (
            ["python", "-m", "verl.trainer.sft_trainer", *LINE],
            "python -m verl.trainer.sft_trainer +turnkey=gigpo a.b=1",
        ),
        (["python -m recipe.dapo.main_dapo a.b=1"], "python -m recipe.dapo.main_dapo a.b=1"),
        (["python3", "train.py", *LINE], "python3 train.py +turnkey=gigpo a.b=1"),
        (["turnkey", "train", "babyai"], "turnkey train babyai"),
    ],
)
def test_a_command_of_another_program_is_refused(words: list[str], call: str) -> None:
    expected = rf"^the command: expected one call of verl.trainer.main_ppo, found 0; it calls .*{re.escape(call)}\. "
    with pytest.raises(ConfigError, match=expected):
        script.arguments(words)


@pytest.mark.parametrize(
    ("word", "advice"), [("my_env.py", "; to check an environment, run `turnkey env-check my_env.py`"), ("gigpo", "")]
)
def test_a_word_that_is_no_override_is_refused(word: str, advice: str) -> None:
    expected = rf"^{word}: expected overrides \(key=value\), a shell script, or a full launch command{advice}$"
    with pytest.raises(ConfigError, match=expected):
        script.arguments([word])
    for words in (["+turnkey=gigpo"], ["--help"], ["~algorithm"]):
        assert script.arguments(words) == (words, [])


def test_a_command_with_an_open_quote_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found 0 \(bash: .*unexpected EOF.*\. Instead, pass .*, without quotes$"):
        script.arguments(["echo 'a b"])


def test_a_script_that_waits_or_has_no_sandbox_is_run_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "SECONDS", 1)
    with pytest.raises(
        ConfigError, match=r"takes more than 1 s where nothing trains: pass .*, or run `TURNKEY_CHECK=1 bash"
    ):
        run("while ! ray status | grep -q ready; do sleep 5; done\npython -m verl.trainer.main_ppo", tmp_path)
    monkeypatch.setattr(script, "bwrap_problem", lambda: "bwrap is not installed")
    with pytest.raises(
        ConfigError, match=r"bwrap is not installed. Install it, or pass .*, or run `TURNKEY_CHECK=1 bash .*launch"
    ):
        run("python -m verl.trainer.main_ppo", tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"^the command is run in a sandbox, .* Install it, or pass the arguments of .*, without quotes$",
    ):
        script.arguments(["python -m verl.trainer.main_ppo a=$HOME"])
    for words in (["python", "-m", "verl.trainer.main_ppo", *LINE], [" ".join(LINE)]):  # need no shell
        assert script.arguments(words) == (LINE, [])


# --- without torch: names without values pass through definitions, and whoever computes with one hears of it ----------


TORCH = Absent("torch")


def test_definitions_pass():
    tensor = TORCH.Tensor
    assert tensor in (tensor, Any)

    @Mark("torch.no_grad")()
    def double(values: tensor | None, others: tensor | None = None) -> tuple[tensor, dict[str, tensor]]:
        return values, {}

    @dataclass
    class Row:
        values: tensor  # pyright: ignore[reportInvalidTypeForm]
        kind: Any = field(default=TORCH.float32)

    assert Row(3).kind is not None
    assert double(3) == (3, {})


@pytest.mark.parametrize(
    "compute",
    [
        lambda: TORCH.cuda.is_available(),
        lambda: bool(TORCH.version),
        lambda: TORCH.float32 == "float32",
        lambda: isinstance(3, TORCH.Tensor),
        lambda: issubclass(int, TORCH.Tensor),
        lambda: types.new_class("Net", (TORCH.nn.Module,)),
        lambda: [*TORCH.devices],
        lambda: len(TORCH.devices),
        lambda: 3 in TORCH.devices,
        lambda: TORCH.count > 1,
        lambda: setattr(TORCH, "threads", 1),
    ],
)
def test_to_compute_with_one_needs_verl(compute: Callable[[], Any]):
    with pytest.raises(NeedsVerl), suppress(Exception):  # which checks turn into findings
        compute()


def test_a_class_of_verl_on_the_line_needs_verl():
    assert not possible(["+trainer.checkpoint_callback_class=verl.trainer.Callback"])


def test_what_needs_verl_starts_again_with_the_same_words_also_from_another_program(monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setattr(check, "dry_run", lambda *_, **__: (_ for _ in ()).throw(NeedsVerl))
    monkeypatch.setattr(without_torch, "possible", lambda _: True)
    monkeypatch.setattr(without_torch, "install", lambda: None)
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(os, "execve", lambda program, words, env: started.append((words, env[check.WHOLE])))
    check.quick_run(["--multirun", "a=1"], prompt=True)
    assert started == [([sys.executable, "-m", "verl_turnkey", "check", "--prompt", "--multirun", "a=1"], "1")]


@pytest.mark.parametrize("word", ["--multirun", "hydra.mode=MULTIRUN", "+hydra.sweep.dir=a", "hydra/launcher=basic"])
def test_words_of_hydra_may_start_several_runs(word: str):
    assert may_sweep(["+turnkey=gigpo", "hydra.run.dir=/runs/1", word])
    assert not may_sweep(["+turnkey=gigpo", "hydra.run.dir=/runs/1", "trainer.experiment_name=hydra"])
