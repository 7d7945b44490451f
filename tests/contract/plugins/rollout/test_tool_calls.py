"""Tool calls of a turn: what parsers, verl's, vLLM's and one's own, take and what not; and which of the calls may run.

The table is family x kind of damage x door: native tools (``tools``), the one tool ``act`` (``json``), the codec of the
gateway. What an episode and an evaluation make of it: ``test_tools.py``.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from families import FAMILIES, REAL
from test_action_reader import FORMS, Values
from test_tools import tokenizer
from tool_env import TOOLS, function
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from vllm.tool_parsers import ToolParserManager

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.errors import ModuleImportError
from verl_turnkey.envs.prompting.actions import Call
from verl_turnkey.envs.tools import calls_text, words_text
from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.rollout.action_reader import ToolsReader, action_reader
from verl_turnkey.plugins.rollout.call_markup import READERS, WrittenCall
from verl_turnkey.plugins.rollout.tool_calls import Tools, call_parser, check_tool_parser, read_calls, tools_of

# --- the table --------------------------------------------------------------------------------------------------------

TEXT = {"type": "string"}
TABLE = [
    function("store", ("name", "text"), name=TEXT, text=TEXT),
    function("drop", ("place",), place=TEXT),
    function("list"),
    function(
        "set",
        on={"type": "boolean"},
        count={"type": "integer"},
        ratio={"type": "number"},
        tags={"type": "array", "items": TEXT},
        more={"type": "object"},
        note={"anyOf": [TEXT, {"type": "null"}]},
    ),
]
KINDS: dict[str, tuple[str, Values, Any]] = {
    "a text": ("drop", {"place": ("shelf_12", '"shelf_12"')}, {"place": "shelf_12"}),
    "no argument": ("list", {}, {}),
    "like a number": ("drop", {"place": ("1.10", '"1.10"')}, {"place": "1.10"}),
    "a number for a text": ("drop", {"place": ("1e5", "1e5")}, {"place": "1e5"}),
    "quotes": ("drop", {"place": ('"red door"', json.dumps('"red door"'))}, {"place": '"red door"'}),
    "JSON": (
        "store",
        {"name": ("a", '"a"'), "text": ('{"a": [1.0]}', json.dumps('{"a": [1.0]}'))},
        {"name": "a", "text": '{"a": [1.0]}'},
    ),
    "indented": (
        "drop",
        {"place": ("  if x:\n    y()", json.dumps("  if x:\n    y()"))},
        {"place": "  if x:\n    y()"},
    ),
    "true": ("set", {"on": (" true ", " true ")}, {"on": True}),
    "null": ("set", {"note": ("null", "null")}, {"note": None}),
    "numbers": ("set", {"count": ("7", "7"), "ratio": ("1.50", "1.50")}, {"count": 7, "ratio": 1.5}),
    "a list": ("set", {"tags": ('["a", "b, c"]', '["a", "b, c"]')}, {"tags": ["a", "b, c"]}),
    "an object": ("set", {"more": ('{"a": {"b": 1.5}}', '{"a": {"b": 1.5}}')}, {"more": {"a": {"b": 1.5}}}),
    # what is refused, and the words in which the model is told
    "unknown tool": ("unlist", {}, "there is no tool 'unlist'; the tools are store, drop, list, set"),
    "no such tool for its arguments": ("weigh", {"place": ("a", '"a"')}, "there is no tool 'weigh'"),
    "an argument is missing": ("store", {"name": ("a", '"a"')}, "'text' is a required property"),
    "yes": ("set", {"on": ("yes", '"yes"')}, "on: 'yes' is not of type 'boolean'"),
    "1": ("set", {"on": ("1", "1")}, "is not of type 'boolean'"),
    "half a number": ("set", {"count": ("1.5", "1.5")}, "is not of type 'integer'"),
    "infinity": ("set", {"ratio": ("1e400", "1e400")}, "1e400"),
    "NaN": ("set", {"ratio": ("NaN", "NaN")}, "NaN"),
    "not JSON": ("set", {"more": ('{"a": 1', '{"a": 1')}, ""),
}
SPECIAL = (
    "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <minimax:tool_call> </minimax:tool_call> "
    "<seed:tool_call> </seed:tool_call> <|tool_call> <tool_call|> <|tool_calls_section_begin|> <seed:think> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|> <think> </think> "
    "<|channel|> <|message|> <|start|> <|call|> <|constrain|> <longcat_tool_call> </longcat_tool_call> <|channel> "
    "<channel|> </seed:think>"
)
MARK = re.compile(r"</[^>]+>|<\|[a-z_]*(?:end|call)\|>|<tool_call\|>")
"""what closes an argument, a call or a block"""
MARKS = {
    "vllm:longcat": (("tool_call>", "longcat_tool_call>"),),
    "vllm:dots": (("minimax:tool_call", "dots_function_call"),),
    "vllm:deepseek_v32": (("tool_calls>", "function_calls>"),),
}
"""those of a family beside which another one stands that is written alike"""


def form(parser: str, tool: str, values: Values) -> str:
    """A call as models of the parser's family write it."""
    alike = {"vllm:longcat": "hermes", "vllm:dots": "minimax", "vllm:deepseek_v32": "deepseek_v4"}.get(parser)
    stock = alike or next(name for name in FORMS if READERS[name] is READERS[parser])
    text = FORMS[stock](tool, values)
    for old, new in MARKS.get(parser, ()):
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def made() -> Any:
    tokenizer_of_all = FAMILIES["qwen"].tokenizer()
    tokenizer_of_all.add_tokens([*SPECIAL.split(), *MARKS_OF_VLLM])
    return tokenizer_of_all


