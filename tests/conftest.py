"""Holds for every part: a skipped test is a gap, and a gap fails the run; so does a test that hangs.

``pytest tests/unit --order reversed`` and ``--order random:7`` run the tests in another order; the number is a seed.
``pytest tests/contract --share 3`` runs those of today: a third of the files, and a third of the tests marked ``long``.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from zlib import crc32

import pytest

# A shell that starts a program in the background lets it, and all that it starts, ignore Ctrl-C. Tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One for all processes of pytest-xdist: in a home without a token each would write its own over that of another.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

#: Seconds for a test and its fixtures, by part: many times what the slowest takes, so that only a hang exceeds them.
TIMEOUTS = {"unit": 600, "contract": 600, "openenv": 120, "e2e": 1800}

_gaps: list[str] = []


@pytest.fixture(autouse=True)
def _own_import_path() -> Iterator[None]:
    """The command line adds the current folder, which is another one in each test."""
    path = sys.path[:]
    yield
    sys.path[:] = path


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port to listen on, also later."""
    from verl_turnkey.plugins import ports

    return ports.free_port


def order(value: str) -> str:
    name, _, seed = value.partition(":")
    if value not in ("listed", "reversed") and not (name == "random" and seed.isdigit()):
        raise ValueError
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", type=order, default="listed", help="listed (default), reversed, or random:SEED")
    parser.addoption("--share", type=int, default=1, help="N: run an Nth of the tests, all within N days")
    parser.addoption("--day", type=int, default=int(time.time()) // 86400, help="of --share; default: since 1970")


def reorder(items: list[pytest.Item], order: str) -> None:
    """``reversed``, or ``random``: the files, and the tests of each. They stay together, for their fixtures' sake."""
    if order == "reversed":
        items.reverse()
    elif order != "listed":
        chance = random.Random(int(order.partition(":")[2]))
        files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
        chance.shuffle(files)
        for tests in files:
            chance.shuffle(tests)
        items[:] = [item for tests in files for item in tests]


def of_day(item: pytest.Item, share: int, day: int) -> bool:
    """Whether ``item`` is in the share of ``day``: by its file, whose tests share fixtures; a long test by its name."""
    name = item.nodeid if item.get_closest_marker("long") else item.nodeid.partition("::")[0]
    return crc32(name.encode()) % share == day % share


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reorder(items, config.getoption("order"))
    if (share := config.getoption("share")) > 1:
        chosen = [of_day(item, share, config.getoption("day")) for item in items]
        config.hook.pytest_deselected(items=[item for item, today in zip(items, chosen, strict=True) if not today])
        items[:] = [item for item, today in zip(items, chosen, strict=True) if today]
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
    elif session.config.getoption("share") > 1 and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # none of this day


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in _gaps:
        terminalreporter.write_line(f"not run to its end: {nodeid}", red=True)
