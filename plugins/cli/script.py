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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.agents.sandboxes import bwrap_problem
from verl_turnkey.plugins.checks.driver import STOPS
from verl_turnkey.plugins.cli import script_stubs
from verl_turnkey.plugins.config import machine

MAIN = "verl.trainer.main_ppo"
FILE = re.compile(r"(.*/)?main_ppo\.py")
"""of the main program"""
TURNKEY = ("turnkey", "verl_turnkey")
"""whose command ``check`` takes the same arguments"""
VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
KEYED = re.compile(r"(?:[+~]+[A-Za-z_]|[A-Za-z_][\w-]*[./@])[\w./@-]*=")
"""an override, whose key no shell takes for a variable"""
ARGUMENTS = f"pass the arguments of {MAIN} themselves"
SHELL = re.compile(r"[$`;|&<>(){}*?~#!\n\\]")
"""what only a shell reads, unless it is quoted"""
SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm")
SHEBANG = re.compile(r"#!\s*\S*/(env\s+(-\S+\s+)*)?(ba|da)?sh\b")
SECONDS = 60
INSIDE = script_stubs.FOLDER
PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 15)))
DEVICES = ("nvidia*", "kfd", "dri", "davinci*")
"""accelerators below /dev, which a script may count"""
SMI, GPUS = "nvidia-smi", "trainer.n_gpus_per_node"
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


def arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of verl's main program in ``words``, and what to tell of the sandbox.

    ``words``: these arguments; a command that passes them, also as one string; or a script, and more arguments.
    Folder and variables of the call become those of this process.

    Raises:
        ConfigError: see :func:`read`.
    """
    place = next((place for place, word in enumerate(words) if not VARIABLE.fullmatch(word) or KEYED.match(word)), 0)
    first = words[place] if words else ""
    if len(words) == 1 and len(first.split()) > 1 and not os.path.isfile(first):
        text = first.replace("\r", "").replace("\\\n", " ").strip()
        if KEYED.match(text):
            if not all(map(KEYED.match, text.split()[:2])):
                return [*words], []  # one value with spaces
            text = f"python -m {MAIN} {text}"
        with suppress(ValueError):  # an open quote, which bash explains
            if not SHELL.search(text):
                return arguments(shlex.split(text))
        return _entered(text)
    if not place and _is_script(first):
        return _entered(Path(first), words[1:])
    if len(words) == 1 and first and "=" not in first and not first.startswith(("-", "~")):
        of_env = f"; to check an environment, run `turnkey env-check {first}`" if first.endswith(".py") else ""
        expected = "overrides (key=value), a shell script, or a full launch command"
        raise ConfigError(f"{first}: expected {expected}{of_env}")
    if len(words) < 2 or KEYED.match(first) or not re.fullmatch(r"[A-Za-z_./][\w./-]*", first):
        return [*words], []
    if (after := _behind_main(words) or _behind_check(words)) is not None:  # needs no shell
        before = words[: len(words) - len(after)]
        if variables := dict(word.split("=", 1) for word in before if VARIABLE.fullmatch(word)):
            enter(Call(after, os.getcwd(), {**os.environ, **variables}, []))
        return after, []
    assignments = [f"{name}={shlex.quote(value)}" for name, value in (word.split("=", 1) for word in words[:place])]
    return _entered(" ".join([*assignments, shlex.join(words[place:])]))


def _is_script(word: str) -> bool:
    """Whether it names a shell script: by its suffix, or without one by its first line."""
    path = Path(word)
    if path.suffix or not path.is_file():
        return path.suffix in SUFFIXES
    with path.open(encoding="utf-8", errors="replace") as file:
        return SHEBANG.match(file.readline(100)) is not None


def _entered(script: Path | str, further: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """:func:`arguments` of ``script``, with ``further`` ones behind its own."""
    call = read(script)
    enter(call)
    name = "the command" if isinstance(script, str) else script
    notes = [f"{name}: run in a sandbox; it calls {MAIN} with {len(call.arguments)} arguments"]
    notes += [f"    not run: {line}" for line in dict.fromkeys(call.skipped)]
    words = [*call.arguments, *further]
    numbers = [word for word in words if word.lstrip("+").startswith(f"{GPUS}=")]
    if numbers and numbers[-1].endswith(("=", "=0")) and any(line.split()[0] == SMI for line in call.skipped):
        add = "" if (gpu := machine.named_gpu()) and gpu.number else "add --gpu h100:8, or "
        notes.append(f"    {numbers[-1]}, and {SMI} was not run: {add}write the number out")
    return words, notes


def _behind_main(words: Sequence[str]) -> list[str] | None:
    """The words behind verl's main program, which a Python starts by module or by file; None: they do not call it."""
    for place, word in enumerate(words):
        programs = [Path(earlier).name.lstrip("\ufeff") for earlier in words[:place]]  # a byte order mark of the file
        by_python = any(name.startswith("python") or name in LAUNCHERS for name in programs)
        if by_python and (word == MAIN or FILE.fullmatch(word)):
            return [*words[place + 1 :]]
    return None


