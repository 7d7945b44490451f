"""Parsing what a model wrote."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_turnkey.envs import ModuleImportError
from verl_turnkey.envs.prompting.actions import (
    CALLS,
    FORMATS,
    INSTRUCTIONS,
    ControlTokens,
    ParsedAction,
    instruction_of,
    load_parser,
    parse_action,
    stream_spans,
    switches,
)

WORDS = ["turn left", "go forward", "Open {box}"]


@pytest.mark.parametrize(
    ("text", "fmt", "action"),
    [
        ("turn left", "plain", "turn left"),
        ("  TURN \t left \nand more", "plain", "turn left"),
        ("\n\ngo forward", "plain", "go forward"),
        ("<think>\nturn left?\n</think>\n\ngo forward\nso be it", "plain", "go forward"),
        ("turn left?</think>go forward", "plain", "go forward"),
        ("<think>turn left?</think><action> go  Forward </action>", "tags", "go forward"),
        ("<action>go forward</action> no, <action>turn left</action>", "tags", "turn left"),
        ("<think>write <action>turn left</action></think><action>go forward</action>", "tags", "go forward"),
        (r"<think>\boxed{turn left}?</think> \boxed{go forward}", "boxed", "go forward"),
        (r"so \boxed{turn left}", "boxed", "turn left"),
        (r"\boxed{go forward} \boxed{open {BOX}} done", "boxed", "Open {box}"),
    ],
)
def test_found(text, fmt, action):
    assert parse_action(text, fmt, WORDS) == ParsedAction(action)


@pytest.mark.parametrize(
    ("text", "fmt", "reason", "kind"),
    [
        ("", "plain", "empty", "format"),
        (" \n ", "plain", "empty", "format"),
        ("<think>\nturn left", "plain", "ends before its thoughts", "format"),
        ("\n <think>turn left", "plain", "ends before its thoughts", "format"),
        ("<think>maybe <action>turn left</action>", "tags", "ends before its thoughts", "format"),
        ("<think>maybe <action>turn left</action></think> no", "tags", "no action in the format 'tags'", "format"),
        (r"<think>so \boxed{turn left}", "boxed", "ends before its thoughts", "format"),
        (r"<think>so \boxed{turn left}</think>", "boxed", "no action in the format 'boxed'", "format"),
        ("<action>turn left</action><think>or", "tags", "ends before its thoughts", "format"),
        ("fly", "plain", "not an admissible action: 'fly'", "admissible"),
        ("turn left", "tags", "no action in the format 'tags'", "format"),
        ("<action>turn left", "tags", "no action", "format"),
        ("</action>turn left<action>", "tags", "no action", "format"),
        ("<action> </action>", "tags", "empty", "format"),
        (r"\boxed{turn left", "boxed", "no action", "format"),
    ],
)
def test_not_found(text, fmt, reason, kind):
    parsed = parse_action(text, fmt, WORDS)
    assert (parsed.action, parsed.valid, parsed.kind) == (None, False, kind)
    assert reason in parsed.reason


def test_without_a_list_every_action_is_taken_as_it_is():
    code = "for i in range(3):\n    print(i,  'x')"
    assert parse_action(f"<action>\n{code}\n</action>", "tags", None) == ParsedAction(code)


# Every character that Python's text can hold, half surrogate pairs included.
@given(st.text(st.characters()), st.sampled_from(sorted(FORMATS)), st.sampled_from([None, WORDS]))
def test_never_raises(text, fmt, admissible):
    parsed = parse_action(text, fmt, admissible)
    assert parsed.valid == (parsed.action is not None) == (parsed.reason is None)
    assert (parsed.action or "").encode("utf-8") is not None  # what it takes to travel


PIECES = ["a", " ", "{", "<action>", "</action>", "<action> </action>", "<think>", "\\boxed{"]
PIECES += ["\x00\x1b[2J", "é☃\u202e"]


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_100_kb(piece, fmt):
    started = time.thread_time()
    parsed = parse_action(piece * (100_000 // len(piece)), fmt, WORDS)
    assert time.thread_time() - started < 0.5
    assert not parsed.valid
    assert len(parsed.reason) < 600


def test_unknown_format():
    with pytest.raises(ValueError, match="did you mean 'tags'"):
        load_parser("tag")


def test_every_format_has_an_instruction_that_it_understands():
    assert INSTRUCTIONS.keys() == {*FORMATS, *CALLS}
    assert parse_action("<think>a</think> <action>turn left</action>", "tags", WORDS).valid
    for fmt, sign in (("tags", "<action> </action>"), ("boxed", "\\boxed{")):
        assert sign in INSTRUCTIONS[fmt]


def test_an_answer_is_an_action_or_a_reason():
    for arguments in ((None,), ("go", "no reason")):
        with pytest.raises(ValueError, match="an action or the reason"):
            ParsedAction(*arguments)


# --- a function of one's own ------------------------------------------------------------------------------------------
OWN = """
from verl_turnkey.envs.prompting.actions import ParsedAction

