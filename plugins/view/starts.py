"""The starts of a run, as Hydra wrote them down: line, configuration, and the paths of where the run is now."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_turnkey.plugins.config.leaves import every, make_absolute

HOME = "trainer.default_local_dir"
OF_RUNS = ("checkpoints", "turnkey_log", "hydra", "metrics", "tasks")
"""folders that ``turnkey train`` makes"""


@dataclass(frozen=True)
class Start:
    """A start of a run, as Hydra wrote it down, with the paths of where its folder is now."""

    cwd: Path
    """the folder that it was started in; the current one where that is gone"""
    config: Mapping[str, Any]
    """dotted key -> value, interpolations unresolved"""
    hydra: Mapping[str, Any]
    """Hydra's own record, with the paths of then; empty without one"""
    moved: Sequence[tuple[str, str]]
    """where folders were then and are now; empty for a run that is where it was"""


def starts(folder: Path) -> list[Start]:
    """The starts of the runs in ``folder``, the last one last."""
    files = [path for path in folder.rglob(".hydra/config.yaml") if path.is_file()]
    return [_start(path, folder) for path in sorted(files, key=lambda path: (path.stat().st_mtime_ns, str(path)))]


def configuration(folder: Path) -> dict[str, Any]:
    """The configuration that Hydra wrote at the last start, with unresolved interpolations."""
    configs = [start.config for start in starts(folder)]
    homes = sorted({str(config[HOME]) for config in configs if HOME in config})
    if len(homes) > 1:  # all starts of a run share a folder of checkpoints
        raise ValueError(f"{folder} holds several runs ({HOME}: {', '.join(homes)}): name their folders one by one")
    return dict(configs[-1]) if configs else {}


def _start(path: Path, folder: Path) -> Start:
    record = path.with_name("hydra.yaml")
    hydra = (_load(record) or {}).get("hydra") or {} if record.is_file() else {}
    cwd, moved = _places(hydra, path.parents[1], folder)
    config = rebased(_load(path) or {}, moved)
    make_absolute(config, cwd)
    return Start(cwd, dict(flat(config)), hydra, moved)


def _places(hydra: Mapping[str, Any], output: Path, folder: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Where a run was started, and what was elsewhere then; ``output``: Hydra's folder in the run's ``folder``."""
    runtime = hydra.get("runtime") or {}
    words = [str(word) for word in (hydra.get("overrides") or {}).get("hydra") or ()]
    chosen = [word.partition("=")[2].strip("'\"") for word in words if word.startswith("hydra.run.dir=")]
    at = runtime.get("output_dir") or (chosen or [""])[-1]
    cwd, inside, here = Path(runtime.get("cwd") or Path.cwd()), output.relative_to(folder).parts, folder.absolute()
    then = Path(os.path.normpath(cwd / at))
    if not at or then.parts[len(then.parts) - len(inside) :] != inside:
        return cwd if cwd.is_dir() else Path.cwd(), []
    root = Path(*then.parts[: len(then.parts) - len(inside)])
    if root == here or (root.exists() and root.samefile(here)):
        return cwd if cwd.is_dir() else Path.cwd(), []
    moved = [(str(root), str(here))]
    if root.is_relative_to(cwd) and (below := root.relative_to(cwd).parts):
        moved.append((os.path.join(*below), str(here)))
        if not cwd.is_dir() and here.parts[-len(below) :] == below:  # the run was moved with what it lies in
            moved.append((str(cwd), str(Path(*here.parts[: -len(below)]))))
            cwd = Path(moved[-1][1])
    return cwd if cwd.is_dir() else Path.cwd(), moved


def rebased(value: Any, moved: Sequence[tuple[str, str]]) -> Any:
    """Plain data with paths in the first folder of each pair in its second one instead.

    A relative text may be anything else, such as the name of a model: it counts where the second folder holds its
    beginning, or a run does.
    """
    if isinstance(value, Mapping):
        return {rebased(name, moved): rebased(entry, moved) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rebased(entry, moved) for entry in value]
    for old, new in moved if isinstance(value, str) else ():
        pattern = rf"(?<![^=\[,'\": (]){re.escape(old)}(?:/(?P<name>[^/\]}}),'\"]*)|(?=$|[\]}}),'\"]))"

        def instead(match: re.Match[str], old: str = old, new: str = new) -> str:
            name = match["name"]
            is_path = old.startswith(("/", "~")) or name in OF_RUNS
            if not is_path and not (name and os.path.exists(os.path.join(new, name))):
                return match[0]
            return new if name is None else f"{new}/{name}"

        value = re.sub(pattern, instead, value)
    return value


def _load(path: Path) -> Any:
    import yaml

    try:
        return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected the configuration that Hydra writes, got {error}") from None


def flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings; lists, empty mappings and those with names of users are values."""
    if isinstance(node, dict) and node and not _named_by_users(prefix):
        for key, value in node.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, node


def _named_by_users(key: str) -> bool:
    """Whether names in a mapping may hold dots, as those of files and variables."""
    leaf = every().get(key)
    return leaf is not None and leaf.secret is not None
