"""Write the files of a new estimator, loss or environment of this package, and register it. They work as they are.

    python tools/new_part.py estimator NAME

They are all files that ``tests/unit/test_completeness.py`` asks for. The texts are in ``templates``; a file of the
user's own is written by ``turnkey new``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from verl_turnkey.plugins.cli.new import KINDS, check_name, own_template, render, write

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Part:
    """The files of a new part of a kind."""

    files: dict[str, str]
    """where each template goes"""
    recipe: str
    """the recipe, which `write_tables.py` makes unless there is a template"""
    by_hand: tuple[str, ...]
    """what the author edits afterwards"""
    tests: str
    """what tests it, beside the completeness test and the pages"""


PARTS = {
    "estimator": Part(
        files={
            "module": "advantage/methods/{name}.py",
            "twin": "tests/unit/naive/{name}.py",
            "test": "tests/unit/advantage/methods/test_{name}.py",
            "page": "docs/methods/{name}.md",
        },
        recipe="recipe/config/turnkey/{name}.yaml",
        by_hand=(
            "advantage/methods/{name}.py: parameters, formula, source, summary",
            "tests/unit/naive/{name}.py: the formula as a plain loop",
            "tests/unit/advantage/methods/test_{name}.py: the parameters it is compared with, an example by hand",
            "docs/methods/{name}.md: the page, with the numbers that its snippet prints",
        ),
        tests="tests/unit/advantage/methods/test_{name}.py tests/unit/advantage/test_all_estimators.py",
    ),
    "loss": Part(
        files={
            "module": "losses/{name}.py",
            "test": "tests/unit/losses/test_{name}.py",
        },
        recipe="recipe/config/turnkey/loss/{name}.yaml",
        by_hand=(
            "losses/{name}.py: parameters, formula, source, summary",
            "tests/unit/losses/test_{name}.py: the formula as a plain loop, an example by hand",
            "docs/losses.md: the section {name}",
        ),
        tests="tests/unit/losses",
    ),
    "env": Part(
        files={
            "module": "envs/adapters/{name}.py",
            "test": "tests/unit/envs/adapters/test_{name}.py",
            "page": "docs/envs/{name}.md",
            "recipe": "recipe/config/turnkey/env/{name}.yaml",
        },
        recipe="recipe/config/turnkey/env/{name}.yaml",
        by_hand=(
            "envs/adapters/{name}.py: the environment",
            "tests/unit/envs/adapters/test_{name}.py: what holds for it",
            "docs/envs/{name}.md: the page",
            "recipe/config/turnkey/env/{name}.yaml: its arguments, prompt, length of an episode",
            "envs/catalog.py, where it wraps a package or needs something: its entry",
        ),
        tests="tests/unit/envs/adapters/test_{name}.py",
    ),
}


def write_part(kind: str, name: str, summary: str | None = None) -> list[str]:
    """Write all files of ``name`` and register it; returns what to say of it."""
    if kind == "loss" and find_spec("torch") is None:
        raise ValueError("a loss is written with torch, which is not installed here: pip install torch")
    part, summary = PARTS[kind], KINDS[kind].summary if summary is None else summary
    check_name(kind, name, [_template(kind, "module"), own_template(kind)])
    new = {
        ROOT / path.format(name=name): render(_template(kind, text), name, summary) for text, path in part.files.items()
    }
    changed = {path: change(path.read_text(encoding="utf-8")) for path, change in _changes(kind, name, summary)}
    write(new, absent=[] if "recipe" in part.files else [ROOT / part.recipe.format(name=name)])
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    # In another interpreter: its registries contain the new one.
    command = [sys.executable, Path(__file__).resolve().parent / "write_tables.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the files are written, but write_tables.py failed: {done.stderr.strip() or done.stdout}")
    tables = [ROOT / line for line in done.stdout.splitlines()]
    return [
        "Written or changed:",
        *(f"    {path}" for path in sorted({str(path.relative_to(ROOT)) for path in (*new, *changed, *tables)})),
        "It works as it is. To make it yours, edit:",
        *(f"    {line.format(name=name)}" for line in part.by_hand),
        "Then:",
        "    python tools/write_tables.py    # recipe and tables, after a change of parameters or summary",
        "    ruff format . && ruff check .",
        f"    pytest tests/unit/test_completeness.py tests/unit/docs {part.tests.format(name=name)} "
        f'-k "{name} or whole or table"',
        "    python tests/contract/plugins/checks/test_golden.py    # with verl: puts on record what the recipe sets",
    ]


def _template(kind: str, text: str) -> str:
    return (TEMPLATES / kind / f"{text}.txt").read_text(encoding="utf-8")


def _changes(kind: str, name: str, summary: str) -> Iterator[tuple[Path, Callable[[str], str]]]:
    """The files that get a few lines more."""
    if kind == "estimator":
        yield ROOT / "advantage/methods/__init__.py", lambda text: _with_import(text, name)
    elif kind == "loss":
        yield ROOT / "losses/__init__.py", lambda text: _with_import(text, name)
        section = render(_template(kind, "section"), name, summary)
        yield ROOT / "docs/losses.md", lambda text: _before(text, "## In your own training loop\n", section)
    else:
        entry = render(_template(kind, "entry"), name, summary)
        yield ROOT / "envs/catalog.py", lambda text: text.replace("    ),\n)\n", f"    ),\n{entry})\n", 1)


def _with_import(text: str, name: str) -> str:
    """With ``name`` in the list of the import that registers its neighbours."""
    imported = re.search(r"import \(  # noqa: F401.*\n((?:    \w+,\n)+)\)", text)
    if not imported:
        raise ValueError("expected `import (  # noqa: F401 ...` with one module in each line")
    lines = sorted([*imported[1].splitlines(keepends=True), f"    {name},\n"])
    return text[: imported.start(1)] + "".join(lines) + text[imported.end(1) :]


def _before(text: str, heading: str, section: str) -> str:
    if heading not in text:
        raise ValueError(f"expected the heading {heading.strip()!r} in the page")
    return text.replace(heading, section + heading, 1)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=PARTS)
    parser.add_argument("name", help="in snake case")
    parser.add_argument("--summary", help="what it does, in one line for the tables")
    chosen = parser.parse_args(words)
    try:
        print("\n".join(write_part(chosen.kind, chosen.name, chosen.summary)))
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
