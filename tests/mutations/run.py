"""Do the tests notice? Every mutation of the lists beside this file is made in a copy of the tree, and tests run there.

    python tests/mutations/run.py                      # all rooms, hours
    python tests/mutations/run.py losses               # one room
    python tests/mutations/run.py losses turn_ratio    # its mutations of files whose path holds this word

A list has the file, a text that occurs in it exactly once, and what stands in its place; and, where the tests that are
likeliest to notice are not those of the file (``TESTS``), these too. A mutation is killed when a test fails, and has
survived when all tests of the file pass. Where this package's contract tests run, so does this. Not a part of CI.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = ("advantage", "losses", "plugins", "envs")


class Mutation(NamedTuple):
    """``old`` of ``file`` becomes ``new``; ``tests`` run before those of the file."""

    file: str
    old: str
    new: str
    tests: str = ""


def mutations(room: str, word: str = "") -> list[Mutation]:
    """The list of a room."""
    found = [Mutation(*entry) for entry in importlib.import_module(room).MUTATIONS]
    return [mutation for mutation in found if word in mutation.file]


def tests_of(room: str, mutation: Mutation) -> list[str]:
    """The likeliest first; each runs only when those before it have passed."""
    of_file = importlib.import_module(room).TESTS.get(mutation.file, f"tests/unit/{room}")
    return [tests for tests in dict.fromkeys((mutation.tests, of_file)) if tests]


def stale(listed: Sequence[Mutation]) -> list[str]:
    """What cannot be made any more, and why."""
    problems = []
    for file, old, new, _ in listed:
        path = ROOT / file
        count = path.read_text(encoding="utf-8").count(old) if path.is_file() else None
        if count is None:
            problems.append(f"{file}: there is no such file")
        elif count != 1:
            problems.append(f"{file}: expected exactly once, found {count} times: {old!r}")
        elif old == new:
            problems.append(f"{file}: changes nothing: {old!r}")
    return problems


@contextmanager
def scratch() -> Iterator[Path]:
    """A copy of the tree, with its own ``verl_turnkey`` to import."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        package = copy / ".package" / "verl_turnkey"
        package.mkdir(parents=True)
        for room in (*ROOMS, "recipe"):
            (package / room).symlink_to(copy / room)
        yield copy


def passes(tree: Path, tests: str) -> bool:
    """Whether all of ``tests``, paths and options of pytest, pass in ``tree``.

    Raises:
        RuntimeError: no test ran.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    if tests.startswith("tests/unit"):
        command.append("--hypothesis-profile=first_failure")
    # Without bytecode: a mutation of the same length within a second would not be seen.
    env = {**os.environ, "PYTHONPATH": str(tree / ".package"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):  # 2: not even an import works any more
        raise RuntimeError(f"pytest {tests}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def survives(tree: Path, mutation: Mutation, tests: Sequence[str]) -> bool:
    """Whether the tests pass with the mutation."""
    path = tree / mutation.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        return all(passes(tree, each) for each in tests)
    finally:
        path.write_text(before, encoding="utf-8")


def run(room: str, word: str) -> str:
    """Make the mutations of a room; returns the line that sums them up."""
    listed = mutations(room, word)
    survivors = 0
    with scratch() as tree:
        for tests in dict.fromkeys(tests for mutation in listed for tests in tests_of(room, mutation)):
            if not passes(tree, tests):
                raise RuntimeError(f"these fail without any mutation: {tests}")
        for mutation in listed:
            survived = survives(tree, mutation, tests_of(room, mutation))
            survivors += survived
            print(f"{'SURVIVED' if survived else 'killed  '} {mutation.file}: {mutation.old!r} -> {mutation.new!r}")
            sys.stdout.flush()
    killed = len(listed) - survivors
    return f"{room}: killed {killed} of {len(listed)}, {killed / max(1, len(listed)):.0%}; survived {survivors}"


def main() -> None:
    asked = sys.argv[1:2] or ROOMS
    word = "".join(sys.argv[2:3])
    if problems := [problem for room in asked for problem in stale(mutations(room, word))]:
        sys.exit("The list does not fit the code any more:\n" + "\n".join(problems))
    for line in [run(room, word) for room in asked]:
        print(line)


if __name__ == "__main__":
    main()
