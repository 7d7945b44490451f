"""What a tool call holds is the model's, and may be anything."""

from __future__ import annotations

import asyncio

import pytest
from families import FAMILIES
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

from verl_turnkey.plugins.rollout.action_reader import _called, action_reader


@pytest.mark.parametrize(
    "arguments", ["", "{", "[" * 100_000, '{"action": ' * 100_000, '{"action": ' + "1" * 5000 + "}"]
)
def test_arguments_that_cannot_be_read_are_an_invalid_action(arguments):
    parsed = _called(FunctionCall(name="act", arguments=arguments), None)
    assert parsed.action is None
    assert "not JSON" in parsed.reason


def test_arguments_that_can():
    assert _called(FunctionCall(name="act", arguments='{"action": "look"}'), None).action == "look"


@pytest.mark.parametrize("value", ["true", "false", "null", "[1]", '{"go": 1}'])
def test_an_action_that_is_neither_text_nor_number_is_invalid(value):
    parsed = _called(FunctionCall(name="act", arguments=f'{{"action": {value}}}'), None)
    assert parsed.action is None
    assert "must give the action as text" in parsed.reason
    assert parsed.kind == "format"


def test_the_number_of_a_menu_is_its_text():
    assert _called(FunctionCall(name="act", arguments='{"action": 3}'), ["1", "3"]).action == "3"


# --- thoughts ---------------------------------------------------------------------------------------------------------

WRONG, RIGHT = "delete everything", "list files"


def hermes(action: str) -> str:
    return f'<tool_call>{{"name": "act", "arguments": {{"action": "{action}"}}}}</tool_call>'


def xml(action: str) -> str:
    return f"<tool_call><function=act><parameter=action>{action}</parameter></function></tool_call>"


def glm(action: str) -> str:
    return f"<tool_call>act\n<arg_key>action</arg_key>\n<arg_value>{action}</arg_value>\n</tool_call>"


def minimax(action: str) -> str:
    return (
        f'<minimax:tool_call><invoke name="act"><parameter name="action">{action}</parameter></invoke>'
        "</minimax:tool_call>"
    )


def seed(action: str) -> str:
    return f"<seed:tool_call><function=act><parameter=action>{action}</parameter></function></seed:tool_call>"


def kimi(action: str) -> str:
    call = f'functions.act:0<|tool_call_argument_begin|>{{"action": "{action}"}}'
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


def deepseek_v4(action: str) -> str:
    mark = "｜DSML｜"
    parameter = f'<{mark}parameter name="action" string="true">{action}</{mark}parameter>'
    return f'<{mark}tool_calls><{mark}invoke name="act">{parameter}</{mark}invoke></{mark}tool_calls>'


def gemma4(action: str) -> str:
    return f'<|tool_call>call:act{{action:<|"|>{action}<|"|>}}<tool_call|>'


def gpt_oss(action: str) -> str:
    header = "<|start|>assistant<|channel|>commentary to=functions.act <|constrain|>json<|message|>"
    return f'{header}{{"action": "{action}"}}<|call|>'


CALLS = {
    "hermes": hermes,
    "qwen3_coder": xml,
    "glm": glm,
    "minimax": minimax,
    "seed": seed,
    "kimi": kimi,
    "deepseek_v4": deepseek_v4,
    "gemma4": gemma4,
    "gpt-oss": gpt_oss,
}


def test_every_tool_parser_of_verl_has_a_call_here():
    assert CALLS.keys() == ToolParser._registry.keys()


@pytest.fixture(scope="module")
def tokenizer():
    return FAMILIES["qwen"].tokenizer()


def read(reader, tokenizer, text: str, prompt: str = "<|im_start|>assistant\n"):
    ids = tokenizer.encode(text)
    return asyncio.run(
        reader.read(ids, tokenizer.decode(ids, skip_special_tokens=True), None, tokenizer.encode(prompt))
    )


@pytest.mark.parametrize("parser", sorted(CALLS))
def test_a_call_inside_thoughts_is_no_action(parser, tokenizer):
    reader, call = action_reader("json", parser, tokenizer), CALLS[parser]
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


@pytest.mark.parametrize(
    ("fmt", "write"), [("plain", "{}"), ("tags", "<action>{}</action>"), ("boxed", "\\boxed{{{}}}")]
)
def test_text_inside_thoughts_that_the_prompt_opened_is_no_action(fmt, write, tokenizer):
    reader, opened = action_reader(fmt, "hermes", tokenizer), "<|im_start|>assistant\n<think>\n"
    wrong, right = write.format(WRONG), write.format(RIGHT)
    assert read(reader, tokenizer, right).action == RIGHT
    assert read(reader, tokenizer, f"{wrong}</think>{right}", opened).action == RIGHT
    assert read(reader, tokenizer, right, "<|im_start|>assistant\n<think>\n\n</think>\n\n").action == RIGHT
    for text in (wrong, f"<think>{wrong}"):
        parsed = read(reader, tokenizer, text, opened)
        assert (parsed.action, parsed.kind) == (None, "format")
        assert "ends before its thoughts" in parsed.reason


@pytest.mark.parametrize("fmt", ["plain", "tags"])
def test_channels_of_gpt_oss(fmt):
    made = FAMILIES["gpt-oss"].tokenizer()
    reader, right = action_reader(fmt, "hermes", made), RIGHT if fmt == "plain" else f"<action>{RIGHT}</action>"
    thoughts = f"<|channel|>analysis<|message|>{right.replace(RIGHT, WRONG)}"
    final = f"<|start|>assistant<|channel|>final<|message|>{right}<|return|>"
    assert read(reader, made, f"{thoughts}<|end|>{final}").action == RIGHT
    assert read(reader, made, final.removeprefix("<|start|>assistant")).action == RIGHT
    assert read(reader, made, thoughts).action is None


def test_a_parser_of_ones_own_gets_the_whole_turn(tokenizer, tmp_path):
    (tmp_path / "own.py").write_text("def whole(text, admissible):\n    return text\n")
    reader = action_reader(f"{tmp_path}/own.py:whole", "hermes", tokenizer)
    assert read(reader, tokenizer, "<think>a</think>b").action == "<think>a</think>b"
