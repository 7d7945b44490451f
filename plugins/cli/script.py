"""The arguments that a launch script passes to verl's main program, from a run of it in which nothing trains.

bash runs the script in a sandbox of ``bwrap``: no network, files read-only, except that the current folder and the
script's take what is written, and forget it. Programs that train, install or copy are recorded in place of being run
(:mod:`script_stubs`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.agents.sandboxes import bwrap_problem
from verl_turnkey.plugins.checks.driver import STOPS
from verl_turnkey.plugins.cli import script_stubs

MAIN = "verl.trainer.main_ppo"
OURS = re.compile(r"verl\.trainer\.main_ppo|(.*/)?main_ppo\.py|turnkey check")
"""programs that take the arguments of :data:`MAIN`"""
WORD = r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|`[^`]*`|[^\s();<>|&'"\\`])+"""
TOKEN = re.compile(
    rf"[^\S\n]+|#[^\n]*|(?:\d*[<>]|&>)[<>&|]*[ \t]*(?:{WORD})?|(?P<operator>[();|&\n]+)|(?P<word>{WORD})", re.DOTALL
)
"""of a line of a shell: blanks, a comment, a redirection, an operator or a word"""
SHELL = re.compile(r"\$\(|`[^`]*`|\$\{\w+(?:[^\w.}:\[]|:[-=+?]|\[@)|\$\{[A-Z_][A-Z_0-9]*\}|\$[A-Za-z_]\w*")
"""what only a shell can replace; ``${data.train_files}`` is Hydra's"""
UNQUOTE = "Leave out the quotes around the command, so that your shell reads it, or give the path of a script"
VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
KEYED = re.compile(r"(?:[+~]+[A-Za-z_]|[A-Za-z_][\w-]*[./@])[\w./@-]*=")
"""an override, whose key no shell takes for a variable"""
ARGUMENT = re.compile(rf"{KEYED.pattern}|--config-(?:name|path|dir)|-c[npd](?:=|$)")
"""behind it there is no program"""
POSITIONAL = ("$@", "${@}", "$*")
SECONDS = 60
INSIDE = script_stubs.FOLDER
PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 15)))
DEVICES = ("nvidia*", "kfd", "dri", "davinci*")
"""accelerators below /dev, which a script may count"""
LAUNCHERS = ("ray", "torchrun", "accelerate")
HARMLESS = ("mkdir", "rmdir", "touch", "rm", "cp", "mv", "ln", "chmod", "chown")
"""tried, for the sake of what the script writes to the current folder; failures are ignored"""
SKIPPED = (
    *("pip", "pip3", "uv", "conda", "mamba", "apt", "apt-get", "yum", "dnf", "apk", "npm", "make", "cmake", "sudo"),
    *("git", "wget", "curl", "aria2c", "rsync", "scp", "ssh", "hf", "huggingface-cli", "modelscope", "wandb", "hdfs"),
    *("docker", "podman", "kubectl", "srun", "sbatch", "mpirun", "deepspeed", "vllm", "tar", "unzip", "sleep", "pkill"),
)
OVERLAYS = f"""\
cover() {{
    mkdir {INSIDE}/written/$1 {INSIDE}/written/$1/upper {INSIDE}/written/$1/work
    layers="lowerdir=$2,upperdir={INSIDE}/written/$1/upper,workdir={INSIDE}/written/$1/work"
    mount -t overlay -o "$layers,userxattr" overlay "$2" || mount -t overlay -o "$layers" overlay "$2"
}}
folder="$(dirname "$1")"
mount -t tmpfs tmpfs {INSIDE}/written 2>/dev/null
cover 1 "$PWD" 2>/dev/null
case "$folder/" in "$PWD"/*) ;; *) cover 2 "$folder" 2>/dev/null ;; esac
cd "$PWD"
bash "$@"
status=$?
for look in {{1..100}}; do
    others=0
    for process in /proc/[0-9]*; do case "${{process#/proc/}}" in 1 | $$) ;; *) others=1 ;; esac; done
    [ $others = 0 ] && break
    command -p sleep 0.05
done
exit $status
"""
"""covers the current folder and the script's with layers of memory; background processes have five seconds more"""
FUNCTIONS = f"""\
command_not_found_handle() {{ {INSIDE}/bin/.skipped "$@"; }}
ulimit() {{ builtin ulimit "$@" 2>/dev/null || true; }}
"""


@dataclass(frozen=True)
class Call:
    """The script's call of verl's main program."""

    arguments: list[str]
    cwd: str
    env: dict[str, str]
    skipped: list[str]
    """commands that were not run"""