Read = Callable[[str], tuple[list[tuple[str, dict[str, Any]]], str | None]]


def door(name: str, parser: str, made: Any) -> Read:
    """What a door makes of a turn: the calls that run, and why another one does not."""
    if name == "gateway":
        builder = create_continuous_token_builder(
            made, hf_model_type="qwen3", chat_template_kwargs={}, mm_processor_kwargs={}, processor=None
        )
        codec = Codec(made, builder, parser)

        def read(text: str) -> Any:
            parsed = asyncio.run(codec.read(made.encode(text, add_special_tokens=False), [], TABLE))
            # A call of no tool, or whose arguments do not fit, is the agent's to answer.
            return [(c.name, dict(c.arguments)) for c in parsed.calls if parsed.refused is None], parsed.refused
    else:
        reader = ToolsReader(call_parser(parser, made), made).with_tools(TABLE)

        def read(text: str) -> Any:
            ids = made.encode(text, add_special_tokens=False)
            parsed = asyncio.run(reader.read(ids, made.decode(ids, skip_special_tokens=True), None, []))
            assert parsed.reason is None or parsed.calls or parsed.feedback == f"Error: {parsed.reason}"
            calls = json.loads(parsed.action or "{}").get("calls", [])
            return [(call["name"], call["arguments"]) for call in calls], parsed.reason

    return read


@pytest.mark.parametrize("through", ["tools", "gateway"])
@pytest.mark.parametrize("parser", sorted(READERS))
def test_what_a_call_says_is_what_runs(parser, through, made):
    read = door(through, parser, made)
    for kind, (tool, values, result) in KINDS.items():
        text = form(parser, tool, values)
        calls, reason = read(text)
        if isinstance(result, str):
            assert (calls, result in (reason or "no reason")) == ([], True), (kind, text, reason)
        else:
            assert (calls, reason) == ([(tool, result)], None), (kind, text)


