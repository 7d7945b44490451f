"""Imports what installed packages register by their entry points, and the user's own modules and functions.

The group of an entry point is ``verl_turnkey.<kind>``, its value a module whose import registers things, as those of
``turnkey.modules`` do. A process imports the kind ``plugins`` and those that it uses: the process of an environment
imports no loss, and so no torch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium

from verl_turnkey.advantage.params import ConfigError, did_you_mean, require_takes
from verl_turnkey.envs.errors import ModuleImportError

logger = logging.getLogger(__name__)

KINDS = ("plugins", "estimators", "losses", "envs", "rewards")
WARNED = "TURNKEY_PLUGIN_WARNINGS"
"""variable with the packages that a warning has named; processes that inherit it do not repeat the warning"""

_loading = threading.RLock()  # hosts import in threads
_loaded: dict[tuple[str, str, str], Installed] = {}


@dataclass(frozen=True)
class Installed:
    """An entry point after its import."""

    kind: str
    name: str
    module: str
    package: str
    error: str = ""
    """type and text of the exception; empty: it was imported"""


@cache
def entries() -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points by kind, in the order of ``sys.path``. Reads the metadata of all packages, once per process."""
    every = entry_points()
    return {kind: tuple(every.select(group=f"verl_turnkey.{kind}")) for kind in KINDS}


def import_installed(kinds: Sequence[str] = KINDS) -> list[Installed]:
    """Import what installed packages register of ``kinds``, each once; returns all results, earlier ones included.

    A package that cannot be imported costs one warning, and the others are still imported.
    """
    with _loading:
        chosen = [(kind, entry) for kind in KINDS if kind in ("plugins", *kinds) for entry in entries()[kind]]
        for kind, entry in chosen:
            if (key := (kind, entry.name, entry.value)) in _loaded:
                continue
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module
            _loaded[key] = Installed(kind, entry.name, entry.value, package)  # a module may come back here
            try:
                entry.load()
            except (Exception, SystemExit) as error:
                _loaded[key] = broken = Installed(*key, package, f"{type(error).__name__}: {error}")
                _warn(broken)
        return [_loaded[kind, entry.name, entry.value] for kind, entry in chosen]


def _warn(broken: Installed) -> None:
    warned = os.environ.get(WARNED, "").split(",")
    if (name := broken.package.partition(" ")[0]) in warned:
        return
    os.environ[WARNED] = ",".join(filter(None, [*warned, name]))
    logger.warning(
        "the installed package %s cannot be used: importing %s, its entry point %r in verl_turnkey.%s, raised %s. "
        "What it registers is unknown here; repair it, or: pip uninstall %s",
        *(broken.package, broken.module, broken.name, broken.kind, broken.error, name),
    )


def import_modules(names: Sequence[str], key: str = "turnkey.modules", kinds: Sequence[str] = KINDS) -> None:
    """Import each of ``names`` once: dotted modules, or paths of ``.py`` files (relative to the working directory).

    Before them, what installed packages register of ``kinds`` (see ``import_installed``). ``key`` is named in errors:
    the configuration key, or the option of a command, that lists the modules.

    Raises:
        ModuleImportError: names the key, the module and the error in it.
    """
    if isinstance(names, str):
        raise ModuleImportError(f"{key} is a list of modules, not the text {names!r}: write [{names}]")
    import_installed(kinds)
    for name in names:
        try:
            _module(name)
        except (Exception, SystemExit) as error:
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            is_absent = isinstance(error, FileNotFoundError) or (absent and f"{name}.".startswith(f"{absent}."))
            advice = (
                ". Give a dotted module that every process can import, or the path of a .py file" if is_absent else ""
            )
            raise ModuleImportError(
                f"{key}: cannot import {name!r} ({type(error).__name__}: {error}){advice}"
            ) from error


def load_function(path: str, key: str, *arguments: str) -> Callable[..., Any]:
    """The function ``module:name``; the module is a dotted one or a ``.py`` file. ``key`` is named in errors.

    ``arguments``: names that it must take by position, if any.

    Raises:
        ModuleImportError: names the key, the path and what is wrong with it.
    """
    module_name, _, name = path.rpartition(":")
    try:
        if not module_name:
            raise ImportError("there is no colon in it")
        module = _module(module_name)
        if not hasattr(module, name):
            raise AttributeError(f"{module_name} has no {name!r}{did_you_mean(name, vars(module))}")
        function = getattr(module, name)
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    except Exception as error:
        raise ModuleImportError(
            f"{key}: cannot load {path!r} ({type(error).__name__}: {error}). Write package.module:function or "
            f"path/to/file.py:function"
        ) from error
    if arguments:
        try:
            require_takes(f"{key}={path}", function, *arguments)
        except ConfigError as error:
            raise ModuleImportError(str(error)) from None
    return function


_registered: dict[str, list[str]] = {}  # names of imported files -> the gymnasium ids that they registered


def environments_of(path: str) -> list[str]:
    """Import the ``.py`` file ``path`` unless it was; the ids that it registered with gymnasium, sorted.

    Those that packages register when the file imports them count only if there are no others.
    """
    return _registered[_module(path).__name__]


_importing = threading.RLock()  # a module that another thread is still executing is in sys.modules already


def _module(name: str) -> ModuleType:
    """The module of a dotted name, or of the path of a ``.py`` file, which is imported once."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    with _importing:
        return _module_of_file(Path(name))


def _module_of_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"turnkey_user_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    specs_before, modules_before = dict(gymnasium.registry), {*sys.modules}
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    # Also an id that was there: a copy of a file registers it anew.
    new = {key: spec.entry_point for key, spec in gymnasium.registry.items() if specs_before.get(key) is not spec}
    entries = ((key, entry if isinstance(entry, str) else str(entry.__module__)) for key, entry in new.items())
    # A file that imports minigrid makes that register its 178 levels, too.
    imported = {*sys.modules} - modules_before - {name}
    own = [key for key, entry in entries if re.split("[.:]", entry)[0] not in imported]
    _registered[name] = sorted(own or new)
    return module
