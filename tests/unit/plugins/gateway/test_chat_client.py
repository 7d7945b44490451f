"""Chat Completions, as OpenAI's client sends and reads them."""

from __future__ import annotations

import json

import openai
import pytest
from scripted_api import CALL, CALLS, CUT, EMPTY, ERRORS, ONE, REPLIES, THOUGHT, TOKENS, WEATHER, ScriptedApi

from verl_turnkey.plugins.gateway.dialects import Chat
from verl_turnkey.plugins.gateway.messages import Message, Reply, ToolCall

ASK = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}]


def ask(api: ScriptedApi, **parameters):
    return api.openai().chat.completions.create(**{"model": "policy", "messages": ASK, **parameters})


def test_a_reply_of_text():
    api = ScriptedApi(Chat(), [ONE])
    answer = ask(api, max_tokens=9, max_completion_tokens=5, stop="END")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello.", "stop")
    assert choice.message.tool_calls is None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert (answer.id, answer.model, answer.object) == ("chatcmpl-e1_0", "policy", "chat.completion")
    request = api.requests[0]
    assert request.messages == (Message("user", "Weather?"),)
    assert (request.model, request.max_tokens, request.stop, request.stream) == ("policy", 5, ("END",), False)
    assert request.overruled == ()


def test_parallel_calls_are_answered_and_come_back():
    api = ScriptedApi(Chat(), [CALLS, ONE])
    message = ask(api, tools=TOOLS).choices[0].message
    assert message.content == "I ask."
    assert message.reasoning_content == "Two of them."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Bern"}, {"city": "Genf"}]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls]
    history = [*ASK, message.model_dump(exclude_none=True), *results]
    ask(api, messages=history, tools=TOOLS)
    first, second = api.requests
    assert first.tools == tuple(TOOLS)
    assert second.messages == (
        Message("user", "Weather?"),
        Message("assistant", "I ask.", CALLS.calls, "Two of them."),
        Message("tool", "sun", call_id="call_e1_3_0"),
        Message("tool", "sun", call_id="call_e1_3_1"),
    )


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply.id)
def test_a_stream_adds_up_to_the_reply(reply: Reply):
    api = ScriptedApi(Chat(), [reply, reply])
    whole = ask(api, logprobs=True).model_dump()
    stream = api.openai().chat.completions.stream(
        model="policy", messages=ASK, logprobs=True, stream_options={"include_usage": True}
    )
    with stream as events:
        kinds = {event.type for event in events}
        choice = events._state.current_completion_snapshot.choices[0].model_dump()
        usage = events._state.current_completion_snapshot.usage.model_dump()
    assert "chunk" in kinds
    expected = whole["choices"][0]
    for name in ("content", "role", "reasoning_content"):
        assert (choice["message"].get(name) or "") == (expected["message"].get(name) or ""), name
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls") or []
    ]
    assert calls == [(call.id, call.name, json.dumps(dict(call.arguments), ensure_ascii=False)) for call in reply.calls]
    assert choice["finish_reason"] == expected["finish_reason"]
    assert (choice.get("logprobs") or {}).get("content") == (expected.get("logprobs") or {}).get("content")
    assert usage == whole["usage"]
    assert [request.include_usage for request in api.requests] == [False, True]


def test_a_stream_without_usage_has_none():
    api = ScriptedApi(Chat(), [CALL])
    chunks = list(ask(api, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_reply_that_was_cut_and_one_of_calls_and_an_empty_one():
    api = ScriptedApi(Chat(), [CUT, CALL, EMPTY, THOUGHT])
    assert ask(api).choices[0].finish_reason == "length"
    choice = ask(api).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert ask(api).choices[0].message.content == ""
    assert ask(api).choices[0].message.reasoning_content == "Which city?\n"


def test_log_probabilities_of_the_sampled_tokens():
    content = ask(ScriptedApi(Chat(), [TOKENS]), logprobs=True).choices[0].logprobs.content
    assert [(token.token, token.logprob, bytes(token.bytes).decode()) for token in content] == [
        ("a", -0.5, "a"),
        (" é", -1.25, " é"),
    ]


def test_errors_reach_the_agent_with_our_words():
    api = ScriptedApi(Chat(), ERRORS)
    with pytest.raises(openai.NotFoundError, match="the episode has ended"):
        ask(api)
    with pytest.raises(openai.BadRequestError, match="maximum context length: the prompt has 4100") as caught:
        ask(api)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError, match="weights change"):
        ask(api)


def test_what_clients_make_of_messages():
    api = ScriptedApi(Chat(), [ONE])
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"n": 1.0}'}}],
            "reasoning": "so",
        },
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "ok"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "y", "type": "function", "function": {"name": "g", "arguments": ""}},
                {"id": "z", "type": "function", "function": {"name": "h", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "y", "content": ""},
    ]
    ask(api, messages=messages)
    assert api.requests[0].messages == (
        Message("system", "Be brief."),
        Message("user", "a\nb"),
        Message("assistant", "", (ToolCall("f", {"n": 1.0}, "x"),), "so"),
        Message("tool", "ok", call_id="x"),
        Message("assistant", "", (ToolCall("g", {}, "y"), ToolCall("h", {"_raw": "{broken"}, "z"))),
        Message("tool", "", call_id="y"),
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"role": "function", "content": ""}], r"messages\[0\].role: expected one of system, developer, .*'function'"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].tool_call_id: expected a string, got NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: expected text or a list, got int"),
        ([*ASK, {"role": "assistant", "content": "The"}], "the last message is the assistant's"),
    ],
)
def test_malformed_messages(messages, words):
    with pytest.raises(openai.BadRequestError, match=words):
        ask(ScriptedApi(Chat(), [ONE]), messages=messages)


@pytest.mark.parametrize("sent", [{"max_tokens": 0}, {"max_tokens": True}, {"stop": 3}, {"tools": "none"}])
def test_malformed_parameters(sent):
    with pytest.raises(openai.BadRequestError, match=next(iter(sent))):
        ask(ScriptedApi(Chat(), [ONE]), **sent)
