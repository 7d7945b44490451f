"""What failed, by kind; and that the package's warnings are heard where everything else is quiet."""

import logging
import subprocess
import sys

import pytest

from verl_turnkey.envs.errors import EnvironmentFailure, PromptTooLongError
from verl_turnkey.plugins import notices
from verl_turnkey.plugins.notices import Failures, InvalidActions, failure_kind


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (f"EnvironmentFailure: {EnvironmentFailure('timeout', 'step took longer')}", "timeout"),
        (f"PromptTooLongError: {PromptTooLongError('900 tokens')}", "PromptTooLongError"),
        ("TimeoutException: the server is slow", "TimeoutException"),
        ("the lake is frozen", "other"),
        ("task_17: lost", "other"),  # a kind is a metric: one for each task would be too many
        ("raised a KeyError", "other"),
        ("", "other"),
    ],
)
def test_the_kind_of_a_failure(reason, kind):
    assert failure_kind(reason) == kind


def test_a_reason_is_one_line_of_bounded_length(caplog):
    failures = Failures()
    failures.add("KeyError: no such\n  room " + "x" * 10_000)
    [record] = caplog.records
    assert "KeyError: no such room xxx" in record.getMessage()
    assert len(record.getMessage()) < 700
    assert failures.counts == {"KeyError": 1}


QUIET = """
import logging
{root}
from verl_turnkey.plugins.notices import Failures
logging.root.setLevel(logging.ERROR)
logging.getLogger("somebody.else").warning("quiet")
logging.getLogger("verl_turnkey.plugins.any").warning("heard")
Failures().add("KeyError: heard too")
"""


@pytest.mark.parametrize("root", ["", "logging.basicConfig(level=logging.ERROR)"])
def test_warnings_are_heard_in_a_process_whose_root_logger_is_quiet(root):
    """With verl's handler on the root logger, and without any."""
    done = subprocess.run([sys.executable, "-c", QUIET.format(root=root)], capture_output=True, text=True, check=True)
    assert "quiet" not in done.stderr
    assert done.stderr.count("heard") == 2


def test_a_level_that_somebody_chose_stays():
    code = (
        "import logging\n"
        "logging.getLogger('verl_turnkey').setLevel(logging.CRITICAL)\n"
        "from verl_turnkey.plugins.notices import logger\n"
        "logger.warning('heard')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_root_handler_at_error_does_not_silence_and_none_prints_twice(capsys):
    quiet = logging.StreamHandler()
    quiet.setLevel(logging.ERROR)  # as verl sets up its own
    root = logging.getLogger()
    before, root.handlers = root.handlers, [quiet]
    try:
        notices.logger.getChild("plugins.x").warning("heard %d", 1)
        assert capsys.readouterr().err.count("heard 1") == 1
        quiet.setLevel(logging.WARNING)
        quiet.stream = sys.stderr
        notices.logger.warning("heard %d", 2)
        assert capsys.readouterr().err.count("heard 2") == 1
    finally:
        root.handlers = before


def test_mostly_invalid_actions_are_said_once_and_early(caplog):
    def warned(valid: int, turns: int = 100) -> list[str]:
        caplog.clear()
        seen = InvalidActions("tags", "Write <action>.")
        for turn in range(turns):
            seen.add(f"go\n north {turn}", None if turn < valid else "no <action>")
        return [record.getMessage() for record in caplog.records]

    [line] = warned(valid=2)
    assert line.startswith("30 of the last 32 turns have no valid action. The first: 'go north 2', no <action>.")
    assert line.endswith("turnkey.rollout.action_format is tags, and the prompt says: Write <action>.")
    assert len(warned(valid=16)) == 1, "after a validation, for instance, whose actions are valid"
    assert warned(valid=1024, turns=2000) == []
    assert warned(valid=0, turns=31) == []
