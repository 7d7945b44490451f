"""Conversations through each of verl's continuous-token builders, on tokenizers that are built here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from families import DEEPSEEK, DEFAULT, FAMILIES, GLM, GPT_OSS, MINIMAX, QWEN, REAL, TOOL_CALLERS, Family
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import PromptTooLongError
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import Call, ControlTokens, ParsedAction
from verl_turnkey.envs.prompting.prompts import SUMMARY_REQUEST, Examples, PromptTurn, Summarize, later_template
from verl_turnkey.plugins.config.schema import RolloutConfig, load_examples
from verl_turnkey.plugins.rollout.action_reader import ACT
from verl_turnkey.plugins.rollout.episode import Generated, Prompt
from verl_turnkey.plugins.rollout.prompts import ConversationPrompts, PromptSettings
from verl_turnkey.plugins.rollout.turn_tail import ASKED, learn
from verl_turnkey.plugins.verl_api import builders
from verl_turnkey.plugins.verl_api.builders import BY_TYPE, builder_of

TEMPLATE = "Do {task}\nBefore: {summary}\n\nSeen (step {step}): {observation}\nPossible: {admissible}\n{format}"


class Talk:
    """A conversation of a family, with the texts of what was said and seen so far."""

    def __init__(
        self,
        family: Family,
        *,
        tools: bool = False,
        prompt: int = 4000,
        response: int = 4000,
        summarize: Summarize | None = None,
        examples: Sequence[dict[str, Any]] = (),
        **options: Any,
    ):
        self.family, self.tokenizer = family, family.tokenizer()
        data = {"data": {"apply_chat_template_kwargs": family.kwargs}}
        builder = builder_of(OmegaConf.create(data), self.tokenizer, None, family.model_type)
        assert type(builder).__name__ == family.builder or not BY_TYPE
        options = {"max_tokens_per_turn": 40, "action_format": "json" if tools else "plain", **options}
        config = RolloutConfig(prompt="conversation", **options)
        schemas = [ACT] if tools else None
        self.tail = learn(builder, self.tokenizer, schemas, config.observation_role)
        settings = PromptSettings(
            options=config,
            template=TEMPLATE,
            summarize=summarize,
            instruction="Answer.",
            tools=schemas,
            builder=builder,
            control=ControlTokens(self.tokenizer),
            prompt_length=prompt,
            response_length=response,
            examples=Examples(load_examples(examples), config.action_format, TEMPLATE, "Answer.", conversation=True),
            marks_observations=True,
        )
        self.prompts = ConversationPrompts(settings, "it", self.tail)
        self.built: list[Prompt] = []
        self.sampled: list[list[int]] = []

    def see(self, text: str) -> str:
        """The prompt that shows an observation, as text."""
        self.built.append(self.prompts.next(Answer(text, {"admissible": None}), None))
        return self.text(-1)

    def say(self, text: str, called: bool = False) -> None:
        """What the model samples, with its control tokens; ``called``: it is a tool call."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.sampled.append(ids)
        turn = Generated(ids, None, self.tokenizer.decode(ids, skip_special_tokens=True), {}, -1, 0.0)
        content = text.removesuffix(self.family.stop)
        self.prompts.heard(turn, ParsedAction("go") if called else ParsedAction(None, "no action", content=content))

    def observed(self, t: int) -> list[str]:
        """The spans of prompt ``t`` that are marked as an observation's, as text without the whitespace around them."""
        ids = self.built[t].ids
        spans = self.built[t].observed or ()
        return [self.tokenizer.decode(ids[len(ids) + first : len(ids) + end]).strip() for first, end in spans]

    def text(self, t: int) -> str:
        return self.tokenizer.decode(self.built[t].ids)

    def extends(self) -> list[bool]:
        """Of each prompt but the first: whether the one before and its turn are, id by id, its beginning."""
        whole = [prompt.ids + ids for prompt, ids in zip(self.built, self.sampled, strict=False)]
        return [later.ids[: len(ids)] == ids for ids, later in zip(whole, self.built[1:], strict=False)]


