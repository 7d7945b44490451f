"""What a tool call holds is the model's, and may be anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

import pytest
from families import FAMILIES, read_turn
from verl.experimental.agent_loop.tool_parser import ToolParser

from verl_turnkey.plugins.rollout.action_reader import action_reader

# --- thoughts ---------------------------------------------------------------------------------------------------------

WRONG, RIGHT = "delete everything", "list files"


Values = dict[str, tuple[str, str]]
"""of arguments: the text that families without types write between their marks, and the JSON of the others"""
DSML = "｜DSML｜"


def _json(values: Values) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, (_, value) in values.items()) + "}"


def _texts(form: str, values: Values) -> str:
    return "".join(form % (key, text) for key, (text, _) in values.items())


def _gemma(values: Values) -> str:
    quoted = [(key, re.sub(TEXT, _in_gemmas_quotes, value)) for key, (_, value) in values.items()]
    return ",".join(f"{key}:{value}" for key, value in quoted)


TEXT = r'"(?:[^"\\]|\\.)*"'


def _in_gemmas_quotes(text: re.Match[str]) -> str:
    return f'<|"|>{json.loads(text[0])}<|"|>'


def _dsml(values: Values) -> str:
    form = f'<{DSML}parameter name="%s" string="%s">%s</{DSML}parameter>\n'
    return "".join(
        form % ((key, "true", text) if value.startswith('"') else (key, "false", value))
        for key, (text, value) in values.items()
    )


FORMS: dict[str, Callable[[str, Values], str]] = {
    "hermes": lambda n, v: f'<tool_call>\n{{"name": "{n}", "arguments": {_json(v)}}}\n</tool_call>',
    "qwen3_coder": lambda n, v: (
        f"<tool_call>\n<function={n}>\n" + _texts("<parameter=%s>\n%s\n</parameter>\n", v) + "</function>\n</tool_call>"
    ),
    "glm": lambda n, v: (
        f"<tool_call>{n}\n" + _texts("<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n", v) + "</tool_call>"
    ),
    "minimax": lambda n, v: (
        f'<minimax:tool_call>\n<invoke name="{n}">\n'
        + _texts('<parameter name="%s">%s</parameter>\n', v)
        + "</invoke>\n</minimax:tool_call>"
    ),
    "seed": lambda n, v: (
        f"<seed:tool_call>\n<function={n}>\n"
        + _texts("<parameter=%s>%s</parameter>\n", v)
        + "</function>\n</seed:tool_call>"
    ),
    "kimi": lambda n, v: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{_json(v)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek_v4": lambda n, v: (
        f'<{DSML}tool_calls>\n<{DSML}invoke name="{n}">\n{_dsml(v)}</{DSML}invoke>\n</{DSML}tool_calls>'
    ),
    "gemma4": lambda n, v: f"<|tool_call>call:{n}{{{_gemma(v)}}}<tool_call|>",
    "gpt-oss": lambda n, v: (
        f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_json(v)}<|call|>"
    ),
}
"""a call by each tool parser of verl's"""


def act(parser: str, action: str) -> str:
    return FORMS[parser]("act", {"action": (action, json.dumps(action))})


def test_every_tool_parser_of_verl_has_a_call_here():
    assert FORMS.keys() == ToolParser._registry.keys()


@pytest.fixture(scope="module")
def tokenizer():
    return FAMILIES["qwen"].tokenizer()


def read(reader, tokenizer, text: str, prompt: str = "<|im_start|>assistant\n"):
    return read_turn(reader, tokenizer, text, tokenizer.encode(prompt))


@pytest.mark.parametrize("parser", sorted(FORMS))
def test_a_call_inside_thoughts_is_no_action(parser, tokenizer):
    reader, call = action_reader("json", parser, tokenizer), partial(act, parser)
    assert read(reader, tokenizer, call(RIGHT)).action == RIGHT
    assert read(reader, tokenizer, f"<think>Or {call(WRONG)}? No.</think>{call(RIGHT)}").action == RIGHT
    assert read(reader, tokenizer, f"<think>I write <tool_call> now.</think>{call(RIGHT)}").action == RIGHT
    assert read(reader, tokenizer, call(WRONG) + " No: " + call(RIGHT)).action == RIGHT
    for prompt, text in (
        ("<|im_start|>assistant\n", f"<think>Or {call(WRONG)}"),
        ("<|im_start|>assistant\n<think>\n", f"Or {call(WRONG)}"),
        ("<|im_start|>assistant\n", f"<think>Or {call(WRONG)}</think>"),
    ):
        parsed = read(reader, tokenizer, text, prompt)
        assert (parsed.action, parsed.kind) == (None, "format")


def test_a_parser_of_ones_own_gets_the_whole_turn(tokenizer, tmp_path):
    (tmp_path / "own.py").write_text("def whole(text, admissible):\n    return text\n")
    reader = action_reader(f"{tmp_path}/own.py:whole", "hermes", tokenizer)
    assert read(reader, tokenizer, "<think>a</think>b").action == "<think>a</think>b"


# --- the limit of tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "turn", "admissible", "action"),
    [
        ("plain", "go to room 1", None, None),
        ("plain", "go to room 1", ["go to room 1", "Go to  room 12"], None),
        ("plain", "go to room 1", ["go to room 1", "go to room 2"], "go to room 1"),  # it can be no other
        ("plain", "go to room 1\nthen", None, "go to room 1"),
        ("tags", "<action>go</action> and th", None, "go"),
        ("tags", "<action>go</action>, or <action>st", None, None),
        ("boxed", "\\boxed{go} and th", None, "go"),
        ("own", "Then: go to room 1", None, None),
        ("own", "Then: go to room 1;", None, "go to room 1"),
    ],
)
def test_an_action_that_a_longer_turn_would_change_is_none(fmt, turn, admissible, action, tokenizer, tmp_path):
    (tmp_path / "own.py").write_text(
        "def last(text, admissible):\n    return text.rpartition(': ')[2].partition(';')[0]\n"
    )
    reader = action_reader(f"{tmp_path}/own.py:last" if fmt == "own" else fmt, "hermes", tokenizer)
    whole, cut = (read_turn(reader, tokenizer, turn, [], admissible, cut) for cut in (False, True))
    assert whole.action in ("go to room 1", "go")
    assert (cut.action, cut.valid) == (action, action is not None)
    assert (
        action is not None
        or cut.feedback == "Error: no action: the turn reached its limit of tokens before it was finished"
    )


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("7", "7"),
        ("1.10", "1.10"),
        *((value, None) for value in ("true", "null", "[1]", '{"go": 1}', "1" * 5000 + "}")),
    ],
)
def test_an_action_is_a_text_or_the_number_of_a_menu(value, result, tokenizer):
    turn = f'<tool_call>{{"name": "act", "arguments": {{"action": {value}}}}}</tool_call>'
    parsed = read(action_reader("json", "hermes", tokenizer), tokenizer, turn)
    assert parsed.action == result
    assert result is not None or parsed.feedback == f"Error: {parsed.reason}"
