"""Tasks in Harbor's format, folders with ``task.toml``, ``instruction.md``, ``environment/`` and ``tests/``.

Images are not built. The agent and the verifier run in sandboxes of their own, one after the other; they share the
working folder, and nothing that the agent starts or writes elsewhere reaches the verifier.
"""

from __future__ import annotations

import importlib
import json
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.agents.jobs import APP
from verl_turnkey.envs.errors import TaskFormatError
from verl_turnkey.envs.variables import HARMLESS, inherited

ENV_ID = "harbor"
"""``env_id`` in the column ``turnkey_task`` of such tasks; ``kwargs`` are the arguments of ``HarborTask.load``"""
REWARD_BYTES = 1 << 16

_BUILD_FILES = ("Dockerfile", ".dockerignore")
_COMPOSE = re.compile(r"(docker-)?compose[\w.-]*\.ya?ml")
# What is read, and what changes nothing here; any other key is refused by its name.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "": ("agent", "verifier", "environment", "solution", "version", "schema_version", "metadata", "task", "source"),
    "agent": ("timeout_sec",),
    "verifier": ("timeout_sec", "env"),
    "environment": (
        *(
            "workdir",
            "docker_image",
            "env",
            "build_timeout_sec",
            "cpus",
            "memory",
            "memory_mb",
            "storage",
            "storage_mb",
        ),
        *("allow_internet", "network_mode"),
    ),
    "solution": ("env",),
}
_HARMLESS = {"os": ("linux",), "user": ("root",), "environment_mode": ("shared",)}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class HarborTask:
    """One task folder. Make it with ``load``."""

    folder: Path
    instruction: str
    workdir: str = APP
    docker_image: str | None = None
    agent_seconds: float = 600.0
    verifier_seconds: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)
    """before :meth:`filled` with ``${NAME}`` in it, as the two others"""
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    needs_image: bool = False
    """its files are those of an image: it has a Dockerfile that was not ignored, or names an image"""

    @classmethod
    def load(cls, path: str, ignore_dockerfile: bool = False) -> HarborTask:
        """Read the task folder ``path``.

        ``ignore_dockerfile``: run it on this machine's programs, although its Dockerfile or image may bring others.

        Raises:
            TaskFormatError: a file is missing, or the task needs what is not supported; names it.
        """
        folder = Path(path).expanduser().absolute()
        for name in ("task.toml", "instruction.md", "environment", "tests/test.sh"):
            if not (folder / name).exists():
                raise TaskFormatError(f"Harbor task {folder}: there is no {name}")
        fields = _toml(folder / "task.toml")
        tables = {name: fields.get(name, {}) for name in _KEYS if name}
        refused = [*_refused("", fields), *(key for name in tables for key in _refused(name, tables[name]))]
        refused += [
            f"environment/{p.name}" for p in sorted((folder / "environment").iterdir()) if _COMPOSE.match(p.name)
        ]
        if refused:
            raise TaskFormatError(f"Harbor task {folder}: not supported: {', '.join(refused)}")
        environment = tables["environment"]
        image, workdir = environment.get("docker_image"), environment.get("workdir", APP)
        if not (isinstance(workdir, str) and workdir.startswith("/") and workdir.strip("/.")):
            raise TaskFormatError(
                f"Harbor task {folder}: environment.workdir must be a path like /app, not {workdir!r}"
            )
        return cls(
            folder=folder,
            instruction=_text(folder / "instruction.md").strip(),
            workdir=posixpath.normpath(f"/{workdir.lstrip('/')}"),
            docker_image=image,
            agent_seconds=_seconds(folder, "agent", tables["agent"]),
            verifier_seconds=_seconds(folder, "verifier", tables["verifier"]),
            env=_variables(environment),
            verifier_env=_variables(tables["verifier"]),
            solution_env=_variables(tables["solution"]),
            needs_image=not ignore_dockerfile and (bool(image) or (folder / "environment/Dockerfile").exists()),
        )

    def filled(self, names: Collection[str] = ()) -> HarborTask:
        """With ``${NAME}`` and ``${NAME:-default}`` in its variables replaced by those of this process.

        ``names``: the variables that tasks may read, besides harmless ones: a task may be a stranger's.

        Raises:
            TaskFormatError: it names another one, or one that is not set, without a default.
        """
        values = inherited(names)

        def fill(table: str, variables: Mapping[str, str]) -> dict[str, str]:
            def value(match: re.Match[str]) -> str:
                text = values.get(match[1], match[2])
                if text is None:
                    known = match[1] in names or match[1] in HARMLESS
                    fix = "set it" if known else f"tasks may read it with turnkey.agent.inherit=[{match[1]}]"
                    raise TaskFormatError(
                        f"Harbor task {self.folder}: {table}.env needs the environment variable {match[1]}: {fix}"
                    )
                return text

            return {name: _VARIABLE.sub(value, text) for name, text in variables.items()}

        return replace(
            self,
            env=fill("environment", self.env),
            verifier_env=fill("verifier", self.verifier_env),
            solution_env=fill("solution", self.solution_env),
        )

    def fill(self, workspace: Path, rootfs: Path | None = None) -> None:
        """Put the task's files into the empty folder ``workspace``: those of the image's workdir, then its own."""
        if rootfs is not None and (source := rootfs / self.workdir.lstrip("/")).is_dir():
            shutil.copytree(source, workspace, symlinks=True, dirs_exist_ok=True)

        def build_files(folder: str, names: list[str]) -> list[str]:
            return [name for name in names if name in _BUILD_FILES and Path(folder) == self.folder / "environment"]

        shutil.copytree(self.folder / "environment", workspace, symlinks=True, dirs_exist_ok=True, ignore=build_files)