def later(step: int, text: str) -> str:
    return f"Seen (step {step}): {text}"


each_family = pytest.mark.parametrize("name", FAMILIES)
ALL = FAMILIES | REAL
each_of_all = pytest.mark.parametrize("name", ALL)


@each_family
def test_three_turns_as_the_template_writes_them(name):
    family = FAMILIES[name]
    talk = Talk(family)
    first = talk.see("a room")
    assert "Do it\n\nSeen (step 1): a room\nAnswer." in first
    expected = first
    for step, answer in ((2, "go north"), (3, "look"), (4, "go")):
        talk.say(answer + family.stop)
        end = family.end if family.stop not in family.end else family.end.removeprefix(family.stop)
        closed = "" if family.model_type == "gpt_oss" else end
        expected += (
            (answer + family.stop).removesuffix(family.removed) + closed + family.user % later(step, f"room {step}")
        )
        assert talk.see(f"room {step}") == expected
    assert talk.extends() == [True] * 3
    assert [prompt.broke for prompt in talk.built] == [None] * 4


@each_of_all
def test_the_tokens_of_an_observation_are_marked(name):
    talk = Talk(ALL[name])
    talk.see("a room")
    # "Seen" and "user" are words of the prompt's template and of some chat templates.
    texts = ["two rooms and a door", "Seen", " door 2, ünlocked\nand a room ", "user", "is", "s"]
    texts += ["Ein Tür-Schloß \u2014 日本語 🚪", "  <b>two</b>\n\nlines  "]
    for text in texts:
        talk.say("go north" + talk.family.stop)
        talk.see(text)
    assert [talk.observed(t) for t in range(9)] == [[], *([text.strip()] for text in texts)]


EXAMPLES = [
    {"observation": "a wall", "action": "turn left"},
    {"observation": "a door", "action": "open the door"},
    {"task": "another task", "observation": "a cat", "action": "stroke the cat"},
]