def _behind_check(words: Sequence[str]) -> list[str] | None:
    """The words behind ``turnkey check``; None: they do not call it."""
    for place, word in enumerate(words):
        if word == "check" and place and Path(words[place - 1]).name in TURNKEY:
            return [*words[place + 1 :]]
    return None


def read(script: Path | str) -> Call:
    """What ``script``, a file or the text of a command, passes to :data:`MAIN`, where, with which environment.

    Raises:
        ConfigError: no sandbox here; it failed or took over :data:`SECONDS`; it makes no call, or several.
    """
    what, otherwise = "the command", f"{ARGUMENTS}, without quotes"
    if isinstance(script, Path):
        read_text(script, only_utf8=True)
        run = f"run `{STOPS}=1 bash {script}`: all of it runs as it is, but the training, which ends after the checks"
        what, otherwise = f"{script}", f"{ARGUMENTS}, or {run}"
    if problem := bwrap_problem():
        raise ConfigError(f"{what} is run in a sandbox, but {problem}. Install it, or {otherwise}")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a killed script may write for a moment longer
        _write_stubs(Path(folder))
        if isinstance(script, str):
            (Path(folder) / "tmp" / "command").write_text(script)
            script = Path(INSIDE) / "tmp" / "command"
        try:
            done = subprocess.run(
                _command(script.absolute(), folder), env=_env(), stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{what} takes more than {SECONDS} s where nothing trains: {otherwise}") from None
        records: list[dict[str, Any]] = [json.loads(line) for line in (Path(folder) / "calls").read_text().splitlines()]
    passed = [_behind_main(entry["words"]) for entry in records]
    if not any(words is not None for words in passed):
        passed = [_behind_check(entry["words"]) for entry in records]
    calls = {json.dumps(words): entry for entry, words in zip(records, passed, strict=True) if words is not None}
    skipped = [shlex.join(entry["words"]) for entry, words in zip(records, passed, strict=True) if words is None]
    if len(calls) != 1:
        last = done.stderr.strip().splitlines()[-1:] if done.returncode or not calls else []
        reason = f" (bash: {last[0]})" if last else ""
        others = f"; it calls {'; '.join(line[:80] for line in skipped[-3:])}" if skipped and not calls else ""
        raise ConfigError(
            f"{what}: expected one call of {MAIN}, found {len(calls)}{reason}{others}. Instead, {otherwise}"
        )
    ((words, entry),) = calls.items()
    return Call(json.loads(words), entry["cwd"], entry["env"], skipped)


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
        "tee": _stub("tee"),
    }
    if (gpu := machine.named_gpu()) and gpu.number:
        texts[SMI] = _stub("gpus", str(gpu.number), f"NVIDIA {gpu.name.upper()}", str(round(gpu.memory / 2**20)))
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)


def _stub(*words: str) -> str:
    return f'exec {shlex.join([sys.executable, "-I", f"{INSIDE}/bin/sitecustomize.py", *words])} "$@"'
