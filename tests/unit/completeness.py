"""What is missing of an estimator, a modifier, a loss or an environment, and which files belong to none.

A line for each, with what to do. It reads the files of a tree and what is registered.
``tools/new_part.py estimator|loss|env NAME`` writes all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from write_tables import COMBINED

from verl_turnkey.envs.catalog import ADAPTERS, Adapter
from verl_turnkey.plugins.cli.tables import shipped, shipped_losses, shipped_modifiers

WRITE = "run `tools/write_tables.py`"
#: What losses share; every other file in losses/ is one.
SHARED = {"clipping", "objectives", "registry", "turns"}
NUMERIC = {"approx", "assert_allclose", "assert_close", "assert_same_credit", "item", "tolist"}


@dataclass(frozen=True)
class Registered:
    """Estimators, modifiers and losses by name with the module they are in, and the catalog."""

    estimators: dict[str, str]
    modifiers: dict[str, str]
    losses: dict[str, str]
    adapters: tuple[Adapter, ...]


def registered() -> Registered:
    def modules(specs: dict) -> dict[str, str]:
        return {name: spec.fn.__module__.rpartition(".")[2] for name, spec in specs.items()}

    return Registered(modules(shipped()), modules(shipped_modifiers()), modules(shipped_losses()), ADAPTERS)


def gaps(root: Path, registered: Registered) -> list[str]:
    """What is missing or superfluous in the tree at ``root``: a line each, with what to do."""
    return [
        *_estimators(root, registered.estimators),
        *_modifiers(root, registered.modifiers),
        *_losses(root, registered.losses),
        *_adapters(root, registered.adapters),
    ]


def _estimators(root: Path, names: dict[str, str]) -> Iterator[str]:
    here = "advantage/methods"
    unregistered = sorted(_modules(root / here) - set(names.values()))
    yield from (_registers_none(here, module, "estimator") for module in unregistered)
    names = names | dict(zip(unregistered, unregistered, strict=True))
    files = {path: list(_tests([path])) for path in sorted((root / f"tests/unit/{here}").glob("test_*.py"))}
    for name, module in names.items():
        yield from _absent(root, f"docs/methods/{name}.md", f"write the page of the estimator {name}")
        yield from _absent(root, f"recipe/config/turnkey/{name}.yaml", WRITE)
        yield from _without(root, "docs/methods.md", f"](methods/{name}.md)", WRITE)
        if name in shipped() and shipped()[name].tier == "core":
            yield from _without(root, "README.md", f"](docs/methods/{name}.md)", WRITE)
        if not any(_says(test, name) and _against(test, name) for tests in files.values() for test in tests):
            yield (
                f"tests/unit/{here}/test_{module}.py: no test compares {name!r}: compare numbers of compute_credit("
                f"{name!r}, ...) with naive.{name} (in tests/unit/naive/) or with the cases of an oracle"
            )
    yield from _orphans(root, "docs/methods", "*.md", set(names))
    yield from _orphans(root, "recipe/config/turnkey", "*.yaml", {*names, *COMBINED, "base"})
    with_a_method = {path.stem for path, tests in files.items() if any(_says(t, name) for t in tests for name in names)}
    yield from _orphans(root, f"tests/unit/{here}", "test_*.py", with_a_method)
    twins, formulas = root / "tests/unit/naive", {*names, *_modules(root / "advantage/modifiers")}
    with_a_twin = {path.stem for path in twins.glob("*.py") if formulas & _functions(path)}
    yield from _orphans(root, "tests/unit/naive", "*.py", {*with_a_twin, "common", "__init__"})


def _modifiers(root: Path, names: dict[str, str]) -> Iterator[str]:
    here = "advantage/modifiers"
    unregistered = sorted(_modules(root / here) - set(names.values()))
    yield from (_registers_none(here, module, "modifier") for module in unregistered)
    tests = list(_tests((root / f"tests/unit/{here}").glob("test_*.py")))
    for name in [*names, *unregistered]:
        yield from _without(root, "docs/modifiers.md", f"\n## {name}\n", "write its section")
        yield from _without(root, "docs/modifiers.md", f"| [`{name}`](#{name}) |", WRITE)
        if not any(_says(test, name) and _compares(test) for test in tests):
            yield (
                f"tests/unit/{here}: no test compares a number of the modifier {name!r}: call compute_credit(..., "
                f"modify=[{name!r}]) and compare with the formula, by hand or as a loop"
            )


def _losses(root: Path, names: dict[str, str]) -> Iterator[str]:
    unregistered = sorted(_modules(root / "losses") - SHARED - set(names.values()))
    shared = "; or, shared by several losses, name it in SHARED of tests/unit/completeness.py"
    yield from (_registers_none("losses", module, "loss") + shared for module in unregistered)
    names = names | dict(zip(unregistered, unregistered, strict=True))
    tests = list(_tests((root / "tests/unit/losses").glob("test_*.py")))
    page = (root / "docs/losses.md").read_text(encoding="utf-8").splitlines()
    headings = {word for line in page if line.startswith("## ") for word in line[3:].split(", ")}
    for name in names:
        if name not in headings:
            yield f"docs/losses.md has no section on {name}: write it under the heading `## {name}`"
        yield from _without(root, "docs/losses.md", f"| `+turnkey/loss={name}` |", WRITE)
        yield from _absent(root, f"recipe/config/turnkey/loss/{name}.yaml", WRITE)
        if not any(_says(test, name) and _compares(test) for test in tests):
            yield (
                f"tests/unit/losses/test_{name}.py: no test compares a number of the loss {name!r}: call "
                f"policy_loss({name!r}, ...) and compare with the formula, by hand or as a loop"
            )
    yield from _orphans(root, "recipe/config/turnkey/loss", "*.yaml", {*names, "vanilla"})


def _adapters(root: Path, adapters: tuple[Adapter, ...]) -> Iterator[str]:
    here = "envs/adapters"
    modules = _modules(root / here)
    in_catalog = {adapter.module for adapter in adapters}
    for module in sorted(modules - in_catalog):
        yield f"{here}/{module} is not in the catalog: add its environments to ADAPTERS in envs/catalog.py"
    for module in sorted(in_catalog - modules):
        yield f"{here}/{module}.py is not there: write it, or take its environments out of envs/catalog.py"
    for module in sorted(modules | in_catalog):
        yield from _absent(root, f"docs/envs/{module}.md", f"write the page of the adapter {module}")
        if not any((root / "tests").rglob(f"test_{module}*.py")):
            yield f"tests/unit/{here}/test_{module}.py is missing: test the adapter, with an episode that is won"
        recipes = {adapter.recipe: adapter.id for adapter in adapters if adapter.module == module and adapter.recipe}
        if not recipes:
            yield f"the adapter {module} has no recipe: name one in envs/catalog.py"
        for recipe, env_id in recipes.items():
            path = f"recipe/config/turnkey/env/{recipe}.yaml"
            yield from _absent(root, path, f"write the recipe of {env_id}")
            if (root / path).is_file():
                yield from _without(root, path, f"\n  id: {env_id}\n", f"{env_id} names this recipe in envs/catalog.py")
    for adapter in adapters:
        yield from _without(root, "docs/environments.md", f"[{adapter.name}]({adapter.page})", WRITE)
        yield from _without(root, "README.md", f"[{adapter.name}](docs/{adapter.page})", WRITE)
    yield from _orphans(root, "docs/envs", "*.md", modules)
    yield from _orphans(root, "recipe/config/turnkey/env", "*.yaml", {adapter.recipe for adapter in adapters})
    for part in ("unit", "contract"):
        for test in sorted((root / f"tests/{part}/{here}").glob("test_*.py")):
            if not any(f"{test.stem}_".startswith(f"test_{module}_") for module in modules):
                yield f"{test.relative_to(root)} belongs to no adapter: delete it, or name it test_<adapter>.py"


def _registers_none(here: str, module: str, kind: str) -> str:
    way_out = f"decorate its function with @register_{kind}, and import it in {here}/__init__.py"
    return f"{here}/{module}.py registers no {kind}: {way_out}"


def _modules(folder: Path) -> set[str]:
    paths = (path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    return {path.stem for path in paths if not path.stem.startswith("_")}


def _functions(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def _absent(root: Path, path: str, what: str) -> Iterator[str]:
    if not (root / path).is_file():
        yield f"{path} is missing: {what}"


def _without(root: Path, path: str, text: str, what: str) -> Iterator[str]:
    if text not in (root / path).read_text(encoding="utf-8"):
        yield f"{path} lacks {text.strip()!r}: {what}"


def _orphans(root: Path, folder: str, pattern: str, wanted: set) -> Iterator[str]:
    for path in sorted((root / folder).glob(pattern)):
        if path.stem not in wanted:
            yield f"{path.relative_to(root)} belongs to nothing that is registered: delete it, or register that"


def _tests(paths: Iterable[Path]) -> Iterator[ast.FunctionDef]:
    for path in paths:
        if path.is_file():
            yield from _tests_in(path.read_text(encoding="utf-8"))


@lru_cache(None)  # its own test reads the same files again and again
def _tests_in(text: str) -> list[ast.FunctionDef]:
    nodes = ast.walk(ast.parse(text))
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


@lru_cache(None)
def _says(test: ast.AST, name: str) -> bool:
    """Whether the text ``name`` occurs in the test or its parameters, also as ``name/variant``."""
    texts = (node.value for node in ast.walk(test) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(text.partition("/")[0] == name for text in texts)


@lru_cache(None)
def _compares(test: ast.AST) -> bool:
    named = (getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(test))
    return any(name in NUMERIC for name in named)


@lru_cache(None)
def _against(test: ast.AST, name: str) -> bool:
    """Whether numbers are compared with the naive twin, or with the cases of an oracle."""
    twin = any(isinstance(node, ast.Attribute) and ast.unparse(node) == f"naive.{name}" for node in ast.walk(test))
    oracle = any(isinstance(node, ast.Call) and ast.unparse(node.func) == "cases" for node in ast.walk(test))
    return _compares(test) and (twin or oracle)
