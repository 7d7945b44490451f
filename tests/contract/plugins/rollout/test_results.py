"""Messages with the results of a turn's calls, for each builder family and for the templates of real models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from families import FAMILIES
from test_conversation import Talk
from test_real_tokenizers import REAL, TOOL_CALLERS

from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import Call, ParsedAction
from verl_turnkey.plugins.rollout.action_reader import ACT
from verl_turnkey.plugins.rollout.episode import Generated
from verl_turnkey.plugins.rollout.turn_tail import ASKED
from verl_turnkey.plugins.verl_api import builders

ALL = {**FAMILIES, **{name: REAL[name] for name in TOOL_CALLERS}}
ONE_CALL = ("Llama 3.1 with tools",)
"""whose template refuses a second call in a turn"""
every = pytest.mark.parametrize("name", ALL)


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


def talk(name: str, **options: Any) -> Calls:
    made = Calls(ALL[name], tools=True, **{"action_format": "tools", **options})
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


@every
@pytest.mark.parametrize("k", [1, 2, 3])
def test_results_are_appended_as_the_template_writes_them(name, k):
    made = talk(name)
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


@every
def test_a_user_may_speak_after_a_result(name):
    made = talk(name)
    builder, past = made.prompts._settings.builder, [ASKED, made.tail.turn("tool")]
    result = {"role": "tool", "name": "act", "tool_call_id": "call_act0", "content": "r"}
    user = {"role": "user", "content": "and?"}
    appended = builders.appended_tokens(builder, past, [*past, result, user], [], [ACT])
    assert (whole(made, ["r"], user)[-len(appended) :] == appended) == (name not in NOT_AFTER_A_TOOL)


def test_calls_have_the_ids_of_the_model_or_ones_that_every_template_takes():
    made = talk("qwen")
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
    made = talk("qwen", when_full="drop_oldest", prompt=1400, response=600)
    for n in range(5):
        made.call([f"result {n} of a call"] * 2)
    assert [prompt.broke for prompt in made.built] == [None] * 5 + ["full"]
    assert [made.text(-1).count(f"result {n} of a call") for n in range(5)] == [0, 0, 0, 2, 2]
