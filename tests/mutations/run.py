"""Do the tests notice? Mutations are made in a copy of the tree, one at a time, and tests run there.

    python tests/mutations/run.py                                   # the lists of all rooms, hours
    python tests/mutations/run.py losses                            # of one room
    python tests/mutations/run.py losses turn_ratio                 # of files whose path holds this word
    python tests/mutations/run.py losses --drawn 38 --seed 1        # 38 that nobody chose (drawn.py)

A list beside this file has the file, a text that occurs in it exactly once, and what stands in its place; and, where
the tests that are likeliest to notice are not those of the file (``TESTS``), these too. Drawn ones are tried on the
test file that mirrors theirs, on its folder, on the file's entry in ``TESTS`` and on the contract tests that mirror it.
A mutation is killed when a test fails that passes without it, and has survived when all of these tests pass. Results
are in ``.mutations/``, a line each: who starts again goes on there; ``--again`` tries those that survived once more,
``--unit`` leaves out contract tests. Where this package's contract tests run, so does this. Not a part of CI.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import drawn

ROOT = Path(__file__).parents[2]
ROOMS = ("advantage", "losses", "learned", "plugins", "envs")
RESULTS = ROOT / ".mutations"
PRELOADED = ("numpy", "torch", "scipy.stats", "pandas", "gymnasium", "hypothesis", "pytest")


class Mutation(NamedTuple):
    """``old`` of ``file`` becomes ``new``; ``tests`` run before those of the file."""

    file: str
    old: str
    new: str
    tests: str = ""


def listed(room: str, word: str = "") -> list[Mutation]:
    """The list of a room."""
    mutations = [Mutation(*entry) for entry in importlib.import_module(room).MUTATIONS]
    return [mutation for mutation in mutations if word in mutation.file]


def tests_of(room: str, mutation: Mutation) -> list[str]:
    """The likeliest first; each runs only when those before it have passed."""
    of_file = importlib.import_module(room).TESTS.get(mutation.file, f"tests/unit/{room}")
    return [tests for tests in dict.fromkeys((mutation.tests, of_file)) if tests]


def tests_near(room: str, mutation: Mutation) -> list[str]:
    """Those that mirror the file; the file's own; its folder, of a small room all unit tests; contract tests."""
    path = Path(mutation.file)
    name = f"test_{path.stem.strip('_')}.py"
    unit, contract = (ROOT / "tests" / part / path.parent for part in ("unit", "contract"))

    def there(*files: Path) -> str:
        return " ".join(str(file.relative_to(ROOT)) for file in files if file.is_file())

    whole = f"tests/unit/{room}" if room in ("advantage", "losses", "learned") else ""
    others = [file for file in sorted(unit.glob("test_*.py")) if file.name != name]
    listed = importlib.import_module(room).TESTS.get(mutation.file, "")
    candidates = [there(unit / name), listed, whole or there(*others), there(contract / name)]
    candidates.sort(key=lambda tests: "tests/contract" in tests)  # these take a real verl
    return [tests for tests in dict.fromkeys(candidates) if tests] or [f"tests/unit/{room}"]


def stale(mutations: Sequence[Mutation]) -> list[str]:
    """What cannot be made any more, and why."""
    problems = []
    for file, old, new, _ in mutations:
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


