"""What helps to test the tests: their order, and the share of a day."""

import signal
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


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