def find_tasks(folder: Path) -> list[Path]:
    """The task folders in ``folder``, sorted; ``folder`` itself if it is one.

    Raises:
        TaskFormatError: there are none.
    """
    paths = [folder] if (folder / "task.toml").is_file() else sorted(path.parent for path in folder.glob("*/task.toml"))
    if not paths:
        raise TaskFormatError(f"no Harbor tasks in {folder}: a task is a folder with a task.toml")
    return [path.absolute() for path in paths]


def read_reward(folder: Path, key: str = "reward") -> tuple[float, dict[str, float]]:
    """What a verifier left in its log folder: the reward of ``reward.txt``, or ``key`` of ``reward.json``.

    Also all numbers of ``reward.json``; one in a nested object is ``outer.inner``. Links are not followed: code of the
    agent runs in the tests.

    Raises:
        ValueError: there is neither file, or it cannot be read.
    """
    text = _read(folder / "reward.txt")
    if text is not None:
        return _number("reward.txt", text.strip()), {}
    text = _read(folder / "reward.json")
    if text is None:
        raise ValueError("it left neither reward.txt nor reward.json in /logs/verifier")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"reward.json is not JSON: {error}") from None
    if not isinstance(fields, dict) or not fields:
        raise ValueError(f"reward.json must hold names and numbers, not {text[:80]!r}")
    values = _flat(fields)
    name = next(iter(values)) if values.keys() == fields.keys() and len(values) == 1 else key
    if name not in values:
        raise ValueError(f"reward.json has no {key!r} among {sorted(values)}: set turnkey.agent.reward_key")
    numbers = {
        other: _number(f"reward.json: {other}", value)
        for other, value in values.items()
        if other == name or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    return numbers[name], numbers


def _flat(fields: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """The values of nested objects by their names with dots."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        values |= _flat(value, f"{outer}{name}.") if isinstance(value, dict) else {f"{outer}{name}": value}
    return values


def _read(path: Path) -> str | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(REWARD_BYTES).decode("utf-8-sig", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) <= 1e18 or isinstance(value, bool):
        raise ValueError(f"{what} must hold a finite number, not {str(value)[:80]!r}")
    return number


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except ConfigError as error:
        raise TaskFormatError(f"Harbor task {error}") from None


def _toml(path: Path) -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return toml.loads(_text(path))
    except toml.TOMLDecodeError as error:
        raise TaskFormatError(f"{path}: {error}") from None


def _refused(table: str, fields: Any) -> list[str]:
    """Keys of a table of ``task.toml`` that ask for what is not supported."""
    if not isinstance(fields, dict):
        return [f"{table} = {fields!r}"]
    return [
        f"{table}.{key}".lstrip(".")
        for key, value in fields.items()
        if key not in _KEYS[table] and value not in (None, 0, "", [], {}, *_HARMLESS.get(key, ()))
    ]


def _seconds(folder: Path, table: str, fields: Mapping[str, Any]) -> float:
    value = fields.get("timeout_sec", 600.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise TaskFormatError(f"Harbor task {folder}: {table}.timeout_sec must be positive seconds, not {value!r}")
    return float(value)


def _variables(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in (fields.get("env") or {}).items()}
