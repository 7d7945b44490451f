"""Holds for every part: a skipped test is a gap, and a gap fails the run."""

from __future__ import annotations

import pytest

_gaps: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped or hasattr(report, "wasxfail"):
        _gaps.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _gaps.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _gaps:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in _gaps:
        terminalreporter.write_line(f"not run to its end: {nodeid}", red=True)
