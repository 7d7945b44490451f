"""Tests that fail with another verl are told from news, and a line that is stale is told, too."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = "pytester"

CONTRACT = Path(__file__).parents[1] / "contract"
TESTS = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("moved")

def test_known(): assert False
def test_known_setup(broken): pass
def test_stale(): pass
def test_news(): assert False
def test_same(): pass
"""
CONFTEST = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(CONTRACT)!r})
from known_differences import KnownDifferences, known

def pytest_configure(config):
    config.pluginmanager.register(KnownDifferences(known(Path(__file__).parent, "0.0.1"), "0.0.1"))
"""


@pytest.fixture
def outcome(pytester: pytest.Pytester, monkeypatch) -> Callable[[list[str]], tuple[int, str]]:
    """Exit status and output of a pytest of its own, in this process, with these tests listed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(listed: list[str]) -> tuple[int, str]:
        pytester.makeconftest(CONFTEST)
        pytester.makeini("[pytest]")
        pytester.makepyfile(test_it=TESTS)
        lines = ["# why", "", *(f"test_it.py::{name}" for name in listed)]
        pytester.path.joinpath("0.0.1.txt").write_text("\n".join(lines))
        done = pytester.runpytest_inprocess("-rA", "-p", "no:cacheprovider", "test_it.py")
        return done.ret, done.stdout.str()

    return run


def test_known_ones_do_not_fail_the_run_and_stale_ones_do(outcome):
    code, output = outcome(["test_known", "test_known_setup", "test_stale"])
    assert code == 1
    assert "FAILED test_it.py::test_news" in output
    assert "FAILED test_it.py::test_stale - passes with verl 0.0.1: take it out of" in output
    assert "2 known differences of verl 0.0.1, of 3 that are listed" in output


def test_the_known_alone_pass(outcome):
    code, output = outcome(["test_known", "test_known_setup", "test_news"])
    assert code == 0
    assert "3 known differences" in output


def test_without_a_file_all_are_news(outcome):
    code, output = outcome([])
    assert code == 1
    assert "2 failed, 2 passed, 1 error" in output
    assert "known differences" not in output
