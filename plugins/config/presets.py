"""Reads published settings in ``recipe/config/turnkey/preset``: what each file sets, and the source of every value.

Sources are comments of the files, which `turnkey list presets NAME` prints:

- ``# <word>: <text>`` above the settings says what a source is (a paper; a file of a repository at a commit);
- ``key: value  # <word>, ...`` says where a value is from;
- ``# not found: <key>, ...`` lists keys that a run needs and no source states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl_turnkey.plugins.config.recipe_files import config_dir
from verl_turnkey.plugins.config.roles import Apart

#: Sources of values that need no line of explanation.
CONVERTED, REQUIRED = "converted", "required"

_NOTE = re.compile(r"# (?P<word>[a-z][a-z ]*): (?P<text>.*)")
_VALUE = re.compile(r"(?P<indent> *)(?P<key>\w+):(?: (?P<value>\S.*?))?(?:  # (?P<source>.*))?")
_NODE = "turnkey.preset."


@dataclass(frozen=True)
class PresetConfig:
    """Published settings chosen by ``+turnkey/preset=<name>``; only presets set it."""

    name: Apart[str | None] = None
    """published settings that the run starts from; a preset sets these four"""
    method: Apart[str | None] = None
    """the method that they are for"""
    loss: Apart[str | None] = None
    """the policy loss that they are for; null: any"""
    env: Apart[str | None] = None
    """the recipe of the environment that they are for; null: any"""


@dataclass(frozen=True)
class Setting:
    """One value of a preset as in the YAML file, and its source (empty: none is stated)."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class Preset:
    """The published settings of one file, including those of the file that it builds on."""

    name: str
    title: str
    base: str | None = None
    """the preset that it builds on"""
    method: str | None = None
    loss: str | None = None
    env: str | None = None
    sources: dict[str, str] = field(default_factory=dict)
    """word -> the source that it stands for"""
    settings: tuple[Setting, ...] = ()
    not_found: tuple[str, ...] = ()

    @property
    def switches(self) -> list[str]:
        """The switches of a launch line, in the required order."""
        chosen = {"": self.method, "/loss": self.loss, "/env": self.env, "/preset": self.name}
        return [f"+turnkey{group}={name}" for group, name in chosen.items() if name]


def folder() -> Path:
    """The folder of the files."""
    return config_dir() / "turnkey" / "preset"


def names() -> list[str]:
    """The presets of this package."""
    return sorted(path.name.removesuffix(".yaml") for path in folder().glob("*.yaml"))


def shipped() -> Iterator[Preset]:
    """All of them, by name."""
    return map(read, names())


def read(name: str) -> Preset:
    """The preset ``name``.

    Raises:
        FileNotFoundError: this package has no such preset.
        ValueError: a line is not valid in a preset; names it.
    """
    text = (folder() / f"{name}.yaml").read_text(encoding="utf-8")
    below = (yaml.safe_load(text) or {}).get("defaults") or []
    base = next((read(entry) for entry in below if entry != "_self_"), None) or Preset(name="", title="")
    title, sources, missing, own = "", dict(base.sources), base.not_found, []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if line.startswith(("# @package", "defaults:")) or not line.strip():
            continue
        if note := _NOTE.fullmatch(line):
            if note["word"] == "not found":
                missing = tuple(note["text"].split(", "))
            else:
                sources[note["word"]] = note["text"]
        elif line.startswith("# "):
            title = f"{title} {line.removeprefix('# ')}".strip()
        elif setting := _VALUE.fullmatch(line):
            path = [(indent, key) for indent, key in path if indent < len(setting["indent"])]
            path.append((len(setting["indent"]), setting["key"]))
            if setting["value"] is not None:
                key = ".".join(key for _, key in path)
                own.append(Setting(key, yaml.safe_load(setting["value"]), setting["source"] or ""))
        else:
            raise ValueError(f"{name}.yaml: expected `key: value  # source`, not {line!r}")
    target = {entry.key.removeprefix(_NODE): entry.value for entry in own if entry.key.startswith(_NODE)}
    settings = {entry.key: entry for entry in (*base.settings, *own) if not entry.key.startswith(_NODE)}
    return Preset(
        name=name,
        title=title,
        base=base.name or None,
        method=target.get("method", base.method),
        loss=target.get("loss", base.loss),
        env=target.get("env", base.env),
        sources=sources,
        settings=tuple(settings.values()),
        not_found=missing,
    )