@pytest.mark.parametrize("through", ["tools", "gateway"])
@pytest.mark.parametrize("parser", sorted(READERS))
def test_a_call_that_is_not_closed_never_runs(parser, through, made):
    read = door(through, parser, made)
    tool, values, result = KINDS["a text"]
    whole = form(parser, tool, {**values, "more": values["place"]})
    between = "" if parser in ("gpt-oss", "vllm:openai") else "\n"
    runs = [(tool, {**result, "more": result["place"]})]
    assert read(whole) == (runs, None)
    assert read(whole + between + whole) == (runs * 2, None)
    for n in range(1, len(whole)):
        assert read(whole[:n])[0] == [], whole[:n]
        half = whole + between + whole[:n]  # then the first one does not run either
        assert read(half)[0] == [], half
    for mark in MARK.finditer(whole):
        damaged = whole[: mark.start()] + whole[mark.end() :]
        calls, reason = read(damaged)
        assert (calls, reason is None) == ([], False), damaged


@pytest.mark.parametrize("parser", sorted(READERS))
def test_the_one_tool_act(parser, made):
    reader = action_reader("json", parser, made)

    def read(text: str) -> Any:
        ids = made.encode(text, add_special_tokens=False)
        return asyncio.run(reader.read(ids, made.decode(ids, skip_special_tokens=True), None, [], True))

    whole = form(parser, "act", {"action": ("go to room 12", '"go to room 12"')})
    assert read(whole).action == "go to room 12"
    for text in (
        *(whole[:n] for n in range(1, len(whole))),
        whole.replace("act", "run", 1),
        form(parser, "act", {"act": ("go", '"go"')}),
        form(parser, "act", {"action": ("go", '"go"')}) + whole[: len(whole) - 3],
    ):
        parsed = read(text)
        assert (parsed.action, parsed.feedback) == (None, f"Error: {parsed.reason}"), text
    assert "is not finished: the turn reached its limit of tokens" in read(whole[:-5]).reason


# --- vLLM's other parsers ---------------------------------------------------------------------------------------------

ARGUMENTS = '{"place": "shelf_12", "count": 12}'
PYTHON = 'drop(place="shelf_12", count=12)'
NAMED = f'{{"name": "drop", "arguments": {ARGUMENTS}}}'
DEEPSEEK_ARGS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
OTHERS = {
    "apertus": f'<|tools_prefix|>[{{"drop": {ARGUMENTS}}}]<|tools_suffix|>',
    "deepseek_v3": DEEPSEEK_ARGS % f"function<｜tool▁sep｜>drop\n```json\n{ARGUMENTS}\n```",
    "deepseek_v31": DEEPSEEK_ARGS % f"drop<｜tool▁sep｜>{ARGUMENTS}",
    "functiongemma": "<start_function_call>call:drop{place:<escape>shelf_12<escape>,count:<escape>12<escape>}"
    "<end_function_call>",
    "gigachat3": f"function call<|role_sep|>\n{NAMED}",
    "granite": f"<|tool_call|>[{NAMED}]",
    "granite-20b-fc": f"<function_call> {NAMED}",
    "hunyuan_a13b": f"<tool_calls>[{NAMED}]</tool_calls>",
    "hy_v3": "<tool_calls>\n<tool_call>drop<tool_sep>\n<arg_key>place</arg_key>\n<arg_value>shelf_12</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n</tool_calls",
    "inkling": '<|message_model|>drop<|content_invoke_tool_json|>{"name": "drop", "args": '
    f"{ARGUMENTS}}}<|end_message|>",
    "internlm": f"<|action_start|><|plugin|>{NAMED.replace('arguments', 'parameters')}<|action_end|>",
    "jamba": f"<tool_calls>[\n    {NAMED}\n]</tool_calls>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="drop" index="1"<|sep|>'
    '<|open|>argument key="place" type="string"<|sep|>shelf_12<|close|>argument<|sep|>'
    '<|open|>argument key="count" type="number"<|sep|>12<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "llama3_json": NAMED.replace("arguments", "parameters"),
    "llama4_pythonic": f"[{PYTHON}]",
    "minicpm5": '<function name="drop"><param name="place">shelf_12</param><param name="count">12</param></function>',
    "mistral": f"[TOOL_CALLS][{NAMED}]",
    "muse_glimmer": '<|start|>assistant to=drop<|message|><atem:function_calls>\n<atem:invoke name="drop">\n'
    '<atem:parameter name="place">shelf_12</atem:parameter>\n<atem:parameter name="count">12</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "olmo3": f"<function_calls>{PYTHON}</function_calls>",
    "phi4_mini_json": f"functools[{NAMED}]",
    "pythonic": f"[{PYTHON}]",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="drop"><steptml:parameter name="place">shelf_12</steptml:parameter>'
    '<steptml:parameter name="count">12</steptml:parameter></steptml:invoke>'
    "<｜tool_call_end｜><｜tool_calls_end｜>",
    "xlam": f"[{NAMED}]",
}
CANNOT_BE_MADE = {"cohere_command3", "cohere_command4", "minimax_m3", "llama4_json"}
"""they need a package of their own, or a vLLM built with Rust; the last is ``llama3_json``"""
MARKS_OF_VLLM = sorted(
    {mark for text in OTHERS.values() for mark in re.findall(r"<[|｜][^>]*[|｜]>|<[/\w:]+>|\[TOOL_CALLS\]", text)}
    | {"<|python_tag|>", "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_text|>", "<|eot|>"}
    | {"<|content_tool_error|>", "<|content_model_end_sampling|>", "<|eom|>"}
)


