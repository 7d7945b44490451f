"""Tests that fail with another verl are told from news, and a line that is stale is told, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def outcome(folder: Path, listed: list[str]) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]")
    (folder / "0.0.1.txt").write_text("# why\n\n" + "\n".join(f"test_it.py::{name}" for name in listed))
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_known_ones_do_not_fail_the_run_and_stale_ones_do(tmp_path: Path):
    code, said = outcome(tmp_path, ["test_known", "test_known_setup", "test_stale"])
    assert code == 1
    assert "FAILED test_it.py::test_news" in said
    assert "FAILED test_it.py::test_stale - passes with verl 0.0.1: take it out of" in said
    assert "2 known differences of verl 0.0.1, of 3 that are listed" in said


def test_the_known_alone_pass(tmp_path: Path):
    code, said = outcome(tmp_path, ["test_known", "test_known_setup", "test_news"])
    assert code == 0
    assert "3 known differences" in said


def test_without_a_file_all_are_news(tmp_path: Path):
    code, said = outcome(tmp_path, [])
    assert code == 1
    assert "2 failed, 2 passed, 1 error" in said
    assert "known differences" not in said