@each_family
def test_example_turns_stand_before_the_first_message(name):
    family = FAMILIES[name]
    talk = Talk(family, examples=EXAMPLES, system="Be brief.")
    first = talk.see("a room")
    parts = ["Be brief.", "Do it\n\nSeen (step 1): a wall\nAnswer.", "turn left", "Seen (step 2): a door"]
    parts += ["open the door", "Do another task\n\nSeen (step 1): a cat\nAnswer.", "stroke the cat"]
    parts += ["Do it\n\nSeen (step 1): a room\nAnswer."]
    places = [first.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    for step, answer in ((2, "go north"), (3, "look")):
        talk.say(answer + family.stop)
        assert talk.see(f"room {step}").startswith(first)
    assert talk.extends() == [True] * 2


def test_examples_with_tool_calls_are_text():
    talk = Talk(QWEN, tools=True, examples=EXAMPLES[:1])
    first = talk.see("a room")
    assert first.index("Observation: a wall\nCall of act: turn left") < first.index("Do it\n\nSeen (step 1): a room")


def test_examples_are_part_of_the_budget():
    long = {"observation": "a wall " * 300, "action": "turn left"}
    Talk(QWEN, prompt=200).see("a room")
    with pytest.raises(PromptTooLongError, match="its examples"):
        Talk(QWEN, prompt=200, examples=[long]).see("a room")


def test_examples_stay_when_the_first_turns_are_dropped():
    talk = Talk(QWEN, examples=EXAMPLES[:1], when_full="drop_oldest", response=150, prompt=400)
    talk.see("a room")
    for step in range(2, 12):
        talk.say("go north" + QWEN.stop)
        prompt = talk.see(f"room {step}")
    assert "full" in {prompt.broke for prompt in talk.built}
    assert "Seen (step 1): a wall" in prompt


@each_of_all
@pytest.mark.parametrize("cut", ["go nor", "", "thinking"])
def test_a_turn_that_was_cut_is_closed(name, cut):
    """By max_tokens or a stop string, also before its first token, and inside its thoughts."""
    family = ALL[name]
    talk = Talk(family)
    expected = talk.see("a room")
    begin, end = family.thoughts
    prefilled = expected.rstrip().endswith(begin)
    answer = {"thinking": "I am" if prefilled else f"{begin}I am"}.get(cut, cut)
    talk.say(answer)
    close = end if prefilled or cut == "thinking" else ""
    close = "" if family.model_type == "gpt_oss" else close  # its thoughts end as its turns do
    expected += answer + close + family.end + family.user % later(2, "b")
    assert talk.see("b") == expected
    talk.say(f"go{family.stop}")
    talk.see("c")
    assert talk.extends() == [True, True]


@each_family
def test_observations_as_messages_of_a_tool(name):
    family = FAMILIES[name]
    talk = Talk(family, tools=True)
    expected = talk.see("a room")
    assert '"act"' in expected
    for step in (2, 3, 4):
        talk.say(family.call, called=True)
        answer = family.call.removesuffix("<|observation|>") if family.removed else family.call
        expected += answer + family.call_end + family.tool % later(step, f"room {step}")
        assert talk.see(f"room {step}") == expected
    talk.say(f"I am done{family.stop}")  # what is no call is answered by a user
    expected += f"I am done{family.stop}".removesuffix(family.removed)
    expected += "" if family.model_type == "gpt_oss" else family.end.removeprefix(family.stop)
    assert talk.see("x") == expected + family.user % later(5, "x")
    assert talk.extends() == [True] * 4


@each_family
def test_observations_of_tool_calls_as_messages_of_a_user(name):
    talk = Talk(FAMILIES[name], tools=True, observation_role="user")
    talk.see("a room")
    talk.say(FAMILIES[name].call, called=True)
    assert talk.see("b").endswith(FAMILIES[name].user % later(2, "b"))
    kept = name != "glm"  # its call ends with the token that begins a tool's message
    assert talk.extends() == [kept]
    assert talk.built[1].broke == (None if kept else "boundary")


@each_family
def test_thoughts_are_dropped_where_asked(name):
    family = FAMILIES[name]
    begin, end = family.thoughts
    talk = Talk(family, thinking="drop")
    first = talk.see("a room")
    prefilled = first.rstrip().endswith(begin.rstrip())
    talk.say(f"{'' if prefilled else begin}I am{end}go{family.stop}")
    second = talk.see("b")
    assert talk.extends() == [False]
    assert talk.built[1].broke == "thinking"
    head = first.rstrip().removesuffix(begin) if prefilled else first
    assert second.startswith(f"{head}go")
    assert "I am" not in second
    assert second.endswith(family.user % later(2, "b"))
    if not prefilled:  # there was nothing to drop
        talk.say(f"go{family.stop}")
        talk.see("c")
        assert talk.extends() == [False, True]
        assert talk.built[2].broke is None
    talk.say(begin * (not prefilled) + "never to end")
    assert "never to end" not in talk.see("d")


def test_what_was_sampled_stays_as_it_was_sampled():
    """Ids that no encoding of their text would give, and a stop string that ends inside an id."""
    talk = Talk(QWEN)
    talk.tokenizer.add_tokens(["international", "Action:stop\n\nObs"])
    talk.see("a room")
    ids = [talk.tokenizer.encode(part)[0] for part in "international"] + talk.tokenizer.encode("Action:stop\n\nObs")
    assert len(ids) == 14
    talk.prompts.heard(Generated(ids, None, "", {}, -1, 0.0), ParsedAction("go"))
    talk.sampled.append(ids)
    talk.see("b")
    assert talk.extends() == [True]


# --- a full context ---------------------------------------------------------------------------------------------------


def play(talk: Talk, turns: int, answer: str = "go", seen: Callable[[int], str] = "room {}".format) -> int:
    """Turns of an episode until it is full; how many there were."""
    talk.see(seen(0))
    for t in range(1, turns):
        talk.say(answer + talk.family.stop)
        try:
            talk.see(seen(t))
        except PromptTooLongError:
            return t
    return turns


@each_family
def test_no_turn_begins_without_room_for_it(name):
    talk = Talk(FAMILIES[name], response=400)
    turns = play(talk, 50)
    assert 2 < turns < 50
    longest, fresh = len(talk.built[-1].ids), len(talk.built[0].ids)
    assert longest - fresh + 40 <= 400
    step = longest - len(talk.built[-2].ids)
    assert longest - fresh + step + 40 > 400 - 4  # the numbers of later steps are longer


@each_family
def test_the_oldest_turns_are_dropped_many_at_a_time(name):
    talk = Talk(FAMILIES[name], prompt=700, response=700, when_full="drop_oldest")
    assert play(talk, 50) == 50
    broke = [prompt.broke for prompt in talk.built]
    full = [t for t in range(50) if broke[t] == "full"]
    assert 1 < len(full) < 50 / 3
    assert talk.extends() == [reason is None for reason in broke[1:]]
    fresh = 0
    for t, prompt in enumerate(talk.built):
        if t in (0, *full):
            fresh = len(prompt.ids)
            assert fresh <= 700 / (1 if t == 0 else 2)
        assert len(prompt.ids) - fresh + 40 <= 700
        text = talk.text(t)
        assert text.count("Do it") == 1
        assert f"(step {t + 1}): room {t}" in text
    first = talk.text(full[0])
    kept = [t for t in range(50) if re.search(rf": room {t}(?!\d)", first)]
    assert kept == list(range(kept[0], full[0] + 1))  # the last ones, whole
    assert f"Do it\n\nSeen (step {kept[0] + 1}): room {kept[0]}" in first


def test_a_summary_of_the_turns_that_were_dropped():
    def seen(turns: Sequence[PromptTurn]) -> str:
        return " ".join(f"<{turn.observation}>" for turn in turns)

    talk = Talk(QWEN, prompt=700, response=700, when_full="drop_oldest", summarize=seen)
    assert play(talk, 20) == 20
    assert "Before" not in talk.text(0)
    text = talk.text(next(t for t, prompt in enumerate(talk.built) if prompt.broke == "full"))
    dropped = text.split("Before: ")[1].split("\n")[0]
    number = dropped.count("<")
    assert dropped == " ".join(f"<room {t}>" for t in range(number))
    assert f"Seen (step {number + 1}): room {number}" in text
    assert text.count("Seen (step") > 1


@pytest.mark.parametrize("name", ["minimax", "qwen"])
def test_dropping_thoughts_and_turns_together(name):
    family = FAMILIES[name]
    talk = Talk(family, prompt=700, response=500, when_full="drop_oldest", thinking="drop")
    begin, end = family.thoughts
    answer = ("" if name == "minimax" else begin) + f"I am{end}go"
    assert play(talk, 30, answer) == 30
    assert {prompt.broke for prompt in talk.built[1:]} == {"thinking", "full"}
    for prompt, text in zip(talk.built, map(talk.text, range(30)), strict=True):
        assert len(prompt.ids) + 40 <= 700 + 500
        assert "I am" not in text
        assert text.count(begin) == (1 if name == "minimax" else 0)


def summarized(talk: Talk, turns: int, answer: str, called: bool = False) -> list[int]:
    """Turns of an episode whose summaries say how many rooms were seen; the prompts that ask for one."""
    requests = []
    for t in range(turns):
        text = talk.see(f"room {t}")
        if talk.built[-1].request is not None:
            requests.append(len(talk.built) - 1)
            assert f"room {t}" not in text
            assert text.count(SUMMARY_REQUEST) == 1
            assert talk.observed(-1) == []
            talk.say(f" {t} rooms. " + talk.family.stop)
            text = talk.see(f"room {t}")
            assert f"Do it\nBefore: {t} rooms.\n\nSeen (step {t + 1}): room {t}" in text
            assert talk.built[-1].broke == "full"
        assert re.findall(r"\(step (\d+)\): room (\d+)", text)[-1] == (str(t + 1), str(t))
        assert SUMMARY_REQUEST not in text
        talk.say(answer + talk.family.stop, called)
    return requests


@each_family
@pytest.mark.parametrize("thinking", ["keep", "drop"])
def test_a_full_conversation_goes_on_with_the_models_summary(name, thinking):
    family = FAMILIES[name]
    talk = Talk(family, prompt=700, response=900, when_full="summarize", thinking=thinking)
    begin, end = family.thoughts
    answer = "go" if thinking == "keep" else ("" if name == "minimax" else begin) + f"I am{end}go"
    requests = summarized(talk, 60, answer)
    assert 1 < len(requests) < 15
    fresh = [0, *(t + 1 for t in requests)]
    assert [t for t, prompt in enumerate(talk.built) if prompt.broke == "full"] == fresh[1:]
    if thinking == "keep":
        assert talk.extends() == [prompt.broke is None for prompt in talk.built[1:]]
    for start, after in zip(fresh, [*fresh[1:], len(talk.built)], strict=True):
        longest = max(len(prompt.ids) for prompt in talk.built[start:after])
        assert longest - len(talk.built[start].ids) + 40 <= 900


def test_the_last_turn_is_not_a_summary():
    talk = Talk(QWEN, prompt=700, response=900, when_full="summarize")
    for t in range(60):
        before = talk.prompts.fork()
        talk.see(f"room {t}")
        if talk.built[-1].request is not None:
            break
        talk.say("go" + QWEN.stop)
    assert talk.built[-1].request is not None
    prompt = before.next(Answer(f"room {t}", {"admissible": None}), None, last=True)
    assert prompt.request is None
    assert f"room {t}" in talk.tokenizer.decode(prompt.ids)


def test_a_summary_without_room_loses_its_end():
    talk = Talk(QWEN, prompt=200, response=900, when_full="summarize")
    for t in range(60):
        talk.see(f"room {t}")
        if talk.built[-1].request is not None:
            talk.say("begins " + "word " * 60 + "ends" + QWEN.stop)
            text = talk.see(f"room {t}")
            break
        talk.say("go" + QWEN.stop)
    assert "Before: begins word" in text
    assert "ends" not in text
    assert f"room {t}" in text
    assert 100 < len(talk.built[-1].ids) <= 200


@pytest.mark.parametrize("name", TOOL_CALLERS)
def test_a_summary_is_asked_of_the_model_after_a_tool_call(name):
    talk = Talk(ALL[name], tools=True, prompt=2000, response=800, when_full="summarize")
    assert summarized(talk, 60, "go", called=True)
    assert talk.extends() == [prompt.broke is None for prompt in talk.built[1:]]


@pytest.mark.parametrize("when_full", ["end", "drop_oldest"])
def test_a_huge_observation(when_full):
    with pytest.raises(PromptTooLongError, match=r"data\.max_prompt_length allows 300"):
        Talk(QWEN, prompt=300, response=300, when_full=when_full).see("x" * 400)
    talk = Talk(QWEN, prompt=300, response=300, when_full=when_full)
    assert play(talk, 9, seen=lambda t: "x" * 400 if t == 1 else "room") == 1
    # One that fits alone, but not behind the turns before it.
    talk = Talk(QWEN, prompt=300, response=200, when_full=when_full)
    assert play(talk, 3, seen=lambda t: "x" * 180 if t == 1 else "room") == (1 if when_full == "end" else 3)


# --- what cannot work is refused --------------------------------------------------------------------------------------


def refused(family: Family, template: str, tools: bool = False, **options: Any) -> str:
    changed = Family(**{**vars(family), "template": template})
    with pytest.raises(ConfigError) as error:
        Talk(changed, tools=tools, **options)
    return str(error.value)


def each_message(guard: str, error: str) -> str:
    """DEFAULT's template with a refusal of messages."""
    head = "{%- for m in messages %}"
    raised = f"{{%- if {guard} %}}{{{{ raise_exception('{error}') }}}}{{%- endif %}}"
    return str(DEFAULT.template).replace(head, head + raised)


def test_a_template_whose_roles_must_alternate_goes_on():
    guard = "m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user'"
    changed = Family(**{**vars(DEFAULT), "template": each_message(guard, "roles must alternate")})
    talks = [Talk(family) for family in (DEFAULT, changed)]
    for talk in talks:
        for seen in ("a room", "b"):
            talk.see(seen)
            talk.say("go" + DEFAULT.stop)
    assert talks[0].text(1) == talks[1].text(1)


def test_templates_that_cannot_go_on_are_refused_by_name():
    template = str(DEFAULT.template)
    text = refused(DEFAULT, each_message("m.role == 'user' and not loop.first", "one question"))
    assert "the model's chat template refuses the messages user, assistant, user" in text
    assert "one question" in text
    assert text.endswith("set turnkey.rollout.prompt=template")
    after_a_turn = "('!' if not loop.first and messages[loop.index0 - 1].role == 'assistant' else '')"
    text = refused(
        DEFAULT, template.replace("+ m.content + '<|im_end|>", f"+ m.content + {after_a_turn} + '<|im_end|>")
    )
    assert "and this model's chat template writes" in text
    no_tool = template.replace("{%- else %}", "{%- else %}{{ raise_exception('no tools here') }}", 1)
    text = refused(DEFAULT, no_tool, tools=True, observation_role="tool")
    assert "no tools here" in text
    assert "set turnkey.rollout.observation_role=user" in text
    changed = Family(**{**vars(DEFAULT), "template": no_tool})
    talk = Talk(changed, tools=True)  # auto: as a user then
    talk.see("a")
    talk.say(DEFAULT.call, called=True)
    assert talk.see("b").endswith(DEFAULT.user % later(2, "b"))


def test_a_builder_that_would_rewrite_the_past_is_refused():
    family = FAMILIES["deepseek v4"]
    dropping = Family(**{**vars(family), "kwargs": {"enable_thinking": True}})
    with pytest.raises(ConfigError, match="or set drop_thinking"):
        Talk(dropping)


def test_tails():
    def tail_of(family: Family, **options: Any) -> tuple[str, str | None]:
        talk = Talk(family, **options)
        tool = None if talk.tail.tool is None else talk.tokenizer.decode(talk.tail.tool)
        return talk.tokenizer.decode(talk.tail.user), tool

    assert tail_of(QWEN) == ("<|im_end|>\n", None)
    assert tail_of(QWEN, tools=True) == ("<|im_end|>\n", "<|im_end|>\n")
    assert tail_of(GLM, tools=True) == ("", "")
    assert tail_of(DEEPSEEK, tools=True) == (DEEPSEEK.stop, DEEPSEEK.stop)
    assert tail_of(MINIMAX) == ("[e~[\n", None)
    assert tail_of(GPT_OSS, tools=True) == ("<|end|>", "")
    assert tail_of(FAMILIES["gemma"], tools=True) == ("<turn|>\n", "")


def test_the_template_of_later_messages():
    assert later_template(TEMPLATE) == "Seen (step {step}): {observation}\nPossible: {admissible}"


@each_family
def test_control_tokens_of_the_environment_are_plain_text(name):
    family = FAMILIES[name]
    talk = Talk(family)
    evil = "".join(family.special)
    for t in range(2):
        before = len(talk.built[-1].ids) + len(talk.sampled[-1]) if t else 0
        talk.see("harmless")
        control = [i for i in talk.built[-1].ids[before:] if i in talk.tokenizer.added_tokens_decoder]
        again = Talk(family)
        if t:
            again.see("harmless")
            again.say("go" + family.stop)
        again.see(evil)
        assert [i for i in again.built[-1].ids[before:] if i in talk.tokenizer.added_tokens_decoder] == control
        talk.say("go" + family.stop)


# --- messages with the results of a turn's calls ----------------------------------------------------------------------

CALLERS = {**FAMILIES, **{name: REAL[name] for name in TOOL_CALLERS}}
ONE_CALL = ("Llama 3.1 with tools",)
"""whose template refuses a second call in a turn"""
each_caller = pytest.mark.parametrize("name", CALLERS)


class Calls(Talk):
    """A conversation of calls. What the model samples is a placeholder, which stands for calls of ``act``."""

    def call(self, results: list[str]) -> list[int]:
        """The ids that follow a turn with a call per result."""
        end = "</think>" if self.tail.opened else ""
        ids = self.tokenizer.encode(f"{end}go", add_special_tokens=False)
        turn = Generated(ids, None, "go", {}, -1, 0.0)
        self.sampled.append(ids)
        calls = tuple(Call("act", {"action": "go"}) for _ in results)
        self.prompts.heard(turn, ParsedAction("{}", calls=calls))
        answers = [{"content": result, "is_error": False} for result in results]
        self.built.append(self.prompts.next(Answer("a room", {"admissible": None, "results": answers}), None))
        return self.built[-1].ids[len(self.built[-2].ids) + len(ids) :]


def calling(name: str, **options: Any) -> Calls:
    made = Calls(CALLERS[name], tools=True, **{"action_format": "tools", **options})
    made.see("a room")
    return made


def whole(made: Calls, results: list[str], *after: dict[str, Any]) -> list[int]:
    """As the template renders the calls and their results."""
    builder = made.prompts._settings.builder
    arguments: Any = json.dumps({"action": "go"}) if made.tail.text_arguments else {"action": "go"}
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "act", "arguments": arguments}}
        for n in range(len(results))
    ]
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [
        {"role": "tool", "name": "act", "tool_call_id": f"call0000{n}", "content": result}
        for n, result in enumerate(results)
    ]
    return builders.first_tokens(builder, [*messages, *after], [ACT])