def test_every_parser_of_vllm_is_in_a_table():
    names = {name.removeprefix("vllm:") for name in READERS if ":" in name}
    assert {*OTHERS, *CANNOT_BE_MADE, *names} == set(ToolParserManager.list_registered())


@pytest.mark.parametrize("parser", sorted(OTHERS))
def test_a_call_that_is_not_closed_never_runs_by_vllms_parsers(parser, made):
    tools = [function("drop", ("place",), place=TEXT, count={"type": "integer"})]
    reader = ToolsReader(call_parser(f"vllm:{parser}", made), made).with_tools(tools)

    def action(text: str) -> str | None:
        ids = made.encode(text, add_special_tokens=False)
        return asyncio.run(reader.read(ids, text, None, [], True)).action

    whole = OTHERS[parser]
    assert action(whole) == calls_text([("drop", {"place": "shelf_12", "count": 12})])
    assert [whole[:n] for n in range(1, len(whole)) if action(whole[:n])] == []


# --- real tokenizers --------------------------------------------------------------------------------------------------

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


def read(name: str, made, text: str, tools=TOOLS) -> list[Call]:
    ids = made.encode(text, add_special_tokens=False)
    return [c for c in asyncio.run(read_calls(call_parser(name, made), ids, tools_of(tools))).calls if c.error is None]


@pytest.mark.parametrize("name", VLLM)
def test_calls_by_vllms_parsers(name):
    family, text = VLLM[name]
    made = tokenizer(family)
    calls = read(name, made, text + made.eos_token)
    assert [(call.name, call.arguments) for call in calls] == [("put", CUP), ("look", {})]
    assert read(name, made, "no call here") == []


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
    assert [(call.name, call.arguments) for call in calls] == [("put", CUP), ("look", {})]
    assert [call.id for call in calls] == [taken] * 2, "their templates take no id of another length"


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
        assert call.arguments == {"thing": "7", "times": 2}


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
    assert asyncio.run(parser.read(made.encode("LOOK and PUT"), TOOLS)).calls == calls
    (tmp_path / "line.py").write_text(
        (tmp_path / "own.py").read_text().replace("arguments='{}'", "arguments=text.partition(';')[0]")
    )
    parser = call_parser(f"{tmp_path}/line.py:Shout", made)
    for text, finished in (("LOOK at room 1", False), ("LOOK at room 1;", True)):
        assert asyncio.run(parser.read(made.encode(text), TOOLS, cut=True)).finished == finished
        assert asyncio.run(parser.read(made.encode(text), TOOLS)).finished


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


# --- calls ------------------------------------------------------------------------------------------------------------

POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
BOOK = function(
    "book",
    ("seats",),
    seats={"type": "integer", "minimum": 1},
    name={"anyOf": [{"type": "string"}, {"type": "null"}]},
    kinds={"type": "array", "items": {"enum": ["window", "aisle"]}},
    place={"$ref": "#/$defs/point"},
    loud={"type": "boolean"},
)
BOOK["function"]["parameters"]["$defs"] = {"point": POINT}
NOWHERE = function("lost", place={"$ref": "#/$defs/nowhere"})
BOOKING = Tools([BOOK, NOWHERE, function("look")])


def check(arguments: Any, name: str = "book") -> Any:
    return BOOKING.check(WrittenCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments), "id7"))


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"seats": 2}, {"seats": 2}),
        ({"seats": 2, "name": None, "kinds": ["aisle"], "place": {"x": 1.5}, "loud": False}, None),
        ({"seats": "2"}, {"seats": 2}),  # of parsers that read no types
        ({"seats": 2, "name": 7}, {"seats": 2, "name": "7"}),
        ({"seats": 2, "loud": "true"}, {"seats": 2, "loud": True}),
        ({"seats": 2, "kinds": '["window"]'}, {"seats": 2, "kinds": ["window"]}),
        ({"seats": 2, "place": '{"x": 1}'}, {"seats": 2, "place": {"x": 1}}),
        ({"seats": 2, "name": "2"}, {"seats": 2, "name": "2"}),  # which is a text already
        ({"seats": 2, "more": 1}, {"seats": 2, "more": 1}),  # the schema does not forbid it
    ],
)
def test_arguments_that_fit(arguments, taken):
    call = check(arguments)
    assert (call.name, call.arguments, call.error, call.id) == ("book", taken or arguments, None, "id7")
    assert type(call.arguments["seats"]) is int


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "the arguments of book do not fit: 'seats' is a required property"),
        ({"seats": 0}, "seats: 0 is less than the minimum of 1"),
        ({"seats": "two"}, "seats: 'two' is not of type 'integer'"),
        ({"seats": True}, "seats: True is not of type 'integer'"),
        ({"seats": 1.5}, "seats: 1.5 is not of type 'integer'"),
        ({"seats": 1, "kinds": ["roof"]}, "kinds.0: 'roof' is not one of ['window', 'aisle']"),
        ({"seats": 1, "place": {"y": 1}}, "place: Additional properties are not allowed ('y' was unexpected)"),
        ({"seats": 1, "place": {"x": "far"}}, "place.x: 'far' is not of type 'number'"),
        ({"seats": "a" * 1000}, "a..."),
    ],
)
def test_arguments_that_do_not(arguments, error):
    call = check(arguments)
    assert error in call.error
    assert call.kind == "admissible"
    assert call.arguments == arguments
    assert len(call.error) < 400


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "3", '"x"', '{"seats": NaN}', '{"seats": Infinity}', "[" * 100_000, '{"a":' * 100_000]
)
def test_arguments_that_are_no_json_object(arguments):
    call = check(arguments)
    assert call.error.startswith("the arguments of book ")
    assert call.kind == "format"


def test_a_call_without_arguments():
    assert check("", "look").error is None
    assert check("{}", "look").arguments == {}


def test_a_tool_that_does_not_exist():
    call = check({}, "fly" * 100)
    assert call.error == f"there is no tool {('fly' * 100)[:80]!r}; the tools are book, lost, look"
    assert call.kind == "admissible"


def test_a_reference_to_nowhere_is_an_error_of_the_call():
    assert "they cannot be checked" in check({"place": 1}, "lost").error


def test_an_unusable_schema_of_an_agents_tool_takes_any_arguments():
    tools = Tools([NOWHERE, function("go", way={"type": "north"})], strict=False)
    for name, arguments in (("lost", '{"place": 1.5}'), ("go", '{"way": "up"}')):
        call = tools.check(WrittenCall(name, arguments))
        assert (call.arguments, call.error) == (json.loads(arguments), None)
    assert "not JSON" in tools.check(WrittenCall("go", '{"way": 1e400}')).error


def test_parameters_that_are_no_schema():
    with pytest.raises(EnvironmentFailure, match="the parameters of the tool 'go' are not a JSON Schema"):
        Tools([function("go", way={"type": "north"})])
