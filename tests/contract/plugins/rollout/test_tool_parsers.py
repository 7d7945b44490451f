"""Parsers of tool calls by their names: verl's, vLLM's and one's own."""

from __future__ import annotations

import asyncio
import copy
import json
import logging

import pytest
from test_action_reader import CALLS
from test_real_tokenizers import REAL
from test_tools import tokenizer
from tool_env import TOOLS, function
from verl.experimental.agent_loop.tool_parser import ToolParser

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import ModuleImportError
from verl_turnkey.envs.tool_info import calls_text, words_text
from verl_turnkey.plugins.rollout.action_reader import ToolsReader
from verl_turnkey.plugins.rollout.tool_parsers import WrittenCall, call_parser, check_tool_parser, unread_calls

CUP = {"thing": "cup", "times": 2}
MISTRAL = '[TOOL_CALLS][{"name": "put", "arguments": {"thing": "cup", "times": 2}}, {"name": "look", "arguments": {}}]'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>"
    + "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in (("put", CUP), ("look", {}))
    )
    + "<｜tool▁calls▁end｜>"
)
VLLM = {
    "vllm:hermes": (
        "Qwen3",
        "".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in (("put", CUP), ("look", {}))
        ),
    ),
    "vllm:pythonic": ("Qwen3", '[put(thing="cup", times=2), look()]'),
    "vllm:deepseek_v3": ("DeepSeek V3", DEEPSEEK),
    "vllm:mistral": ("Mistral Nemo", MISTRAL),
    "vllm:llama3_json": (
        "Llama 3.1 with tools",
        '{"name": "put", "parameters": {"thing": "cup", "times": 2}}; {"name": "look", "parameters": {}}',
    ),
}


@pytest.fixture
def caplog_of_vllm(caplog):
    """vLLM's loggers do not propagate to the root's, where pytest listens."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def read(name: str, made, text: str, tools=TOOLS) -> list[WrittenCall]:
    _, calls = asyncio.run(call_parser(name, made).read(made.encode(text, add_special_tokens=False), tools))
    return calls


@pytest.mark.parametrize("name", VLLM)
def test_calls_by_vllms_parsers(name):
    family, text = VLLM[name]
    made = tokenizer(family)
    calls = read(name, made, text + made.eos_token)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("put", CUP), ("look", {})]
    assert read(name, made, "no call here") == []
    assert unread_calls(text, 2) == 0


def test_the_id_of_a_call_is_the_models_own():
    """vLLM's parser of Kimi reads it; others draw one."""
    made = copy.deepcopy(tokenizer("Qwen3"))
    marks = [
        f"<|tool_call{mark}|>" for mark in ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
    ]
    made.add_tokens(marks, special_tokens=True)
    section, begin, argument, end, last = marks
    text = f"{section}{begin}functions.look:7{argument}{{}}{end}{last}"
    assert [call.id for call in read("vllm:kimi_k2", made, text)] == ["functions.look:7"]
    assert [call.id for call in read("vllm:hermes", made, VLLM["vllm:hermes"][1])] == [None, None]


@pytest.mark.parametrize(
    ("call_id", "taken"), [("", None), ("[CALL_ID]a1B2c3D4e", "a1B2c3D4e"), ("[CALL_ID]a1B2", None)]
)
def test_calls_as_mistrals_models_since_2025_write_them(call_id, taken):
    """Their tokenizers have the token [ARGS], by which vLLM tells the spellings apart."""
    made = copy.deepcopy(tokenizer("Mistral Nemo"))
    made.add_tokens(["[ARGS]", "[CALL_ID]"], special_tokens=True)
    written = [
        f"[TOOL_CALLS]{name}{call_id}[ARGS]{json.dumps(arguments)}" for name, arguments in (("put", CUP), ("look", {}))
    ]
    calls = read("vllm:mistral", made, "".join(written) + made.eos_token)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("put", CUP), ("look", {})]
    assert [call.id for call in calls] == [taken] * 2, "their templates take no id of another length"
    assert unread_calls("".join(written), 2) == 0


