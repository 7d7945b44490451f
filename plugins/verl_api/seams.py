"""The private parts of verl that this package relies on, as data, and whether the installed verl has them.

A new verl shows here what it moved, and not in the middle of a run: ``turnkey doctor --verl`` prints it, and a contract
test compares each part with the installed verl. What our files import from verl is read from their source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GONE = ""
"""in ``Seam.older``: a version did not have the part yet"""


@dataclass(frozen=True)
class Moved:
    """A part of verl that differs from all supported versions.

    ``installed`` is "" when it is gone; ``fault`` is the exception of its module, other than that the part is missing.
    """

    module: str
    name: str
    expected: tuple[str, ...]
    installed: str
    fault: str = ""

    def __str__(self) -> str:
        if self.fault:
            return f"{self.module}.{self.name} cannot be imported: {self.fault}"
        if not self.installed:
            return f"{self.module}.{self.name} is gone"
        return f"{self.module}.{self.installed} was {' or '.join(text or 'not there' for text in self.expected)}"


@dataclass(frozen=True)
class Seam:
    """A private part of verl: its module and name, the parameters that we rely on, and our use of it.

    ``older``: the part in older supported versions, as ``name(parameters)``.
    """

    module: str
    name: str
    parameters: str
    why: str
    older: tuple[str, ...] = ()

    @property
    def expected(self) -> tuple[str, ...]:
        """The part in each supported version, newest first."""
        return (f"{self.name}({self.parameters})", *self.older)

    def moved(self) -> Moved | None:
        """None if the part of the installed verl is that of a supported version."""
        installed = ""
        for text in filter(None, self.expected):
            name = text.partition("(")[0]
            try:
                now = self._signature(name)
            except Exception as error:  # a development version may raise anything
                return Moved(self.module, self.name, self.expected, "", f"{type(error).__name__}: {error}")
            if now in (text, name):
                return None
            installed = installed or now
        if not installed and GONE in self.expected:
            return None
        return Moved(self.module, self.name, self.expected, installed)

    def _signature(self, name: str) -> str:
        """``name(parameters)`` as installed, ``name`` if it is not callable, "" if it does not exist."""
        try:
            thing: Any = importlib.import_module(self.module)
            for part in name.split("."):
                if inspect.ismodule(thing) and not hasattr(thing, part):
                    importlib.import_module(f"{thing.__name__}.{part}")
                thing = getattr(thing, part)
        except (ImportError, AttributeError):
            return ""
        if not callable(thing):
            return name
        # Ray adds a parameter of its own to the methods of an actor class.
        return f"{name}({', '.join(p for p in _parameters(thing, name.split('.')[-1]) if p != '_ray_trace_ctx')})"


def _parameters(thing: Any, name: str) -> list[str]:
    """The parameters of the function ``name``, also inside a decorator without ``functools.wraps``."""
    parameters = inspect.signature(thing).parameters
    if [*parameters] == ["args", "kwargs"]:
        contents = (cell.cell_contents for cell in getattr(inspect.unwrap(thing), "__closure__", None) or ())
        inner = next((cell for cell in contents if inspect.isfunction(cell) and cell.__name__ == name), thing)
        parameters = inspect.signature(inner).parameters
    return [*parameters]


def _listed() -> Iterator[Seam]:
    """The parts of ``seams.yaml``."""
    text = Path(__file__).with_name("seams.yaml").read_text(encoding="utf-8")
    modules = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the first is ten times as fast
    for module, parts in modules.items():
        for part in parts:
            for text, use in part.items():
                name, _, parameters = text.removesuffix(")").partition("(")
                why, *older = [use] if isinstance(use, str) else use
                yield Seam(module, name, parameters, why, tuple(older))


SEAMS = tuple(_listed())


def imports() -> Iterator[Seam]:
    """What the files of ``plugins`` import from verl, read from their source; here a part only has to be there."""
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
                for name in node.names:
                    yield Seam(str(node.module), name.name, "", f"imported by plugins/{path.relative_to(root)}")


def moved() -> list[tuple[Moved, str]]:
    """The parts of the installed verl that are not as expected, each with our use of it."""
    gone = [(what, seam.why) for seam in imports() if (what := seam.moved()) and not what.installed]
    return [*((what, seam.why) for seam in SEAMS if (what := seam.moved())), *gone]
