"""Holds for every part: a skipped test is a gap, and a gap fails the run; so does a test that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

#: Seconds for a test and its fixtures, by part: many times what the slowest takes, so that only a hang exceeds them.
TIMEOUTS = {"unit": 120, "contract": 600, "openenv": 120, "e2e": 1800}

_gaps: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        part = item.path.relative_to(Path(__file__).parent).parts[0]
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUTS[part]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped or hasattr(report, "wasxfail"):
        _gaps.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:  # an error, because workers of pytest-xdist report nothing else
        report.outcome = "failed"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _gaps:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in _gaps:
        terminalreporter.write_line(f"not run to its end: {nodeid}", red=True)
