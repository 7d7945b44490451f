"""What a tool call holds is the model's, and may be anything."""

from __future__ import annotations

import pytest
from verl.experimental.agent_loop.tool_parser import FunctionCall

from verl_turnkey.plugins.rollout.action_reader import _called


@pytest.mark.parametrize(
    "arguments", ["", "{", "[" * 100_000, '{"action": ' * 100_000, '{"action": ' + "1" * 5000 + "}"]
)
def test_arguments_that_cannot_be_read_are_an_invalid_action(arguments):
    parsed = _called(FunctionCall(name="act", arguments=arguments), None)
    assert parsed.action is None
    assert "no JSON" in parsed.reason


def test_arguments_that_can():
    assert _called(FunctionCall(name="act", arguments='{"action": "look"}'), None).action == "look"


@pytest.mark.parametrize("given", ["true", "false", "null", "[1]", '{"go": 1}'])
def test_an_action_that_is_neither_text_nor_number_is_invalid(given):
    parsed = _called(FunctionCall(name="act", arguments=f'{{"action": {given}}}'), None)
    assert parsed.action is None
    assert "must give the action as text" in parsed.reason
    assert parsed.kind == "format"


def test_the_number_of_a_menu_is_its_text():
    assert _called(FunctionCall(name="act", arguments='{"action": 3}'), ["1", "3"]).action == "3"
