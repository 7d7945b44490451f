"""The words that `turnkey check launch.sh` reads are those that bash passes to verl's main program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli.check import arguments

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
    script = tmp_path / "launch.sh"
    script.write_text(text)
    path = f"{tmp_path}:/usr/bin:/bin"
    subprocess.run(["bash", str(script)], check=True, env={"PATH": path}, stdout=subprocess.DEVNULL)
    for _ in range(100):  # a script that runs it in the background ends first
        if (tmp_path / "words.json").exists() and (tmp_path / "words.json").read_text():
            break
        subprocess.run(["sleep", "0.1"], check=True)
    words = arguments(script)
    assert words == json.loads((tmp_path / "words.json").read_text())
    assert words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo nothing", "expected one call of verl.trainer.main_ppo, found 0"),
        ("python -m verl.trainer.main_ppo a=1\npython -m verl.trainer.main_ppo a=2", "found 2"),
        ("python -m verl.trainer.main_ppo a=$NOT_SET_ANYWHERE", r"uses \$NOT_SET_ANYWHERE, which is not set"),
        ("python -m verl.trainer.main_ppo a=$(date)", r"a=\$\(date cannot be read without running bash"),
        ("NOW=`date`\npython -m verl.trainer.main_ppo a=$NOW", r"a=\$NOW cannot be read"),
        ("python -m verl.trainer.main_ppo ${ARGS[@]}", r"\$\{ARGS\[@\]\} cannot be read"),
        ("bash -c 'python -m verl.trainer.main_ppo a=1'", "a quote is not closed"),
    ],
)
def test_an_unreadable_script_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(text)
    with pytest.raises(ConfigError, match=message):
        arguments(tmp_path / "launch.sh")
