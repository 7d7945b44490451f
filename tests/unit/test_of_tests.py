"""What helps to test the tests: their order, the share of a day, and the mutations that are drawn."""

from __future__ import annotations

import importlib.util
import signal
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


def loaded(name: str) -> ModuleType:
    """A file of ``tests/mutations``."""
    spec = importlib.util.spec_from_file_location(f"mutations_{name}", ROOT / "tests" / "mutations" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def drawn() -> ModuleType:
    return loaded("drawn")


def test_an_order_is_one_of_all_tests_and_keeps_files_together(pytestconfig):
    reorder = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py")).reorder
    listed = [SimpleNamespace(path=file, name=name) for file in "abcdef" for name in range(9)]

    def ordered(order: str) -> list[SimpleNamespace]:
        items = list(listed)
        reorder(items, order)
        return items

    assert ordered("listed") == listed
    assert ordered("reversed") == listed[::-1]
    shuffled = ordered("random:1")
    assert shuffled == ordered("random:1") != ordered("random:2")
    assert sorted(shuffled, key=listed.index) == listed
    files = [(file, [test.name for test in tests]) for file, tests in groupby(shuffled, key=lambda test: test.path)]
    assert len(files) == 6
    assert [file for file, _ in files] != sorted("abcdef")
    assert all(names != sorted(names) for _, names in files)


def test_each_test_runs_on_one_day_of_the_rotation_with_its_file_or_if_long_by_itself(pytestconfig):
    of_day = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py")).of_day

    def days(nodeid: str, long: bool, share: int) -> list[int]:
        item = SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: long and name == "long")
        return [day for day in range(20_000, 20_000 + share) if of_day(item, share, day)]

    files = {f"{n}.py": [days(f"{n}.py::test_{m}", False, 3) for m in range(9)] for n in range(30)}
    assert all(len(of_file[0]) == 1 and of_file == of_file[:1] * 9 for of_file in files.values())
    assert {of_file[0][0] for of_file in files.values()} == {20_000, 20_001, 20_002}
    long = [days(f"a.py::test_{m}", True, 10) for m in range(100)]
    assert {len(of_test) for of_test in long} == {1}
    assert {of_test[0] for of_test in long} == {*range(20_000, 20_010)}


def test_what_tests_start_can_be_interrupted():
    """Though a shell has started them in the background, where all ignores the signal."""
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_the_same_seed_draws_the_same_mutations_and_each_makes_a_program(drawn):
    mutations = drawn.draw(ROOT, "losses", seed=1, count=40)
    assert mutations == drawn.draw(ROOT, "losses", seed=1, count=40)
    assert drawn.draw(ROOT, "losses", seed=1, count=10) == mutations[:10]
    assert len(set(mutations)) == 40
    assert mutations[:10] != drawn.draw(ROOT, "losses", seed=2, count=10)
    for file, old, new in mutations:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert source.count(old) == 1, file
        assert old != new, file
        compile(source.replace(old, new), file, "exec")


CODE = '''
"""A text of 1 + 1."""
from x import y

def f(a: int = 1, *, b=True) -> None:
    if not a:
        raise ValueError(f"{a} + 1")
    c = a + 1 if a < b and y else -a
    c.d = min(a, b)
    f(c)
    return c
'''
MADE = [
    ("a: int = 1", "a: int = 2"),
    ("b=True", "b=False"),
    ("not a:", "(a):"),
    ('raise ValueError(f"{a} + 1")', "pass"),
    ("a + 1", "a - 1"),
    ("+ 1 if", "+ 2 if"),
    ("if a < b and y else", "if (not (a < b and y)) else"),
    ("a < b", "a <= b"),
    ("and", "or"),
    ("-a", "(a)"),
    ("c.d = min(a, b)", "pass"),
    ("min", "max"),
    ("    f(c)", "    pass"),
    ("return c", "return None"),
]


def test_what_is_made_of_a_program(drawn, tmp_path):
    path = tmp_path / "code.py"
    path.write_text(CODE)
    file = drawn.File(path)
    changed = {
        CODE.encode()[: edit.start].decode() + edit.new + CODE.encode()[edit.end :].decode() for edit in file.edits()
    }
    assert changed == {CODE.replace(old, new, 1) for old, new in MADE}
    whole = {CODE.replace(*file.texts(edit)) for edit in file.edits()}
    assert whole == changed


@pytest.mark.parametrize("room", ["advantage", "losses", "plugins", "envs"])
def test_what_a_listed_mutation_changes_is_there_once(room: str):
    listed = [(entry[0], entry[1]) for entry in loaded(room).MUTATIONS]
    assert listed
    assert [(file, old) for file, old in listed if (ROOT / file).read_text(encoding="utf-8").count(old) != 1] == []
