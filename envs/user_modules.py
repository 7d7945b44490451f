"""Imports the user's own modules and functions: importing a module registers what it defines."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.errors import ModuleImportError
from verl_turnkey.envs.installed import KINDS, import_installed


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
            _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise ModuleImportError(
                f"{key}: cannot import {name!r} ({type(error).__name__}: {error}). "
                f"Give a dotted module that every process can import, or the path of a .py file."
            ) from error


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function ``module:name``; the module is a dotted one or a ``.py`` file. ``key`` is named in errors.

    Raises:
        ModuleImportError: names the key, the path and what is wrong with it.
    """
    module_name, _, name = path.rpartition(":")
    try:
        if not module_name:
            raise ImportError("there is no colon in it")
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
        if not hasattr(module, name):
            raise AttributeError(f"{module_name} has no {name!r}{did_you_mean(name, vars(module)) or '.'}")
        function = getattr(module, name)
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    except Exception as error:
        raise ModuleImportError(
            f"{key}: cannot load {path!r} ({type(error).__name__}: {error}). Write package.module:function or "
            f"path/to/file.py:function"
        ) from error
    return function


_registered: dict[str, list[str]] = {}  # names of imported files -> the gymnasium ids that they registered


def environments_of(path: str) -> list[str]:
    """Import the ``.py`` file ``path`` unless it was; the ids that it registered with gymnasium, sorted."""
    return _registered[_import_file(Path(path)).__name__]


_importing = threading.RLock()  # a module that another thread is still executing is in sys.modules already


def _import_file(path: Path) -> ModuleType:
    with _importing:
        return _imported(path)


def _imported(path: Path) -> ModuleType:
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
    known = dict(gymnasium.registry)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    # Also an id that was there: a copy of a file registers it anew.
    _registered[name] = sorted(key for key, spec in gymnasium.registry.items() if known.get(key) is not spec)
    return module
