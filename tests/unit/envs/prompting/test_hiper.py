"""HiPER's format: the three decisions of a turn, and what is read of a garbled one."""

import pytest

from verl_turnkey.envs.prompting.actions import instruction_of, parse_action
from verl_turnkey.envs.prompting.hiper import stream_spans, switches

TURN = "<think>so</think><switch>SWITCH</switch> <subgoal>find a key</subgoal>\n<action>go north</action>"


def parts(text):
    return {stream: text[start:end] for stream, (start, end) in stream_spans(text).items()}


def test_the_three_decisions_with_their_tags():
    assert parts(TURN) == {
        "switch": "<switch>SWITCH</switch>",
        "subgoal": "<subgoal>find a key</subgoal>",
        "action": "<action>go north</action>",
    }
    assert parse_action(TURN, "hiper", ["Go  North", "wait"]).action == "Go  North"


def test_the_last_of_each_counts():
    text = "<action>a</action><switch>KEEP</switch><action>b</action>"
    assert parts(text) == {"switch": "<switch>KEEP</switch>", "action": "<action>b</action>"}


@pytest.mark.parametrize("text", ["go north", "<action>go north", "go north</action>", ""])
def test_without_tags_of_an_action_all_is_the_action(text):
    assert parts(text) == {"action": text}
    assert not parse_action(text, "hiper", None).valid


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TURN, True),
        ("<switch> switch </switch>", True),
        ("<switch>KEEP</switch>", False),
        ("<switch>SWITCH or KEEP</switch>", False),
        ("SWITCH", False),
        ("<switch>SWITCH</switch><switch>KEEP</switch>", False),
    ],
)
def test_a_garbled_decision_keeps(text, expected):
    assert switches(text) is expected


def test_the_instruction_shows_all_tags():
    assert all(f"<{tag}>" in instruction_of("hiper") for tag in ("switch", "subgoal", "action"))