def alone(text):
    return text


def letter(text, admissible):
    if text == "?":
        return None
    if text == "forbidden":
        return ParsedAction(None, "do not say that", "admissible")
    if text == "anything":
        return ParsedAction("anything")
    return {"l": "TURN left", "x": "fly", "": "", "3": 3}[text]

NUMBER = 1
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_parser.py"
    path.write_text(OWN)
    return str(path)


@pytest.mark.parametrize(
    ("text", "action", "reason", "kind"),
    [
        ("l", "turn left", None, "format"),
        ("anything", "anything", None, "format"),  # its word is final
        ("?", None, "no action in the format", "format"),
        ("", None, "empty", "format"),
        ("x", None, "not an admissible action: 'fly'", "admissible"),
        ("forbidden", None, "do not say that", "admissible"),
        ("what?", None, "own_parser.py:letter raised KeyError: 'what?'", "format"),
        ("3", None, "must return text, None or a ParsedAction, not int", "format"),
    ],
)
def test_a_parser_of_ones_own(own, text, action, reason, kind):
    parsed = load_parser(f"{own}:letter")(text, WORDS)
    assert (parsed.action, parsed.kind) == (action, kind)
    assert reason in parsed.reason if reason else parsed.reason is None


def test_a_dotted_module_works_too():
    assert load_parser("os.path:join")("a", ["b"]).reason.startswith("os.path:join raised TypeError")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_package.parser:act", "No module named 'no_such_package'"),
        ("{own}:leter", "did you mean 'letter'"),
        ("{own}:alone", "parser.py:alone: expected a function of (text, admissible), got one of (text)"),
        ("{own}:NUMBER", "NUMBER is a int, not a function"),
        ("/no/such/file.py:act", "there is no file /no/such/file.py"),
        (":act", "there is no colon"),
    ],
)
def test_a_function_that_is_not_there_names_the_key(own, path, words):
    with pytest.raises(ModuleImportError) as error:
        load_parser(path.format(own=own))
    assert "turnkey.rollout.action_format" in str(error.value)
    assert words in str(error.value)


QWEN = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<tool_call></tool_call><tool_response>"


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>", chat_template=template)
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<table>", "go", "\n\n"]
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return made


def test_added_tokens_that_the_template_writes_or_that_mark_thoughts_become_plain():
    made = tokenizer(QWEN)
    control = ControlTokens(made)
    for token in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_end|>"):
        assert control.plain(f"a{token}b") == f"a{token[0]} {token[1:]}b"
        assert made.convert_tokens_to_ids(token) not in made.encode(control.plain(token))


def test_words_and_tags_of_html_stay():
    text = "<table> go\n\n <td>"
    assert ControlTokens(tokenizer(QWEN)).plain(text) == text
    assert ControlTokens(tokenizer(None)).plain("<tool_call>") == "<tool_call>"  # this model has no such message


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
