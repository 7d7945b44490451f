"""The release checklist, step by step: what holds is "ok", what does not shows its output, and the exit code is 1.

    .venv/bin/python .ci/release.py             # all steps; sdist and wheel are in dist/ afterwards
    .venv/bin/python .ci/release.py --list      # the steps
    .venv/bin/python .ci/release.py build twine # some of them

Then, by hand: ``git tag vVERSION``, ``uv publish dist/*``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TWINE = "twine==6.2.0"
#: What a release is tested with: the whole suite, and first the tests of the packages that are published.
PACKAGES = ("tests/unit/test_packaging.py", "tests/contract/plugins/cli/test_bare_install.py")


class Wrong(Exception):
    """A step does not hold; the text says what to change."""


def version() -> str:
    """The version, whose one place is pyproject.toml."""
    match = re.search(r'^version = "(.+)"$', _text("pyproject.toml"), re.MULTILINE)
    assert match is not None
    return match[1]


def versions() -> None:
    if f"\nversion: {version()}\n" not in _text("CITATION.cff"):
        raise Wrong(f"CITATION.cff: expected the line `version: {version()}`, that of pyproject.toml")
    if not re.search(rf"^## {re.escape(version())} \(\d{{4}}-\d\d-\d\d\)$", _text("CHANGELOG.md"), re.MULTILINE):
        raise Wrong(f"CHANGELOG.md: expected a heading `## {version()} (YYYY-MM-DD)`, the day of the release")


def clean() -> None:
    if changed := _run("git", "status", "--porcelain"):
        raise Wrong(f"commit or remove:\n{changed}")


def tables() -> None:
    if written := _run(sys.executable, ROOT / "tools" / "write_tables.py"):
        raise Wrong(f"tables or recipes were out of date; they have been rewritten, commit them:\n{written}")


def style() -> None:
    _run(BIN / "ruff", "check", ".")
    _run(BIN / "ruff", "format", "--check", ".")
    _run(BIN / "pyright", "--pythonpath", sys.executable)


def docs() -> None:
    _run(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", ROOT / "dist" / "site")
    shutil.rmtree(ROOT / "dist" / "site")


def build() -> None:
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    _run(BIN / "uv", "build", "--quiet", "--out-dir", "dist")  # the wheel out of the sdist
    names = {path.name for path in (ROOT / "dist").glob("verl_turnkey-*")}
    if names != {f"verl_turnkey-{version()}.tar.gz", f"verl_turnkey-{version()}-py3-none-any.whl"}:
        raise Wrong(f"dist/: expected an sdist and a wheel of {version()}, got {', '.join(sorted(names)) or 'nothing'}")


def twine() -> None:
    """In an environment of its own, which uv makes and removes."""
    _run(
        BIN / "uv",
        "tool",
        "run",
        "--from",
        TWINE,
        "twine",
        "check",
        "--strict",
        *sorted((ROOT / "dist").glob("verl_*")),
    )


def packages() -> None:
    _run(sys.executable, "-m", "pytest", "-q", *PACKAGES)


def tests() -> None:
    _run("./run_tests.sh", "all")


STEPS: dict[str, tuple[Callable[[], None], str]] = {
    "versions": (versions, "CITATION.cff and CHANGELOG.md have the version of pyproject.toml, and the day"),
    "clean": (clean, "nothing is uncommitted"),
    "tables": (tables, "tables and recipes are those of the code"),
    "style": (style, "ruff and pyright find nothing"),
    "docs": (docs, "the site builds, and every link leads somewhere"),
    "build": (build, "dist/ has the sdist and the wheel"),
    "twine": (twine, "the package index takes their metadata"),
    "packages": (packages, f"both install on each supported Python, and work without verl: {', '.join(PACKAGES)}"),
    "tests": (tests, "./run_tests.sh all"),
}


def main(names: list[str]) -> int:
    """Run the steps, those after one that does not hold too; returns 1 if there is one."""
    wrong = 0
    for name in names:
        step, meaning = STEPS[name]
        print(f"{name:<9} {meaning} ... ", end="", flush=True)
        try:
            step()
        except Wrong as error:
            print(f"NO\n{error}")
            wrong = 1
        else:
            print("ok")
    return wrong


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Wrong(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", choices=[*STEPS, []], default=[], help="default: all")
    parser.add_argument("--list", action="store_true", help="only print the steps")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:<9} {meaning}" for name, (_, meaning) in STEPS.items()))
        sys.exit()
    sys.exit(main(arguments.steps or list(STEPS)))
