"""Real clients of model APIs play episodes against the gateway, with a real tokenizer and a scripted model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from gateway_parts import LIMITS, LOOK, anthropic, called, codec, openai, run

ASKED: list[Any] = [{"role": "system", "content": "You look."}, {"role": "user", "content": "Where is it?"}]


def spelled(message: Any) -> dict[str, Any]:
    """A reply as many agents send it back: without thoughts, with arguments spelled anew."""
    calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or []]
    for call in calls:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    return {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_tools_is_one_row(stream: bool) -> None:
    turns = [
        "<think>\nHm.\n</think>\n\n" + called('{"place": "cave"}', '{"place": null, "times": 2}', text="I look."),
        called('{"place": "hill"}'),
        "It is on the hill.",
    ]

    async def agent(url: str) -> Any:
        messages, seen = [*ASKED], []
        async with openai(url) as client:
            for _ in turns:
                if stream:
                    sending = client.chat.completions.stream(model="policy", messages=messages, tools=[LOOK])
                    async with sending as events:
                        reply = (await events.get_final_completion()).choices[0]
                else:
                    sent = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK])
                    reply = sent.choices[0]
                seen.append(reply)
                messages.append(spelled(reply.message))
                for call in reply.message.tool_calls or []:
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: dark"})
        return seen

    played = run(agent, turns)
    assert played.breaks == ["first"]
    assert [reply.finish_reason for reply in played.value] == ["tool_calls", "tool_calls", "stop"]
    first = played.value[0].message
    assert first.content == "I look."
    assert first.reasoning_content == "Hm."
    assert [json.loads(call.function.arguments) for call in first.tool_calls] == [
        {"place": "cave"},
        {"place": None, "times": 2},
    ]
    steps = played.rows[0].extra_fields["turnkey"]["steps"]
    assert [step["extra"]["tool_calls"] for step in steps] == [2, 1, 0]
    assert [step["reward"] for step in steps] == [0, 0, 1]
    text = played.script.codec.tokenizer.decode(played.script.prompts[1])
    assert text.count("<tool_response>\nlook: dark\n</tool_response>") == 2
    assert text.count("<think>\nHm.\n</think>") == 1, "the model goes on seeing thoughts that the agent dropped"


def test_an_agent_of_anthropics_api_is_one_row() -> None:
    turns = ["<think>\nHm.\n</think>\n\n" + called('{"place": "cave"}', text="I look."), "There."]
    tool: Any = {"name": "look", "description": "Look.", "input_schema": LOOK["function"]["parameters"]}

    async def agent(url: str) -> Any:
        messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
        async with anthropic(url) as client:
            reply = await client.messages.create(
                model="policy", max_tokens=100, messages=messages, tools=[tool], system="You look."
            )
            use = next(block for block in reply.content if block.type == "tool_use")
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "dark"}]},
            ]
            async with client.messages.stream(
                model="policy", max_tokens=100, messages=messages, tools=[tool], system="You look."
            ) as events:
                return [reply, await events.get_final_message()]

    played = run(agent, turns)
    assert played.breaks == ["first"]
    assert [block.type for block in played.value[0].content] == ["thinking", "text", "tool_use"]
    assert played.value[1].content[0].text == "There."


def test_a_reply_names_the_stop_string_of_the_client_that_ended_it() -> None:
    async def agent(url: str) -> Any:
        request: Any = {"model": "policy", "max_tokens": 100, "messages": ASKED[1:], "stop_sequences": ["STOP", "END"]}
        async with anthropic(url) as client:
            return [await client.messages.create(**request) for _ in range(3)]

    model = codec()
    cut = [model.tokenizer.encode(text, add_special_tokens=False) for text in ("Here. END", "There. OVER")]
    played = run(agent, [*cut, "At the END"], model=model, limits=replace(LIMITS, stop=("OVER",)))
    ends = [(reply.content[0].text, reply.stop_reason, reply.stop_sequence) for reply in played.value]
    assert ends[:2] == [("Here. ", "stop_sequence", "END"), ("There. ", "end_turn", None)]
    assert ends[2][1:] == ("end_turn", None), "the model ended the turn itself"


def test_ids_that_the_tokenizer_would_not_write_survive() -> None:
    async def agent(url: str) -> Any:
        async with openai(url) as client:
            first = await client.chat.completions.create(model="policy", messages=ASKED)
            messages = [*ASKED, spelled(first.choices[0].message), {"role": "user", "content": "Sure?"}]
            return await client.chat.completions.create(model="policy", messages=messages)

    model = codec()
    letters = [model.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "hello"]
    assert model.tokenizer.encode("hello", add_special_tokens=False) != letters
    played = run(agent, [[*letters, model.tokenizer.eos_token_id], "Yes."], model=model)
    assert played.breaks == ["first"]
    assert played.rows[0].response_ids[:5] == letters


def test_parallel_requests_become_chains() -> None:
    async def agent(url: str) -> Any:
        import asyncio

        async with openai(url) as client:

            async def chat(name: str) -> None:
                messages: list[Any] = [{"role": "system", "content": f"You are {name}."}, ASKED[1]]
                for _ in range(3):
                    reply = await client.chat.completions.create(model="policy", messages=messages)
                    messages += [spelled(reply.choices[0].message), {"role": "user", "content": "And now?"}]

            await asyncio.gather(*map(chat, ("Ada", "Bob", "Eve")))

    async def wait() -> None:
        import asyncio

        await asyncio.sleep(0.01)

    played = run(agent, lambda prompt: f"Turn {prompt.count('assistant')}.", wait=wait)
    assert len(played.rows) == 3
    steps = [step for row in played.rows for step in row.extra_fields["turnkey"]["steps"]]
    assert sorted(step["step"] for step in steps) == [*range(9)]
    assert {step["extra"]["chain"] for step in steps} == {0, 1, 2}
    assert len(set(played.script.request_ids)) == 3, "a conversation stays with its server"
    assert [step["reward"] for step in sorted(steps, key=lambda step: step["step"])] == [0] * 8 + [1]


def test_tokens_are_counted_without_a_turn() -> None:
    async def agent(url: str) -> Any:
        async with anthropic(url) as client:
            sent: Any = {"model": "policy", "system": "You look.", "messages": ASKED}
            counted = await client.messages.count_tokens(**sent)
            reply = await client.messages.create(max_tokens=9, **sent)
            return counted.input_tokens, reply.usage.input_tokens

    played = run(agent, ["Here."])
    assert played.value[0] == played.value[1] > 5
    assert len(played.session.turns) == 1
