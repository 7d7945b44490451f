"""The markup of each family of models, by the name of its tool parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from verl_turnkey.plugins.rollout.call_markup import (
    BEGINS,
    NUMBERS,
    Damaged,
    Tags,
    TurnText,
    WrittenCall,
    begun,
    json_block,
    match_at,
    read_blocks,
    strangers,
)


def _kimi(text: str, at: int) -> tuple[list[WrittenCall], int]:
    calls: list[WrittenCall] = []
    while not (end := _KIMI_END.match(text, at)):
        match = match_at(_KIMI, text, at, "a mark of a call")
        name = re.sub(r"^functions\.|:\d+$", "", match["id"])
        if "<|tool_call_" in match["arguments"]:
            raise Damaged("a call is not closed", name)
        calls.append(WrittenCall(name, match["arguments"].strip(), match["id"]))
        at = match.end()
    return calls, end.end()


_KIMI = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?P<id>[^<]+?)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
_KIMI_END = re.compile(r"\s*<\|tool_calls_section_end\|>")


_GEMMA = re.compile(
    r'(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>(?<=[{,\s])[\w.-]+(?=\s*:))|(?P<mark>[{}\[\],:])|(?P<bare>[^{}\[\],<]+))\s*',
    re.DOTALL,
)
_GEMMA_HEAD, _GEMMA_END = re.compile(r"\s*call:(?P<name>[\w.-]+)(?=\{)"), re.compile(r"\s*<tool_call\|>")


def _gemma(text: str, at: int) -> tuple[list[WrittenCall], int]:
    """``call:name{key:value,...}``: JSON whose keys have no quotes, and whose texts have their own."""
    head = match_at(_GEMMA_HEAD, text, at, "the name of the tool")
    name, at, depth, parts = head["name"], head.end(), 0, []
    while not parts or depth:
        token = match_at(_GEMMA, text, at, "a mark", name)
        part, at = token[token.lastgroup or 0], token.end()
        depth += (part in ("{", "[")) - (part in ("}", "]")) if token["mark"] else 0
        if token["text"] is None:
            part = part.strip()
        parts.append(part if token["mark"] or (token["bare"] and _is_json(part)) else json.dumps(part))
    try:
        arguments = json.loads("".join(parts), **NUMBERS)
    except ValueError as error:
        raise Damaged(f"its arguments are not closed: {error}", name) from None
    return [WrittenCall(name, arguments)], match_at(_GEMMA_END, text, at, "its last mark", name).end()


def _is_json(text: str) -> bool:
    try:
        json.loads(text, **NUMBERS)
    except ValueError:
        return False
    return True


_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=([\w.-]+))?<\|channel\|>\w+(?: to=([\w.-]+))?"
    r" ?(?:<\|constrain\|>)?\w*<\|message\|>"
)
"""how a message begins in the harmony format: gpt-oss has the tool's name in the channel or, as in its chat template,
before it, and the generation prompt has the first ``<|start|>assistant``"""
_HARMONY_END = re.compile(r"<\|(?:call|end|return|start|channel)\|>|\Z")

_HARMONY_HALF = re.compile(r"(?:<\|channel\|>|<\|start\|>|\A to=)(?:(?!<\|message\|>).)*\Z", re.DOTALL)
"""a message that has begun, and may be a call"""


def harmony(text: str) -> TurnText:
    """The calls of a turn of gpt-oss."""
    calls: list[WrittenCall] = []
    rest, at = "", 0
    for header in _HARMONY.finditer(text):
        recipient = header[1] or header[2]
        if recipient in (None, "assistant", "user") or header.start() < at:
            continue
        end = _HARMONY_END.search(text, header.end())
        if end is None or end[0] != "<|call|>":
            return TurnText(text, calls, finished=False)
        rest, calls = rest + text[at : header.start()], [*calls, *strangers(text[at : header.start()])]
        calls.append(WrittenCall(recipient.removeprefix("functions."), text[header.end() : end.start()].strip()))
        at = end.end()
    tail = text[at:]
    half = _HARMONY_HALF.search(tail) or (calls and (BEGINS.search(tail) or begun(tail, "<|start|>")))
    return TurnText(rest + tail, [*calls, *strangers(tail)], finished=not half)


Reader = Callable[[str], TurnText]
_INVOKE = r"invoke name=(?P<quote>[\"']?)(?P<name>[^\"'<>]+)(?P=quote)>"
_PARAMETER = r"<parameter name=(?P<quote>[\"']?)(?P<name>[^\"'<>]+)(?P=quote)>(?P<value>.*?)</parameter>"
_FUNCTION = {
    "head": r"<function=(?P<name>[^<>\n]+)>",
    "argument": r"<parameter=(?P<name>[^<>\n]+)>(?P<value>.*?)</parameter>",
    "tail": "</function>",
    "opening": "<parameter=|<function=",
}


def _tagged(begin: str, end: str, **tags: Any) -> Reader:
    return partial(read_blocks, begin, end, Tags(end=re.escape(end), **tags).block)


def _json_blocks(begin: str, end: str) -> Reader:
    return partial(read_blocks, begin, end, partial(json_block, re.compile(rf"\s*{re.escape(end)}")))


def _invokes(begin: str, end: str) -> Reader:
    return _tagged(
        begin, end, head=f"<{_INVOKE}", argument=_PARAMETER, tail="</invoke>", opening="<parameter |<invoke "
    )


def _dsml(block: str) -> Reader:
    return _tagged(
        f"<｜DSML｜{block}>",
        f"</｜DSML｜{block}>",
        head=f"<｜DSML｜{_INVOKE}",
        argument=r'<｜DSML｜parameter name="(?P<name>[^"]+)" string="(?P<text>true|false)">'
        "(?P<value>.*?)</｜DSML｜parameter>",
        tail="</｜DSML｜invoke>",
        opening="<｜DSML｜",
    )


HERMES = _json_blocks("<tool_call>", "</tool_call>")
QWEN = _tagged("<tool_call>", "</tool_call>", **_FUNCTION, wrapped="each", as_json=False)
SEED = _tagged("<seed:tool_call>", "</seed:tool_call>", **_FUNCTION, wrapped="pair")
MINIMAX = _invokes("<minimax:tool_call>", "</minimax:tool_call>")
GLM = _tagged(
    "<tool_call>",
    "</tool_call>",
    head=r"(?P<name>[^\s<]+)",
    argument=r"<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    tail="",
    opening="<arg_key>|<arg_value>",
    several=False,
)
_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = partial(read_blocks, *_SECTION, _kimi)
GEMMA = partial(read_blocks, "<|tool_call>", "<tool_call|>", _gemma)

DSML = _dsml("tool_calls")
READERS: dict[str, Reader] = {
    name: reader
    for reader, names in (
        (HERMES, "hermes vllm:hermes vllm:granite4 vllm:ernie45"),
        (_json_blocks("<longcat_tool_call>", "</longcat_tool_call>"), "vllm:longcat"),
        (QWEN, "qwen3_coder vllm:qwen3_coder vllm:qwen3_xml vllm:mimo vllm:step3p5"),
        (SEED, "seed vllm:seed_oss"),
        (MINIMAX, "minimax vllm:minimax_m2"),
        (_invokes("<dots_function_call>", "</dots_function_call>"), "vllm:dots"),
        (GLM, "glm vllm:glm45 vllm:glm47 vllm:ling3 vllm:poolside_v1"),
        (KIMI, "kimi vllm:kimi_k2"),
        (GEMMA, "gemma4 vllm:gemma4"),
        (DSML, "deepseek_v4 vllm:deepseek_v4"),
        (_dsml("function_calls"), "vllm:deepseek_v32"),
        (harmony, "gpt-oss vllm:openai"),
    )
    for name in names.split()
}
"""by the name of :data:`~verl_turnkey.plugins.rollout.tool_parsers.KEY`"""

ENDS: dict[str, tuple[str, str]] = {
    f"vllm:{name}": marks
    for marks, names in (
        (("<tool_calls>", "</tool_calls>"), ("hunyuan_a13b", "jamba")),
        (("<tool_calls", "</tool_calls"), ("hy_v3",)),
        (("<tool_call>", "</tool_call>"), ("minimax_m3",)),
        (("<function", "</function>"), ("minicpm5",)),
        (("functools[", "]"), ("phi4_mini_json",)),
        (("<function_calls>", "</function_calls>"), ("olmo3",)),
        (("<atem:function_calls>", "</atem:function_calls>"), ("muse_glimmer",)),
        (("<start_function_call>", "<end_function_call>"), ("functiongemma",)),
        (("<|START_ACTION|>", "<|END_ACTION|>"), ("cohere_command3", "cohere_command4")),
        (("<|action_start|>", "<|action_end|>"), ("internlm",)),
        (("<|content_invoke_tool_json|>", "<|end_message|>"), ("inkling",)),
        (("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"), ("kimi_k3",)),
        (("<|tool_call_start|>", "<|tool_call_end|>"), ("lfm2",)),
        (("<|tools_prefix|>", "<|tools_suffix|>"), ("apertus",)),
        (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("deepseek_v3", "deepseek_v31")),
        (("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"), ("step3",)),
    )
    for name in names
}
"""the marks around the calls of vLLM's other parsers; the rest read JSON or Python, which ends by itself"""
