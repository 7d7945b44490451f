"""How families of models write tool calls, and their readers.

A reader gets what a turn says after its thoughts, with its control tokens. It takes only calls that are closed, and
does not guess: whatever it cannot take word for word is an error of the call. Values that the family writes without a
type stay :class:`Written` texts until the tool's schema says what they are (``tool_calls.py``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl_turnkey.envs.answers import plain_text

BEGINS = re.compile(
    r"<tool_call>|<\|tool_call>|<\|tool_call_begin\|>|<｜tool▁call▁begin｜>|<seed:tool_call>|<minimax:tool_call>"
    r"|<｜DSML｜invoke|\[TOOL_CALLS\]|<\|python_tag\|>|<function_call>|<\|tool_calls\|>"
    r"|\bto=(?:functions\.|[\w.-]+ ?<\|)"
    r'|\A\s*\[?\{\s*"name"\s*:'
)
"""what begins a tool call, in all families: a turn with more of these than calls has a call that cannot be read"""
UNREADABLE = "the tool call cannot be read"


class Number(str):
    """A number as it is written: the schema of its parameter may say that it is a text."""

    @property
    def value(self) -> int | float:
        """Raises OverflowError: it is too large; Python would take it for infinity."""
        try:
            number = float(self) if set(self) & set(".eE") else int(self)
        except ValueError:  # thousands of digits
            number = math.inf
        if not math.isfinite(number):
            raise OverflowError(f"{self[:80]} is too large a number")
        return number


@dataclass(frozen=True)
class Written:
    """A value in a format without types: the text between its marks.

    ``as_json``: whether it is JSON, if it can be, where the schema says nothing of it.
    """

    text: str
    as_json: bool


@dataclass(frozen=True)
class WrittenCall:
    """A call as the model wrote it."""

    name: str
    """empty if it cannot be read"""
    arguments: str | Mapping[str, Any]
    """JSON, or should be; or by name values of JSON, :class:`Number` or :class:`Written`"""
    id: str | None = None
    """the model's own, in families that write one"""
    error: str | None = None
    """why it cannot run, whatever the tool"""


@dataclass(frozen=True)
class TurnText:
    """What a turn says after its thoughts."""

    text: str
    """beside the calls"""
    calls: list[WrittenCall] = field(default_factory=list)
    """in their order, those included that cannot be read"""
    finished: bool = True
    """no call of it is begun and not closed"""


class Damaged(ValueError):
    """A call that is closed and cannot be read. ``name``: of its tool, where that can be."""

    def __init__(self, why: str, name: str = "") -> None:
        super().__init__(why)
        self.name = name


Block = Callable[[str, int], tuple[list[WrittenCall], int]]
"""the calls of a block whose first mark ends at a position, and where its last mark ends; raises :class:`Damaged`"""


def not_json(constant: str) -> Any:
    """``parse_constant`` of ``json``: JSON has neither NaN nor Infinity."""
    raise ValueError(f"{constant} is not JSON")


NUMBERS: dict[str, Any] = {"parse_int": Number, "parse_float": Number, "parse_constant": not_json}
"""options with which ``json.loads`` keeps numbers as they are written"""
_JSON = json.JSONDecoder(**NUMBERS)
SPACE = re.compile(r"\s*")


def read_blocks(begin: str, end: str, block: Block, text: str) -> TurnText:
    """The calls of a turn whose family writes them in blocks between two marks."""
    calls: list[WrittenCall] = []
    rest, at = "", 0
    while (start := text.find(begin, at)) >= 0:
        rest, calls, inside = rest + text[at:start], [*calls, *strangers(text[at:start])], start + len(begin)
        try:
            block_calls, at = block(text, inside)
        except (Damaged, RecursionError) as error:
            closed, following = text.find(end, inside), text.find(begin, inside)
            if closed < 0 or 0 <= following < closed:
                return TurnText(text, calls, finished=False)
            name = getattr(error, "name", "")
            block_calls, at = [WrittenCall(name, "", error=f"{UNREADABLE}: {error}")], closed + len(end)
        calls += block_calls
    tail = text[at:]
    # A second call that is half written, or the first half of its first mark: nothing of the turn is certain then.
    half = bool(calls) and (bool(BEGINS.search(tail)) or begun(tail, begin))
    return TurnText(rest + tail, [*calls, *strangers(tail)], finished=not half)


