"""Imports the packages that register methods, losses, environments or rewards by an entry point.

The group of an entry point is ``verl_turnkey.<kind>``, its value a module whose import registers things, as those of
``turnkey.modules`` do. A process imports the kind ``plugins`` and those that it uses: the process of an environment
imports no loss, and so no torch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

logger = logging.getLogger(__name__)

KINDS = ("plugins", "estimators", "losses", "envs", "rewards")
WARNED = "TURNKEY_PLUGIN_WARNINGS"
"""variable with the packages that a warning has named; processes that inherit it do not repeat the warning"""

_importing = threading.RLock()  # hosts import in threads
_imported: dict[tuple[str, str, str], Installed] = {}


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
    with _importing:
        chosen = [(kind, entry) for kind in KINDS if kind in ("plugins", *kinds) for entry in entries()[kind]]
        for kind, entry in chosen:
            if (key := (kind, entry.name, entry.value)) in _imported:
                continue
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module
            _imported[key] = Installed(kind, entry.name, entry.value, package)  # a module may come back here
            try:
                entry.load()
            except (Exception, SystemExit) as error:
                _imported[key] = broken = Installed(*key, package, f"{type(error).__name__}: {error}")
                _warn(broken)
        return [_imported[kind, entry.name, entry.value] for kind, entry in chosen]


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