@pytest.mark.parametrize("name", VLLM)
def test_a_call_that_cannot_be_read_is_none_and_logs_nothing(name, caplog_of_vllm):
    family, text = VLLM[name]
    assert read(name, tokenizer(family), text[: text.index("cup") + 3]) == []
    assert caplog_of_vllm.records == []


@pytest.mark.parametrize("name", VLLM)
def test_a_call_inside_thoughts_is_none_whichever_parser_reads_the_others(name):
    family, text = VLLM[name]
    made = tokenizer(family)
    reader = ToolsReader(call_parser(name, made), made).with_tools(TOOLS)

    def action(turn: str) -> str | None:
        ids = made.encode(turn, add_special_tokens=False)
        return asyncio.run(reader.read(ids, made.decode(ids, skip_special_tokens=True), None, [])).action

    both = calls_text([("put", CUP), ("look", {})])
    assert action(f"<think>\nOr {text}? No.\n</think>\n\n{text}") == both
    assert action(f"<think>\nOr {text}? No.\n</think>\n\nI am done.") == words_text("I am done.")
    assert action(f"<think>\nOr {text}") is None


def test_vllms_parsers_see_the_schemas_whole():
    tools = [function("put", thing={"type": "string"}, times={"anyOf": [{"type": "integer"}, {"type": "null"}]})]
    text = (
        "<tool_call>\n<function=put>\n<parameter=thing>\n7\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    for name in ("vllm:qwen3_coder", "qwen3_coder"):
        (call,) = read(name, REAL["Qwen3"].tokenizer(), text, tools)
        assert json.loads(call.arguments) == {"thing": "7", "times": 2}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_that_no_parser_of_verl_reads_is_counted(name):
    call = CALLS[name]("go")
    assert unread_calls(call, 1) == 0
    assert unread_calls(call, 0) == 1
    assert unread_calls(f"{call} and {call}", 1) == 1
    assert unread_calls("I call no <tool> at all", 0) == 0


def test_a_parser_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(
        "from types import SimpleNamespace\n\n\n"
        "class Shout:\n"
        "    def __init__(self, tokenizer):\n"
        "        self.tokenizer, self.stop_token_ids = tokenizer, [5]\n\n"
        "    async def extract_tool_calls(self, ids, tools):\n"
        "        text = self.tokenizer.decode(ids)\n"
        "        names = [tool.function.name for tool in tools]\n"
        "        return '', [SimpleNamespace(name=n, arguments='{}') for n in names if n.upper() in text]\n"
    )
    made = REAL["Qwen3"].tokenizer()
    parser = call_parser(f"{tmp_path}/own.py:Shout", made)
    assert parser.stop_token_ids == [5]
    calls = [WrittenCall("put", "{}"), WrittenCall("look", "{}")]
    assert asyncio.run(parser.read(made.encode("LOOK and PUT"), TOOLS)) == ("", calls)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("hermess", ConfigError, "multi_turn.format=hermess is not a tool parser of verl's; did you mean 'hermes'"),
        ("vllm:llama_json", ConfigError, "is not a tool parser of vLLM's; did you mean 'llama"),
        ("json:loads", ConfigError, "must be a class made with a tokenizer, with verl's method"),
        ("json:nothing", ModuleImportError, "multi_turn.format: cannot load 'json:nothing'"),
        ("vllm:llama3_json", ConfigError, "does not suit this model's tokenizer: .*python_tag"),
    ],
)
def test_parsers_that_do_not_exist_or_do_not_suit(name, error, words):
    with pytest.raises(error, match=words):
        call_parser(name, REAL["Qwen3"].tokenizer())


def test_every_parser_of_verl_is_accepted():
    for name in ToolParser._registry:
        check_tool_parser(name)
