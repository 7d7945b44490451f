"""Parsing what a model wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.envs.actions import FORMATS, ParsedAction, parse_action

WORDS = ["turn left", "go forward", "Open {box}"]


@pytest.mark.parametrize(
    ("text", "fmt", "action"),
    [
        ("turn left", "plain", "turn left"),
        ("  TURN \t left \nand more", "plain", "turn left"),
        ("\n\ngo forward", "plain", "go forward"),
        ("<think>turn left?</think><action> go  Forward </action>", "tags", "go forward"),
        ("<action>go forward</action> no, <action>turn left</action>", "tags", "turn left"),
        (r"so \boxed{turn left}", "boxed", "turn left"),
        (r"\boxed{go forward} \boxed{open {BOX}} done", "boxed", "Open {box}"),
    ],
)
def test_found(text, fmt, action):
    assert parse_action(text, fmt, WORDS) == ParsedAction(action, True, None)


@pytest.mark.parametrize(
    ("text", "fmt", "reason"),
    [
        ("", "plain", "empty"),
        (" \n ", "plain", "empty"),
        ("fly", "plain", "not an admissible action: 'fly'"),
        ("turn left", "tags", "no action in the format 'tags'"),
        ("<action>turn left", "tags", "no action"),
        ("</action>turn left<action>", "tags", "no action"),
        ("<action> </action>", "tags", "empty"),
        (r"\boxed{turn left", "boxed", "no action"),
    ],
)
def test_not_found(text, fmt, reason):
    parsed = parse_action(text, fmt, WORDS)
    assert (parsed.action, parsed.valid) == (None, False)
    assert reason in parsed.reason


def test_without_a_list_every_action_is_taken_as_it_is():
    assert parse_action("<action>Say  Hello</action>", "tags", None) == ParsedAction("Say Hello", True, None)


@given(st.text(), st.sampled_from(sorted(FORMATS)), st.sampled_from([None, WORDS]))
def test_never_raises(text, fmt, admissible):
    parsed = parse_action(text, fmt, admissible)
    assert parsed.valid == (parsed.action is not None) == (parsed.reason is None)


@pytest.mark.parametrize("piece", ["a", "<action>", "\\boxed{", "\x00\x1b[2J", "é☃\u202e", "{", "</action>"])
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_100_kb(piece, fmt):
    parsed = parse_action(piece * (100_000 // len(piece)), fmt, WORDS)
    assert not parsed.valid
    assert len(parsed.reason) < 600


def test_unknown_format():
    with pytest.raises(ValueError, match="Did you mean 'tags'"):
        parse_action("x", "tag", None)