def read(script: Path) -> Call:
    """What ``script`` passes to :data:`MAIN`, where, with which environment.

    Raises:
        ConfigError: no sandbox here; the script failed or took over :data:`SECONDS`; it makes no call, or several.
    """
    read_text(script, only_utf8=True)
    by_hand = f"run `{STOPS}=1 bash {script}`: all of it runs as it is, but the training, which ends after the checks"
    if problem := bwrap_problem():
        raise ConfigError(f"{script}: a script is run in a sandbox, but {problem}. Install it, or {by_hand}")
    with TemporaryDirectory() as folder:
        _write_stubs(Path(folder))
        try:
            done = subprocess.run(
                _command(script.absolute(), folder), env=_env(), stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{script} takes more than {SECONDS} s where nothing trains: {by_hand}") from None
        records: list[dict[str, Any]] = [json.loads(line) for line in (Path(folder) / "calls").read_text().splitlines()]
    words_of_calls = [(entry, entry["words"]) for entry in records if MAIN in entry["words"]]
    calls = {json.dumps(words[words.index(MAIN) + 1 :]): entry for entry, words in words_of_calls}
    skipped = [shlex.join(entry["words"]) for entry in records if MAIN not in entry["words"]]
    if len(calls) != 1:
        last = done.stderr.strip().splitlines()[-1:] if done.returncode or not calls else []
        reason = f" (bash: {last[0]})" if last else ""
        others = f"; it calls {'; '.join(line[:80] for line in skipped[-3:])}" if skipped and not calls else ""
        raise ConfigError(
            f"{script}: expected one call of {MAIN}, found {len(calls)}{reason}{others}. "
            f"Give its arguments, or {by_hand}"
        )
    ((words, entry),) = calls.items()
    return Call(json.loads(words), entry["cwd"], entry["env"], skipped)


def pasted(words: Sequence[str]) -> list[str]:
    """The script or the arguments of verl's main program in ``words``, which may be a whole command, even one string.

    Folder and variables that the string sets before the program become those of this process.

    Raises:
        ConfigError: the command starts another program, or needs a shell.
    """
    commands, is_text = [[*words]], len(words) == 1 and len(words[0].split()) > 1 and not os.path.isfile(words[0])
    if is_text:
        commands = _commands(words[0])
        if KEYED.match(words[0].strip()):
            commands = commands[:1]
            if not all(len(parts) > 1 and all(map(KEYED.match, parts)) for parts in commands or [[]]):
                return [*words]  # one value with spaces
        if not commands:
            raise ConfigError(f"{words[0]}: expected a command, found none, or an open quote. {UNQUOTE}")
    programs = [_program(command) for command in commands]
    chosen = min(range(len(commands)), key=lambda i: (_rank(programs[i]), -i))  # the last: others prepare for it
    command, program = commands[chosen], programs[chosen]
    if program is None and len(command) > 1 and re.fullmatch(r"[A-Za-z_./][\w./-]*", command[0]):
        program = 0, command[0]
    if program and _rank(program) > 1:
        raise ConfigError(
            f"{program[1]} is another program: turnkey check takes the arguments of {MAIN}, a whole command that "
            "starts it, or the path of a script"
        )
    place = program[0] if program else 0
    environment, folder = {**os.environ}, os.getcwd()
    for before in [*commands[:chosen], command[:place]]:
        if before[:1] == ["cd"]:
            folder = os.path.join(folder, *(_expanded(word, environment) for word in before[1:2]))
        for variable, value in (word.split("=", 1) for word in before if VARIABLE.fullmatch(word)):
            environment[variable] = _expanded(value, defaultdict(str, environment)) if is_text else value
    if not os.path.isdir(folder):
        raise ConfigError(f"cd {folder}: there is no such folder; if you are in it, leave out the cd")
    if (environment, folder) != ({**os.environ}, os.getcwd()):
        enter(Call([], folder, environment, []))
    rest = command[place if _rank(program) else place + 1 :]
    return [_expanded(word, environment) for word in rest if word not in POSITIONAL] if is_text else rest


def _commands(text: str) -> list[list[str]]:
    """The words of each command in ``text``, without redirections and comments; none where a quote is open."""
    text = f"{text}\n".replace("\r", "").replace("\\\n", " ")
    tokens = [*TOKEN.finditer(text)]
    if "".join(token[0] for token in tokens) != text:
        return []
    commands: list[list[str]] = [[]]
    for token in tokens:
        if token["operator"]:
            commands.append([])
        elif token["word"]:
            commands[-1].append(" ".join(shlex.split(token["word"].replace(r"\$", "$"))))
    return [command for command in commands if command]


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    expanded = Template(word).safe_substitute(variables)
    if needs := SHELL.search(expanded):
        raise ConfigError(f"{word}: {needs[0]} needs a shell, or a variable that is not set. {UNQUOTE}")
    return expanded


def _program(words: Sequence[str]) -> tuple[int, str] | None:
    """Place and name of what the command ``words`` starts, ours rather than another; None: nothing that is known."""
    start = next((place for place, word in enumerate(words) if not VARIABLE.fullmatch(word)), 0)
    programs: list[tuple[int, str]] = []
    for place, word in enumerate(takewhile(lambda word: not ARGUMENT.match(word), words)):
        before = words[place - 1] if place else ""
        is_ours = place - 1 == start or words[max(place - 2, 0)] == "-m"
        if "=" in word:
            continue
        if is_ours and Path(before).name in ("turnkey", "verl_turnkey"):
            programs.append((place, f"turnkey {word}"))
            continue
        is_module = before == "-m" and re.fullmatch(r"[\w.]+", word) and word != "verl_turnkey"
        is_file = word.endswith(".py") and any(Path(earlier).name.startswith("python") for earlier in words[:place])
        if is_module or is_file or OURS.fullmatch(word) or word.endswith(".sh"):
            programs.append((place, word))
    return min(programs, key=_rank, default=None)


def _rank(program: tuple[int, str] | None) -> int:
    """0: verl's main program, 1: a script, 2: another program."""
    if program is None:
        return 3
    return 0 if OURS.fullmatch(program[1]) else 1 if program[1].endswith(".sh") else 2


def enter(call: Call) -> None:
    """Make the call's folder, variables and import paths those of this process.

    Raises:
        ConfigError: the script made the folder itself, in layers that are gone.
    """
    if not os.path.isdir(call.cwd):
        raise ConfigError(f"the script calls {MAIN} in {call.cwd}, a folder that it makes itself: make it first")
    os.chdir(call.cwd)
    for name, value in call.env.items():
        if name not in ("PATH", "PYTHONPATH", "BASH_ENV", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", STOPS):
            os.environ[name] = value
    here = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in call.env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", f"{INSIDE}/bin")]
    sys.path[:0] = [os.path.abspath(path) for path in paths if path not in here]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _command(script: Path, folder: str) -> list[str]:
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    options += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--bind", folder, INSIDE]
    for device in (str(path) for pattern in DEVICES for path in Path("/dev").glob(pattern)):
        options += ["--dev-bind", device, device]
    return ["bwrap", *options, "--chdir", os.getcwd(), "bash", "-c", OVERLAYS, "bash", str(script)]


def _env() -> dict[str, str]:
    stubs, names = f"{INSIDE}/bin", ("PATH", "PYTHONPATH")
    paths = {name: os.pathsep.join(filter(None, (stubs, os.environ.get(name)))) for name in names}
    return {**os.environ, **paths, "TMPDIR": f"{INSIDE}/tmp", "BASH_ENV": f"{stubs}/.functions", STOPS: "1"}


def _write_stubs(folder: Path) -> None:
    """Programs before those of this machine, and the module that Python imports as it starts."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("written", "tmp"):
        (folder / name).mkdir()
    (folder / "calls").touch()
    (programs / ".functions").write_text(FUNCTIONS)
    (programs / "sitecustomize.py").write_text(read_text(Path(script_stubs.__file__)) + "\nstart()\n")
    real = {name: shutil.which(name) for name in HARMLESS}
    texts = {
        **{name: _stub("python", shutil.which(name) or sys.executable) for name in PYTHONS},
        **{name: _stub(name) for name in LAUNCHERS},
        **{name: f'{shlex.quote(real[name] or "true")} "$@" 2>/dev/null; exit 0' for name in HARMLESS},
        **{name: _stub("skipped", name) for name in SKIPPED},
        ".skipped": _stub("skipped"),
        "tee": "exec cat",
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)


def _stub(*words: str) -> str:
    return f'exec {shlex.join([sys.executable, "-I", f"{INSIDE}/bin/sitecustomize.py", *words])} "$@"'


def lines(script: str, call: Call) -> Sequence[str]:
    """What to tell the user about the run of the script."""
    first = f"{script}: run in a sandbox; it calls {MAIN} with {len(call.arguments)} arguments"
    return [first, *(f"    not run: {line}" for line in dict.fromkeys(call.skipped))]
