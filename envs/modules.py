"""Importing the user's own modules, so that the environments in them get registered."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_turnkey.envs.errors import ModuleImportError


def import_modules(names: Sequence[str]) -> None:
    """Import each of ``names`` once: dotted modules, or paths of ``.py`` files (relative to the working directory).

    Raises:
        ModuleImportError: names the module, the error in it and the config key.
    """
    if isinstance(names, str):
        raise ModuleImportError(f"turnkey.modules is a list of modules, not the text {names!r}: write [{names}]")
    for name in names:
        try:
            _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:
            raise ModuleImportError(
                f"turnkey.modules: cannot import {name!r} ({type(error).__name__}: {error}). "
                f"Give a dotted module that every process can import, or the path of a .py file."
            ) from error


def _import_file(path: Path) -> None:
    path = path.expanduser().resolve()
    name = f"turnkey_user_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