RESULTS = ["Zurich is sunny", 'a "É" 日本\n\nroom', "<b>3</b>"]


@each_caller
@pytest.mark.parametrize("k", [1, 2, 3])
def test_results_are_appended_as_the_template_writes_them(name, k):
    made = calling(name)
    assert made.tail.parallel == (name not in ONE_CALL)
    for _ in range(2):
        after = made.call(RESULTS[:k])
        text = made.tokenizer.decode(after)
        quoted = [result if result in text else json.dumps(result, ensure_ascii=False)[1:-1] for result in RESULTS[:k]]
        places = [text.find(result) for result in quoted]
        assert -1 not in places
        assert places == sorted(places)
        if k == 1 or made.tail.parallel:
            assert whole(made, RESULTS[:k])[-len(after) :] == after
    assert made.extends() == [True, True]
    assert [prompt.broke for prompt in made.built] == [None] * 3


NOT_AFTER_A_TOOL = ("deepseek", "gemma")
"""where verl's builder and the template differ between a result and a user's message"""


@each_caller
def test_a_user_may_speak_after_a_result(name):
    made = calling(name)
    builder, past = made.prompts._settings.builder, [ASKED, made.tail.turn("tool")]
    result = {"role": "tool", "name": "act", "tool_call_id": "call_act0", "content": "r"}
    user = {"role": "user", "content": "and?"}
    appended = builders.appended_tokens(builder, past, [*past, result, user], [], [ACT])
    assert (whole(made, ["r"], user)[-len(appended) :] == appended) == (name not in NOT_AFTER_A_TOOL)


def test_calls_have_the_ids_of_the_model_or_ones_that_every_template_takes():
    made = calling("qwen")
    made.prompts.heard(
        Generated([1], None, "", {}, -1, 0.0),
        ParsedAction("{}", calls=(Call("act", {}, "functions.act:0"), Call("look", {}))),
    )
    results = [{"content": "r", "is_error": False}] * 2
    made.prompts._seen.append(Answer("a room", {"admissible": None, "results": results}))
    made.prompts._images.append([])
    messages = made.prompts._answers(made.prompts._seen[-1])
    assert [(message["name"], message["tool_call_id"]) for message in messages] == [
        ("act", "functions.act:0"),
        ("look", "c00020001"),
    ]
    assert len(messages[1]["tool_call_id"]) == 9  # Mistral's template takes no others


def test_the_oldest_turns_are_dropped_with_their_results():
    made = calling("qwen", when_full="drop_oldest", prompt=1400, response=600)
    for n in range(5):
        made.call([f"result {n} of a call"] * 2)
    assert [prompt.broke for prompt in made.built] == [None] * 5 + ["full"]
    assert [made.text(-1).count(f"result {n} of a call") for n in range(5)] == [0, 0, 0, 2, 2]