class Tests:
    """Runs tests in a tree, each time in a fork of this process, which has imported the slow packages."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._sound: set[str] = set()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for name in PRELOADED:
            with suppress(ImportError):
                importlib.import_module(name)

    def kill(self, mutation: Mutation, stages: Sequence[str]) -> bool:
        """Whether one of ``stages``, paths and options of pytest, fails with the mutation.

        Raises:
            RuntimeError: what failed does so without the mutation as well, or there is no test.
        """
        path = self._tree / mutation.file
        before = path.read_text(encoding="utf-8")
        for stage in stages:
            path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
            try:
                status, failed = self._run(stage)
            finally:
                path.write_text(before, encoding="utf-8")
            if status:
                self._check(failed or [stage])
                return True
        return False

    def _check(self, tests: list[str]) -> None:
        for entry in tests:
            if entry not in self._sound and self._run(entry, entry == tests[0])[0]:
                raise RuntimeError(f"this fails without any mutation: {entry}\n{self._output.read_text()}")
            self._sound.add(entry)

    @property
    def _output(self) -> Path:
        return self._tree / ".output"

    def _run(self, tests: str, first: bool = False) -> tuple[int, list[str]]:
        """What ``os.waitpid`` says of pytest, and what failed. ``first``: may be an id, not several paths."""
        report = self._tree / ".failed"
        report.write_text("[]")
        process = os.fork()
        if not process:
            self._play([tests] if first and "::" in tests else tests.split(), report)
        return os.waitpid(process, 0)[1], json.loads(report.read_text())

    def _play(self, tests: list[str], report: Path) -> None:
        """In the fork, which ends here. Without bytecode: a mutation of the same length would not be seen."""
        status = 1
        try:
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self._tree)
            package = str(self._tree / ".package")
            sys.path[:] = [str(self._tree), package, *(at for at in sys.path if not at.startswith(str(ROOT / "tests")))]
            sys.dont_write_bytecode = True
            os.environ.update(PYTHONPATH=package, PYTHONDONTWRITEBYTECODE="1")
            options = ["-x", "-q", "-p", "no:cacheprovider"]
            if all(path.startswith("tests/unit") for path in tests):
                options.append("--hypothesis-profile=first_failure")
            status = int(sys.modules["pytest"].main([*options, *tests], plugins=[_Failed(report)]))
        finally:
            os._exit(status)


class _Failed:
    """A plug-in of pytest that writes down which tests failed, or which files could not be imported."""

    def __init__(self, report: Path) -> None:
        self._report = report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._report.write_text(json.dumps([report.nodeid]))

    pytest_collectreport = pytest_runtest_logreport


def run(room: str, mutations: Sequence[Mutation], stages: Any, results: Path, again: bool) -> str:
    """Make the mutations of a room; returns the line that sums them up."""
    results.parent.mkdir(exist_ok=True)
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    known = {tuple(line[:3]): bool(line[3]) for line in map(json.loads, lines)}
    planned = [(mutation, stages(room, mutation)) for mutation in mutations]
    killed = 0
    with scratch() as tree:
        tests = Tests(tree)
        for mutation, near in planned:
            was = known.get(mutation[:3])
            if was is None or (again and not was):
                was = tests.kill(mutation, near)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([*mutation[:3], was]) + "\n")
            killed += was
            word = "killed  " if was else "SURVIVED"
            print(f"{word} {mutation.file}: {mutation.old!r} -> {mutation.new!r}", flush=True)
    count = len(mutations)
    return f"{room}: killed {killed} of {count}, {killed / max(1, count):.0%}; survived {count - killed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", nargs="?", choices=ROOMS, help="default: all of them")
    parser.add_argument("word", nargs="?", default="", help="mutations of files whose path holds it")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="COUNT", help="so many drawn ones, in place of the list"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--again", action="store_true", help="try those that survived once more")
    parser.add_argument("--unit", action="store_true", help="unit tests only")
    arguments = parser.parse_args()
    rooms = [arguments.room] if arguments.room else list(ROOMS)
    if arguments.drawn:
        made = {
            room: [Mutation(*mutation) for mutation in drawn.draw(ROOT, room, arguments.seed, arguments.drawn)]
            for room in rooms
        }
        made = {room: [mutation for mutation in of if arguments.word in mutation.file] for room, of in made.items()}
    else:
        made = {room: listed(room, arguments.word) for room in rooms}
    if problems := [problem for of in made.values() for problem in stale(of)]:
        sys.exit("The list does not fit the code any more:\n" + "\n".join(problems))
    near = tests_near if arguments.drawn else tests_of

    def stages(room: str, mutation: Mutation) -> list[str]:
        kept = [
            " ".join(path for path in stage.split() if not (arguments.unit and path.startswith("tests/contract")))
            for stage in near(room, mutation)
        ]
        return list(filter(None, kept))

    kind = f"drawn-{arguments.seed}" if arguments.drawn else "listed"
    for line in [run(room, of, stages, RESULTS / f"{room}-{kind}.jsonl", arguments.again) for room, of in made.items()]:
        print(line)


if __name__ == "__main__":
    main()