def begun(text: str, mark: str) -> bool:
    """Whether ``text`` ends inside a mark."""
    return any(text.endswith(mark[:n]) for n in range(1, len(mark)))


def strangers(text: str) -> list[WrittenCall]:
    """The calls in the markup of other families."""
    return [WrittenCall("", "", error=UNREADABLE)] * len(BEGINS.findall(text))


def match_at(pattern: re.Pattern[str], text: str, at: int, what: str, name: str = "") -> re.Match[str]:
    if (match := pattern.match(text, at)) is None:
        raise Damaged(f"{what} is missing", name)
    return match


def json_block(end: re.Pattern[str], text: str, at: int) -> tuple[list[WrittenCall], int]:
    """``{"name": ..., "arguments": {...}}``."""
    try:
        call, at = _JSON.raw_decode(text, SPACE.match(text, at).end())  # pyright: ignore[reportOptionalMemberAccess]
    except ValueError as error:
        raise Damaged(str(error)) from None
    at = match_at(end, text, at, "the mark that ends it").end()
    if not (isinstance(call, dict) and type(call.get("name")) is str and "arguments" in call):
        raise Damaged("it must be JSON with name and arguments")
    arguments = call["arguments"]
    if not isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    return [WrittenCall(plain_text(call["name"]), arguments)], at


@dataclass(frozen=True)
class Tags:
    """A family that marks each argument.

    Args:
        head: what begins a call, with its name.
        argument: an argument, with its name and ``value``, and in families with types ``text``.
        tail: what ends a call.
        opening: what no value has inside: another argument or call begins there.
        end: what ends a block.
        wrapped: the line breaks that the family writes around a value: ``each`` of both, ``pair``, ``none``.
        as_json: see :class:`Written`.
        several: whether a block may have several calls.
    """

    head: str
    argument: str
    tail: str
    opening: str
    end: str
    wrapped: str = "none"
    as_json: bool = True
    several: bool = True

    def block(self, text: str, at: int) -> tuple[list[WrittenCall], int]:
        head, argument, tail, end = (
            re.compile(rf"\s*{part}", re.DOTALL) for part in (self.head, self.argument, self.tail, self.end)
        )
        calls: list[WrittenCall] = []
        while True:
            match = match_at(head, text, at, "the name of the tool")
            name, arguments, at = match["name"].strip(), {}, match.end()
            while match := argument.match(text, at):
                key, at = match["name"].strip(), match.end()
                if key in arguments or re.search(self.opening, match["value"]):
                    raise Damaged(f"the argument {key!r} is not closed, or comes twice", name)
                arguments[key] = self._value(match, name)
            at = match_at(tail, text, at, "the mark of an argument", name).end()
            calls.append(WrittenCall(name, arguments))
            if closed := end.match(text, at):
                return calls, closed.end()
            if not self.several:
                raise Damaged("the mark of an argument is missing", name)

    def _value(self, match: re.Match[str], name: str) -> Any:
        text = match["value"]
        if (is_text := match.groupdict().get("text")) is not None:
            try:
                return text if is_text == "true" else json.loads(text, **NUMBERS)
            except ValueError as error:
                raise Damaged(f"the argument {match['name']!r} is not JSON: {error}", name) from None
        first, last = text.startswith("\n"), text.endswith("\n")
        if self.wrapped == "each" or (self.wrapped == "pair" and first and last and len(text) > 1):
            text = text[first : len(text) - (last and len(text) > first)]
        return Written(text, self.as_json)


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
"""by the name of :data:`~verl_turnkey.plugins.rollout.tool_calls.KEY`"""

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
