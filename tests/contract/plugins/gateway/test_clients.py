"""Real clients of model APIs play episodes against the gateway, with a real tokenizer and a scripted model."""

from __future__ import annotations

import base64
import copy
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx
import pytest
import real_tokenizers
from gateway_parts import LIMITS, LOOK, Agent, anthropic, called, codec, openai, run, seeing
from PIL import Image
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_turnkey.envs.agents.base import Outcome
from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.gateway.episode import StepOptions, played
from verl_turnkey.plugins.gateway.states import state_key
from verl_turnkey.plugins.rollout.episode import Episode

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


@dataclass(frozen=True)
class Api:
    """How a body is made for an API, and a reply read."""

    path: str
    field: str
    tool: Any
    image: Callable[[str, str], Any]
    """of a type and base64 data"""
    turn: Callable[[Any], tuple[list[Any], list[Any]]]
    """what a reply adds to the messages, and its calls"""
    result: Callable[[Any, Any], Any]
    """of a call, with a content"""


def chat_turn(body: Any) -> tuple[list[Any], list[Any]]:
    message = body["choices"][0]["message"]
    return [message], message.get("tool_calls") or []


APIS = (
    Api(
        "/chat/completions",
        "messages",
        LOOK,
        lambda kind, data: {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}},
        chat_turn,
        lambda call, content: {"role": "tool", "tool_call_id": call["id"], "content": content},
    ),
    Api(
        "/responses",
        "input",
        {"type": "function", **LOOK["function"]},
        lambda kind, data: {"type": "input_image", "image_url": f"data:{kind};base64,{data}"},
        lambda body: (body["output"], [item for item in body["output"] if item["type"] == "function_call"]),
        lambda call, content: {"type": "function_call_output", "call_id": call["call_id"], "output": content},
    ),
    Api(
        "/messages",
        "messages",
        {"name": "look", "description": "Look.", "input_schema": LOOK["function"]["parameters"]},
        lambda kind, data: {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}},
        lambda body: (
            [{"role": "assistant", "content": body["content"]}],
            [block for block in body["content"] if block["type"] == "tool_use"],
        ),
        lambda call, content: {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": content}],
        },
    ),
)


def looks(api: Api, question: Any, result: Any, changed: Callable[[str], str] = str) -> Agent:
    """An agent that asks with the content ``question`` and answers each call with ``result``.

    ``changed`` makes what it sends, as JSON, of what it has got.
    """

    async def agent(url: str) -> None:
        sent, calls = [{"role": "user", "content": question}], [None]
        async with httpx.AsyncClient(timeout=60) as web:
            while calls:
                body = {"model": "policy", "max_tokens": 100, "tools": [api.tool]}
                body[api.field] = json.loads(changed(json.dumps(sent)))
                answer = await web.post(url + api.path, json=body)
                assert answer.status_code == 200, answer.text
                made, calls = api.turn(answer.json())
                sent = [*sent, *made, *(api.result(call, result) for call in calls)]

    return agent


by_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)


@by_api
def test_steps_tell_images_apart_by_their_content(api: Api) -> None:
    """Not by their encoding, in messages of the user and in results of tools."""

    def content(gray: int, form: str) -> list[Any]:
        file = io.BytesIO()
        Image.new("L", (9, 9), gray).save(file, form)
        return [api.image(f"image/{form.lower()}", base64.b64encode(file.getvalue()).decode())]

    def keys_of(gray: int, form: str, result: int) -> list[Any]:
        agent = looks(api, content(gray, form), content(result, form))
        session = run(agent, [called('{"place": "cave"}'), "Here."], model=seeing()).session
        options, episode = StepOptions(state_key("observation"), texts=True), Episode()
        played(session, Outcome(reward=1.0), options, episode)
        assert [step.record["extra"]["text"] for step in episode.steps] == ["", ""]
        return [(step.record["extra"]["images"], step.record["anchor"]) for step in episode.steps]

    first, other = keys_of(10, "PNG", 30), keys_of(10, "BMP", 40)
    assert first[0] == other[0]
    assert len({first[0], first[1], other[1]}) == 3
    assert len({key for step in (*first, *other) for key in step}) == 6
    assert all(images for images, _ in (*first, *other))


WITH_IDS = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}Result of {{ m.tool_call_id }}: {% endif %}{{ m.content }}{% if m.tool_calls %}\
<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}\
<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}\
<|tool_calls_section_end|>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""results stand under the id of their call, as in the templates of Kimi K2"""
CALLED = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:{}<|tool_call_argument_begin|>"
    '{{"place": "cave"}}<|tool_call_end|><|tool_calls_section_end|>'
)


def with_ids() -> Codec:
    tokenizer = copy.deepcopy(real_tokenizers.tokenizer("qwen3"))
    tokenizer.chat_template = WITH_IDS
    builder = create_continuous_token_builder(
        tokenizer, hf_model_type="kimi_k2", chat_template_kwargs={}, mm_processor_kwargs={}, processor=None
    )
    return Codec(tokenizer, builder, "kimi")


@by_api
@pytest.mark.parametrize("thinking", ["keep", "as_sent"])
@pytest.mark.parametrize("changes_ids", [False, True])
def test_a_result_stands_under_the_id_that_the_model_wrote(
    api: Api, thinking: Literal["keep", "as_sent"], changes_ids: bool
) -> None:
    """Whatever id the client gives the call, and whether the prompt goes on or is rendered anew."""
    changed = (lambda sent: re.sub(r"call_\w+_(\d+_\d+)", r"toolu_\1", sent)) if changes_ids else str
    agent, limits = looks(api, "go", "dark", changed), replace(LIMITS, thinking=thinking)
    ended = run(agent, [CALLED.format(0), CALLED.format(1), "Here."], model=with_ids(), limits=limits)
    text = ended.script.codec.tokenizer.decode(ended.script.prompts[-1])
    assert re.findall(r"Result of (\S+): dark", text) == ["functions.look:0", "functions.look:1"]
    assert re.findall(r"<\|tool_call_begin\|>(.+?)<", text) == ["functions.look:0", "functions.look:1"]
    assert ended.breaks == ["first"]
