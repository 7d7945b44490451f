"""Anthropic's Messages, as its client sends and reads them."""

from __future__ import annotations

from dataclasses import replace

import anthropic
import pytest
from scripted_api import (
    CALL,
    CALLS,
    CUT,
    EMPTY,
    ERRORS,
    ONE,
    READ_TOOLS,
    REPLIES,
    STOPPED,
    THOUGHT,
    TURN,
    WEATHER,
    ScriptedApi,
)

from verl_turnkey.plugins.gateway.dialects import Messages
from verl_turnkey.plugins.gateway.messages import Message, Reply, ToolCall

ASK = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]


def ask(api: ScriptedApi, **parameters):
    return api.anthropic().messages.create(**{"model": "policy", "max_tokens": 20, "messages": ASK, **parameters})


def test_a_reply_of_text():
    api = ScriptedApi(Messages(), [ONE])
    answer = ask(api, system="Be brief.", stop_sequences=["END"])
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello.")]
    assert (answer.id, answer.role, answer.stop_reason) == ("msg_e1_0", "assistant", "end_turn")
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 2, 3)
    request = api.requests[0]
    assert request.messages == (Message("system", "Be brief."), Message("user", "Weather?"))
    assert (request.model, request.max_tokens, request.stop, request.stream) == ("policy", 20, ("END",), False)


def test_thoughts_and_parallel_calls_are_answered_and_come_back():
    api = ScriptedApi(Messages(), [CALLS, ONE])
    answer = ask(api, tools=TOOLS)
    thought, text, *calls = answer.content
    assert answer.stop_reason == "tool_use"
    assert (thought.thinking, thought.signature, text.text) == ("Two of them.", "e1_3", "I ask.")
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Bern"}), ("weather", {"city": "Genf"})]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "sun"}]},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no such city", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    past = [*ASK, {"role": "assistant", "content": answer.content}]
    ask(api, tools=TOOLS, messages=[*past, {"role": "user", "content": results}])
    first, second = api.requests
    assert first.tools == READ_TOOLS
    assert second.messages == (
        Message("user", "Weather?"),
        TURN,
        Message("tool", "sun", call_id="call_e1_3_0"),
        Message("tool", "no such city", call_id="call_e1_3_1", error=True),
        Message("user", "Go on."),
    )


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply.id)
def test_a_stream_adds_up_to_the_reply(reply: Reply):
    api = ScriptedApi(Messages(), [reply, reply])
    whole = ask(api)
    with api.anthropic().messages.stream(model="policy", max_tokens=20, messages=ASK) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert streamed.to_dict(exclude_none=True) == whole.to_dict(exclude_none=True)
    assert [request.stream for request in api.requests] == [False, True]


def test_why_a_reply_ends():
    api = ScriptedApi(Messages(), [CUT, CALL, EMPTY, THOUGHT, STOPPED, replace(CALL, stop="END")])
    ends = [(answer.stop_reason, answer.stop_sequence) for answer in (ask(api) for _ in range(6))]
    words = ["max_tokens", "tool_use", "end_turn", "end_turn", "stop_sequence", "tool_use"]
    assert ends == [(word, "END" if word == "stop_sequence" else None) for word in words]


def test_errors_reach_the_agent_with_our_words():
    api = ScriptedApi(Messages(), ERRORS)
    with pytest.raises(anthropic.NotFoundError, match="the episode has ended"):
        ask(api)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the prompt has 4100"):
        ask(api)
    with pytest.raises(anthropic.InternalServerError, match="weights change"):
        ask(api)


def test_what_clients_make_of_messages():
    api = ScriptedApi(Messages(), [ONE])
    cached = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    ask(
        api,
        system=[{"type": "text", "text": "a"}, cached],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
        ],
    )
    assert api.requests[0].messages == (
        Message("system", "a\nb"),
        Message("user", "c\nd"),
        Message("assistant", "", (ToolCall("f", {}, "t"),)),
        Message("tool", "", call_id="t"),
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"role": "tool", "content": ""}], r"messages\[0\].role: expected user, assistant or system, got 'tool'"),
        ([*ASK, {"role": "assistant", "content": "The"}], "the last message is the assistant's"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], "tool_use_id: expected a string, got NoneType"),
    ],
)
def test_malformed_messages(messages, words):
    with pytest.raises(anthropic.BadRequestError, match=words):
        ask(ScriptedApi(Messages(), [ONE]), messages=messages)
