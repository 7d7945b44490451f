"""OpenAI's Responses, as its client sends and reads them."""

from __future__ import annotations

import openai
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
    THOUGHT,
    TOKENS,
    TURN,
    WEATHER,
    ScriptedApi,
)

from verl_turnkey.plugins.gateway.dialects import Responses
from verl_turnkey.plugins.gateway.messages import Message, Reply, ToolCall

TOOLS = [{"type": "function", "name": "weather", "description": "of a city", "parameters": WEATHER, "strict": None}]


def ask(api: ScriptedApi, **parameters):
    return api.openai().responses.create(**{"model": "policy", "input": "Weather?", **parameters})


def test_a_reply_of_text():
    api = ScriptedApi(Responses(), [ONE])
    answer = ask(api, instructions="Be brief.", max_output_tokens=20, store=True)
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
    answer = ask(api, tools=TOOLS, parallel_tool_calls=True)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
        for item in answer.output
        if item.type == "function_call"
    ]
    ask(api, tools=TOOLS, input=[{"role": "user", "content": "Weather?"}, *answer.output, *results])
    first, second = api.requests
    assert first.tools == READ_TOOLS
    assert second.messages == (
        Message("user", "Weather?"),
        TURN,
        Message("tool", "sun", call_id="call_e1_3_0"),
        Message("tool", "sun", call_id="call_e1_3_1"),
    )


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
def test_a_stream_adds_up_to_the_reply(reply: Reply):
    api = ScriptedApi(Responses(), [reply, reply])
    whole = ask(api, tools=TOOLS)
    with api.openai().responses.stream(model="policy", input="Weather?", tools=TOOLS) as stream:
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
    whole = ask(api)
    last = list(ask(api, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert last.response == whole
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_conversation_goes_on_by_the_id_of_a_response():
    api = ScriptedApi(Responses(), [CALL, EMPTY])
    first = ask(api, instructions="Be brief.")
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sun"}
    second = ask(api, input=[result], previous_response_id=first.id)
    request = api.requests[1]
    assert (request.previous, request.instructions) == ("e1_2", False)
    assert request.messages == (Message("tool", "sun", call_id="call_e1_2_0"),)
    assert second.previous_response_id == first.id
    assert second.output_text == ""


def test_log_probabilities_of_the_sampled_tokens():
    api = ScriptedApi(Responses(), [TOKENS])
    part = ask(api, include=["message.output_text.logprobs"]).output[0].content[0]
    assert api.requests[0].log_probs
    assert [(token.token, token.logprob) for token in part.logprobs] == [("a", -0.5), (" é", -1.25)]


def test_errors_reach_the_agent_with_our_words():
    api = ScriptedApi(Responses(), ERRORS)
    with pytest.raises(openai.NotFoundError, match="the episode has ended"):
        ask(api)
    with pytest.raises(openai.BadRequestError, match="maximum context length: the prompt has 4100"):
        ask(api)


def test_what_clients_make_of_items():
    sent = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "c"}]},
    ]
    assert Responses().parse({"input": sent}, unsupported="refuse").messages == (
        Message("system", "a"),
        Message("user", "b"),
        Message("assistant", "", (ToolCall("f", {}, "x"),), "so"),
        Message("tool", "c", call_id="x"),
    )


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ([], "no messages"),
        ([{"role": "tool", "content": ""}], r"input\[0\].role: expected user, assistant, system or developer"),
        ([{"type": "computer_call_output"}], "input/computer_call_output is not supported: .* in full"),
        ([{"type": "function_call_output", "output": ""}], r"input\[0\].call_id: expected a string, got NoneType"),
        (7, "input: expected a list, got int"),
    ],
)
def test_malformed_items(sent, words):
    with pytest.raises(openai.BadRequestError, match=words):
        ask(ScriptedApi(Responses(), [ONE]), input=sent)


@pytest.mark.parametrize("unsupported", ["refuse", "ignore"])
def test_references_to_items_are_always_refused(unsupported):
    """Ignored, they would delete turns of the model from its conversation."""
    api = ScriptedApi(Responses(), [ONE], unsupported)
    sent = [{"role": "user", "content": "Weather?"}, {"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: item_reference .* in full: .*store=false") as caught:
        ask(api, input=[*sent, {"role": "user", "content": "And now?"}])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "input/item_reference")
    assert "unsupported=ignore" not in caught.value.message
