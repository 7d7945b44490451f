"""What is known to differ with another verl than the supported one: its tests are told from news.

``tests/data/verl/<version>.txt`` names tests, one a line. With that verl installed their failure is reported as known
and does not fail the run; one that passes does, because its line is stale. A version without a file has none.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "data" / "verl"


def known(folder: Path, verl: str) -> frozenset[str]:
    """Ids of the tests that fail with this verl; ``#`` begins a comment."""
    file = folder / f"{verl}.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


class KnownDifferences:
    """A plugin of pytest. ``ids``: as pytest prints them, from the root of the repository."""

    def __init__(self, ids: frozenset[str], verl: str) -> None:
        self._ids, self._verl = ids, verl
        self._seen: set[str] = set()  # one whose fixture fails is reported twice

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        if item.nodeid in self._ids and report.when != "teardown":
            if report.failed:
                report.outcome, report.known_difference = "passed", True
            elif report.when == "call":
                report.outcome = "failed"
                report.longrepr = f"passes with verl {self._verl}: take it out of {FOLDER.name}/{self._verl}.txt"
        return report

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("known", "k", "KNOWN") if getattr(report, "known_difference", False) else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if getattr(report, "known_difference", False):
            self._seen.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._ids:
            summary = f"{len(self._seen)} known differences of verl {self._verl}, of {len(self._ids)} that are listed"
            terminalreporter.write_line(summary)
