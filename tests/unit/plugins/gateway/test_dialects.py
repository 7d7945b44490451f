"""The dialects, as OpenAI's and Anthropic's clients send and read them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import yaml
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
    TOKENS,
    TURN,
    WEATHER,
    ScriptedApi,
)

from verl_turnkey.plugins.gateway.dialects import Chat, Messages, Responses
from verl_turnkey.plugins.gateway.messages import Dialect, Message, Reply, ToolCall

ASK = [{"role": "user", "content": "Weather?"}]
DIALECTS: dict[str, Dialect] = {"chat": Chat(), "responses": Responses(), "messages": Messages()}
ERROR_CLASSES: dict[str, Any] = {"chat": openai, "responses": openai, "messages": anthropic}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}]
RESPONSES_TOOLS = [
    {"type": "function", "name": "weather", "description": "of a city", "parameters": WEATHER, "strict": None}
]
MESSAGES_TOOLS = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]


def chat(api: ScriptedApi, **parameters: Any) -> Any:
    return api.openai().chat.completions.create(**{"model": "policy", "messages": ASK, **parameters})


def responses(api: ScriptedApi, **parameters: Any) -> Any:
    return api.openai().responses.create(**{"model": "policy", "input": "Weather?", **parameters})


def messages(api: ScriptedApi, **parameters: Any) -> Any:
    return api.anthropic().messages.create(**{"model": "policy", "max_tokens": 20, "messages": ASK, **parameters})


SUNNY = [Message("tool", "sun", call_id=call.id) for call in CALLS.calls]
CLIENTS = {"chat": chat, "responses": responses, "messages": messages}


# --- all dialects -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DIALECTS)
def test_errors_reach_the_agent_with_our_words(name: str):
    api, errors = ScriptedApi(DIALECTS[name], ERRORS), ERROR_CLASSES[name]
    with pytest.raises(errors.NotFoundError, match="the episode has ended"):
        CLIENTS[name](api)
    too_long = "prompt is too long" if name == "messages" else "maximum context length"
    with pytest.raises(errors.BadRequestError, match=f"{too_long}: the prompt has 4100") as caught:
        CLIENTS[name](api)
    assert name == "messages" or caught.value.code == "context_length_exceeded"
    with pytest.raises(errors.InternalServerError, match="weights change"):
        CLIENTS[name](api)


# Dialect, what is sent, words of the error.
MALFORMED = r"""
chat | {"messages": []} | no messages
chat | {"messages": [{"role": "function", "content": ""}]} | messages\[0\].role: expected one of system, developer, .*'function'
chat | {"messages": [{"role": "tool", "content": "x"}]} | messages\[0\].tool_call_id: expected a string, got NoneType
chat | {"messages": [{"role": "user", "content": 3}]} | messages\[0\].content: expected text or a list, got int
chat | {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "The"}]} | the last message is the assistant's
chat | {"max_tokens": 0} | max_tokens
chat | {"max_tokens": true} | max_tokens
chat | {"stop": 3} | stop
chat | {"tools": "none"} | tools
messages | {"messages": []} | no messages
messages | {"messages": [{"role": "tool", "content": ""}]} | messages\[0\].role: expected user, assistant or system, got 'tool'
messages | {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "The"}]} | the last message is the assistant's
messages | {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]} | tool_use_id: expected a string, got NoneType
responses | {"input": []} | no messages
responses | {"input": [{"role": "tool", "content": ""}]} | input\[0\].role: expected user, assistant, system or developer
responses | {"input": [{"type": "computer_call_output"}]} | input/computer_call_output is not supported: .* in full
responses | {"input": [{"type": "function_call_output", "output": ""}]} | input\[0\].call_id: expected a string, got NoneType
responses | {"input": 7} | input: expected a list, got int
"""  # noqa: E501


@pytest.mark.parametrize("row", MALFORMED.strip().split("\n"))
def test_malformed_requests(row: str):
    name, sent, words = row.split(" | ")
    with pytest.raises(ERROR_CLASSES[name].BadRequestError, match=words):
        CLIENTS[name](ScriptedApi(DIALECTS[name], [ONE]), **json.loads(sent))


# What the requests of tests/data/client_messages.yaml are read as.
READ: dict[str, tuple[Message, ...]] = {
    "chat": (
        Message("system", "Be brief."),
        Message("user", "a\nb"),
        Message("assistant", "", (ToolCall("f", {"n": 1.0}, "x"),), "so"),
        Message("tool", "ok", call_id="x"),
        Message("assistant", "", (ToolCall("g", {}, "y"), ToolCall("h", {"_raw": "{broken"}, "z"))),
        Message("tool", "", call_id="y"),
    ),
    "messages": (
        Message("system", "a\nb"),
        Message("user", "c\nd"),
        Message("assistant", "", (ToolCall("f", {}, "t"),)),
        Message("tool", "", call_id="t"),
    ),
    "responses": (
        Message("system", "a"),
        Message("user", "b"),
        Message("assistant", "", (ToolCall("f", {}, "x"),), "so"),
        Message("tool", "c", call_id="x"),
    ),
}
SENT = yaml.safe_load((Path(__file__).parents[3] / "data" / "client_messages.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SENT)
def test_what_clients_make_of_messages(name: str):
    api = ScriptedApi(DIALECTS[name], [ONE])
    CLIENTS[name](api, **SENT[name])
    assert api.requests[0].messages == READ[name]


def test_log_probabilities_of_the_sampled_tokens():
    content = chat(ScriptedApi(Chat(), [TOKENS]), logprobs=True).choices[0].logprobs.content
    expected = [("a", -0.5), (" é", -1.25)]
    assert [(token.token, token.logprob) for token in content] == expected
    assert [bytes(token.bytes).decode() for token in content] == ["a", " é"]
    api = ScriptedApi(Responses(), [TOKENS])
    part = responses(api, include=["message.output_text.logprobs"]).output[0].content[0]
    assert api.requests[0].log_probs
    assert [(token.token, token.logprob) for token in part.logprobs] == expected


# --- Chat Completions -------------------------------------------------------------------------------------------------
def test_a_reply_of_text_in_chat():
    api = ScriptedApi(Chat(), [ONE])
    answer = chat(api, max_tokens=9, max_completion_tokens=5, stop="END")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello.", "stop")
    assert choice.message.tool_calls is None
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert answer.usage.model_dump(exclude_none=True) == {**usage, "prompt_tokens_details": {"cached_tokens": 2}}
    assert (answer.id, answer.model, answer.object) == ("chatcmpl-e1_0", "policy", "chat.completion")
    request = api.requests[0]
    assert request.messages == (Message("user", "Weather?"),)
    assert (request.model, request.max_tokens, request.stop, request.stream) == ("policy", 5, ("END",), False)
    assert request.overruled == ()


def test_parallel_calls_in_chat_are_answered_and_come_back():
    api = ScriptedApi(Chat(), [CALLS, ONE])
    message = chat(api, tools=CHAT_TOOLS).choices[0].message
    assert message.content == "I ask."
    assert message.reasoning_content == "Two of them."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Bern"}, {"city": "Genf"}]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls]
    history = [*ASK, message.model_dump(exclude_none=True), *results]
    chat(api, messages=history, tools=CHAT_TOOLS)
    first, second = api.requests
    assert first.tools == tuple(CHAT_TOOLS)
    assert second.messages == (
        Message("user", "Weather?"),
        Message("assistant", "I ask.", CALLS.calls, "Two of them."),
        *SUNNY,
    )


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply.id)
def test_a_chat_stream_adds_up_to_the_reply(reply: Reply):
    api = ScriptedApi(Chat(), [reply, reply])
    whole = chat(api, logprobs=True).model_dump()
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
    chunks = list(chat(api, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_reply_that_was_cut_and_one_of_calls_and_an_empty_one():
    api = ScriptedApi(Chat(), [CUT, CALL, EMPTY, THOUGHT])
    cut, call, empty, thought = (chat(api).choices[0] for _ in range(4))
    assert cut.finish_reason == "length"
    assert (call.finish_reason, call.message.content) == ("tool_calls", None)
    assert empty.message.content == ""
    assert thought.message.reasoning_content == "Which city?\n"


# --- Responses --------------------------------------------------------------------------------------------------------
def test_a_reply_of_text_in_responses():
    api = ScriptedApi(Responses(), [ONE])
    answer = responses(api, instructions="Be brief.", max_output_tokens=20, store=True)
    assert (answer.id, answer.status, answer.output_text) == ("resp_e1_0", "completed", "Hello.")
    assert [item.id for item in answer.output] == ["msg_e1_0"]
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 3, 10)
    assert usage.input_tokens_details.cached_tokens == 2
    request = api.requests[0]
    assert request.messages == (Message("system", "Be brief."), Message("user", "Weather?"))
    assert (request.model, request.max_tokens, request.instructions, request.previous) == ("policy", 20, True, None)
    assert request.overruled == ()


def test_items_of_a_turn_come_back_as_one_message():
    api = ScriptedApi(Responses(), [CALLS, ONE])
    answer = responses(api, tools=RESPONSES_TOOLS, parallel_tool_calls=True)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in answer.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    responses(api, tools=RESPONSES_TOOLS, input=[{"role": "user", "content": "Weather?"}, *answer.output, *results])
    first, second = api.requests
    assert first.tools == READ_TOOLS
    assert second.messages == (Message("user", "Weather?"), TURN, *SUNNY)


def test_turns_side_by_side_stay_two():
    """Ids tell them apart, and where a client drops those, the order of items in a turn."""
    items = [item for reply in (THOUGHT, CALLS) for item in Responses().render(reply, REQUEST)["output"]]
    bare = [{key: value for key, value in item.items() if key not in ("id", "encrypted_content")} for item in items]
    end = [{"role": "user", "content": "Go on."}]
    for sent, ids in ((items, ["e1_1", "e1_3"]), (bare, [None, "e1_3"])):
        messages = Responses().parse({"input": [*sent, *end]}, unsupported="refuse").messages
        assert [message.item_id for message in messages[:-1]] == ids
        assert [(message.text, message.calls, message.reasoning) for message in messages[:-1]] == [
            (reply.text, reply.calls, reply.reasoning) for reply in (THOUGHT, CALLS)
        ]


REQUEST = Responses().parse({"model": "policy", "input": "x"}, unsupported="refuse")


def without_parsed(response) -> dict:
    """A response as a mapping, without the fields in which the client keeps what it parsed."""
    made = response.to_dict(exclude_none=True)
    for item in made["output"]:
        item.pop("parsed_arguments", None)
    return made


@pytest.mark.parametrize("reply", [reply for reply in REPLIES if reply is not CUT], ids=lambda reply: reply.id)
def test_a_responses_stream_adds_up_to_the_reply(reply: Reply):
    api = ScriptedApi(Responses(), [reply, reply])
    whole = responses(api, tools=RESPONSES_TOOLS)
    with api.openai().responses.stream(model="policy", input="Weather?", tools=RESPONSES_TOOLS) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    snapshot = stream._state._ResponseStreamState__current_snapshot
    assert without_parsed(streamed) == without_parsed(whole)
    assert [item.id for item in snapshot.output] == [item.id for item in whole.output]
    assert whole.output_text == reply.text
    assert [item.arguments for item in snapshot.output if item.type == "function_call"] == [
        item.arguments for item in whole.output if item.type == "function_call"
    ]
    assert [item.content[0].text for item in snapshot.output if item.type == "message"] == [
        item.content[0].text for item in whole.output if item.type == "message"
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {event.type for event in events} >= {"response.created", "response.output_item.done", "response.completed"}


def test_a_stream_that_was_cut_ends_as_incomplete():
    api = ScriptedApi(Responses(), [CUT, CUT])
    whole = responses(api)
    last = list(responses(api, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert last.response == whole
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_conversation_goes_on_by_the_id_of_a_response():
    api = ScriptedApi(Responses(), [CALL, EMPTY])
    first = responses(api, instructions="Be brief.")
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sun"}
    second = responses(api, input=[result], previous_response_id=first.id)
    request = api.requests[1]
    assert (request.previous, request.instructions) == ("e1_2", False)
    assert request.messages == (Message("tool", "sun", call_id="call_e1_2_0"),)
    assert second.previous_response_id == first.id
    assert second.output_text == ""


@pytest.mark.parametrize("unsupported", ["refuse", "ignore"])
def test_references_to_items_are_always_refused(unsupported):
    """Ignored, they would delete turns of the model from its conversation."""
    api = ScriptedApi(Responses(), [ONE], unsupported)
    sent = [{"role": "user", "content": "Weather?"}, {"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: item_reference .* in full: .*store=false") as caught:
        responses(api, input=[*sent, {"role": "user", "content": "And now?"}])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "input/item_reference")
    assert "unsupported=ignore" not in caught.value.message


# --- Messages ---------------------------------------------------------------------------------------------------------
def test_a_reply_of_text_in_messages():
    api = ScriptedApi(Messages(), [ONE])
    answer = messages(api, system="Be brief.", stop_sequences=["END"])
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello.")]
    assert (answer.id, answer.role, answer.stop_reason) == ("msg_e1_0", "assistant", "end_turn")
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 2, 3)
    request = api.requests[0]
    assert request.messages == (Message("system", "Be brief."), Message("user", "Weather?"))
    assert (request.model, request.max_tokens, request.stop, request.stream) == ("policy", 20, ("END",), False)


def test_thoughts_and_parallel_calls_are_answered_and_come_back():
    api = ScriptedApi(Messages(), [CALLS, ONE])
    answer = messages(api, tools=MESSAGES_TOOLS)
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
    messages(api, tools=MESSAGES_TOOLS, messages=[*past, {"role": "user", "content": results}])
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
def test_a_messages_stream_adds_up_to_the_reply(reply: Reply):
    api = ScriptedApi(Messages(), [reply, reply])
    whole = messages(api)
    with api.anthropic().messages.stream(model="policy", max_tokens=20, messages=ASK) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert streamed.to_dict(exclude_none=True) == whole.to_dict(exclude_none=True)
    assert [request.stream for request in api.requests] == [False, True]


def test_why_a_reply_ends():
    api = ScriptedApi(Messages(), [CUT, CALL, EMPTY, THOUGHT, STOPPED, replace(CALL, stop="END")])
    ends = [(answer.stop_reason, answer.stop_sequence) for answer in (messages(api) for _ in range(6))]
    words = ["max_tokens", "tool_use", "end_turn", "end_turn", "stop_sequence", "tool_use"]
    assert ends == [(word, "END" if word == "stop_sequence" else None) for word in words]
