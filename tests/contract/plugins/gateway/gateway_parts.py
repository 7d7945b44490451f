"""What tests of the gateway share and is no fixture: a scripted model behind a real server, for real clients."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import real_tokenizers
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_turnkey.envs.agents.base import AgentResult
from verl_turnkey.plugins.gateway import episode as episodes
from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.gateway.server import Gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import Limits
from verl_turnkey.plugins.rollout.episode import Episode, Generated, Prompt, RowBuilder

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "times": {"type": "integer"}},
        },
    },
}
LIMITS = Limits(room=4000, turn=200, turns=20)
ASKED: list[Any] = [{"role": "system", "content": "You look."}, {"role": "user", "content": "Where is it?"}]


async def ask(client: Any, messages: Any = ASKED, **options: Any) -> Any:
    return (await client.chat.completions.create(model="policy", messages=messages, **options)).choices[0]


def spelled(message: Any) -> dict[str, Any]:
    """A reply as many agents send it back: without thoughts, with arguments spelled anew."""
    calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or []]
    for call in calls:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    return {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}


def called(*arguments: str, text: str = "") -> str:
    """A turn with calls of ``look``, as Qwen writes them."""
    calls = "".join(f'\n<tool_call>\n{{"name": "look", "arguments": {values}}}\n</tool_call>' for values in arguments)
    return text + calls


SHOWS_IMAGES = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def codec(package: str = "qwen3", model_type: str = "qwen3", tool_format: str = "hermes") -> Codec:
    tokenizer = real_tokenizers.tokenizer(package)
    builder = create_continuous_token_builder(
        tokenizer, hf_model_type=model_type, chat_template_kwargs={}, mm_processor_kwargs={}, processor=None
    )
    return Codec(tokenizer, builder, tool_format)


def seeing() -> Codec:
    """The codec of a model that sees each image as 4 patches, which its template shows for users alone."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer = copy.deepcopy(real_tokenizers.tokenizer("qwen3"))
    tokenizer.chat_template, tokenizer.image_token = SHOWS_IMAGES, "<|image_pad|>"
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=SHOWS_IMAGES,
    )
    builder = create_continuous_token_builder(
        tokenizer, hf_model_type="qwen2_5_vl", chat_template_kwargs={}, mm_processor_kwargs={}, processor=processor
    )
    return Codec(tokenizer, builder)


@dataclass
class Script:
    """The model: ids in, ids out. ``turns``: texts in their order, or a function of the prompt's text."""

    codec: Codec
    turns: Sequence[str | list[int]] | Callable[[str], str]
    wait: Callable[[], Awaitable[Any]] | None = None
    prompts: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    async def __call__(self, request_id: str, prompt: Prompt, sampling: dict[str, Any]) -> Generated:
        tokenizer, number = self.codec.tokenizer, len(self.prompts)
        self.prompts.append([*prompt.ids])
        self.params.append(sampling)
        self.request_ids.append(request_id)
        turn = self.turns(tokenizer.decode(self.prompts[number])) if callable(self.turns) else self.turns[number]
        self.sampled.append([])
        if self.wait is not None:
            await self.wait()
        ids = turn if isinstance(turn, list) else self.written(turn)
        ids = self.sampled[number] = ids[: sampling["max_tokens"]]
        return Generated(
            ids=ids,
            log_probs=[-0.01 * i for i in range(len(ids))],
            text=tokenizer.decode(ids, skip_special_tokens=True),
            extra_fields={"min_global_steps": 7, "max_global_steps": 7},
            num_preempted=0,
            seconds=0.0,
        )

    def written(self, text: str) -> list[int]:
        return [*self.codec.tokenizer.encode(text, add_special_tokens=False), self.codec.tokenizer.eos_token_id]


@dataclass
class Played:
    """An episode that has ended."""

    session: Session
    script: Script
    value: Any
    """what the agent returned"""
    rows: list[Any] = field(default_factory=list)

    def check_rows(self) -> None:
        """Every prompt that the server saw of a trained turn, with its turn, is the head of a row; masks are exact."""
        heads = [row.prompt_ids + row.response_ids for row in self.rows]
        trained = episodes.trained(self.session)
        for turn in trained:
            whole = [*turn.prompt.ids, *turn.generated.ids]
            assert any(head[: len(whole)] == whole for head in heads)
        sampled = sum(len(turn.generated.ids) for turn in trained)
        assert sum(sum(row.response_mask) for row in self.rows) == sampled
        for row in self.rows:
            runs, at = [], 0
            for i, bit in enumerate([*row.response_mask, 0]):
                if bit and (i == 0 or not row.response_mask[i - 1]):
                    at = i
                if not bit and i and row.response_mask[i - 1]:
                    runs.append(row.response_ids[at:i])
            steps = [step["step"] for step in row.extra_fields["turnkey"]["steps"]]
            assert runs == [trained[step].generated.ids for step in steps]
            assert all(p == 0 for p, bit in zip(row.response_logprobs, row.response_mask, strict=True) if not bit)

    @property
    def breaks(self) -> list[str]:
        return [row.extra_fields["turnkey_break"] for row in self.rows]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for row in self.rows for step in row.extra_fields["turnkey"]["steps"]]


Agent = Callable[[str], Awaitable[Any]]


async def play(
    agent: Agent,
    turns: Sequence[str | list[int]] | Callable[[str], str],
    *,
    limits: Limits = LIMITS,
    model: Codec | None = None,
    wait: Callable[[], Awaitable[Any]] | None = None,
    sampling: Mapping[str, Any] | None = None,
    outcome: AgentResult | None = None,
    grace: float = 1.0,
    tag: str | None = None,
    watch: Any = None,
    models: Any = None,
) -> Played:
    """Let ``agent(url)`` play an episode against a gateway of its own.

    ``tag``: of the episode's ids; ``watch``: gets its ``session`` and ``script`` before it begins.
    """
    model = model or codec()
    script = Script(model, turns, wait)
    session = Session(model, script, sampling or {"temperature": 1.0, "logprobs": True}, limits)
    session.tag, session.models = tag or session.tag, models
    if watch is not None:
        watch.session, watch.script = session, script
    server = Gateway()
    await server.start()
    server.add(session)
    try:
        value = await agent(f"http://127.0.0.1:{server.port}/{session.secret}/v1")
    finally:
        server.remove(session)
        await session.close(grace)
        await server.stop()
    played = Played(session, script, value)
    if session.turns:
        played.rows = rows(session, outcome or AgentResult(reward=1.0))
    return played


def rows(session: Session, outcome: AgentResult, merged: bool = True) -> list[Any]:
    episode = Episode()
    options = episodes.StepOptions(state=lambda request, files=None: str(len(request.messages)))
    order = episodes.played(session, outcome, options, episode)
    for step in episode.steps:
        step.record["composed_reward"] = step.record["reward"]
    return RowBuilder(2, True, (), merged, 4000).played(episodes.in_rows(episode, order))


def run(agent: Agent, turns: Sequence[str | list[int]] | Callable[[str], str], **options: Any) -> Played:
    played = asyncio.run(play(agent, turns, **options))
    if played.rows:
        played.check_rows()
    return played


def chats(talk: Callable[[Any], Awaitable[Any]], turns: Any, client: Mapping[str, Any] = {}, **options: Any) -> Played:
    """:func:`run` with an agent that does ``talk(client)`` with OpenAI's client; ``client``: its options."""

    async def agent(url: str) -> Any:
        async with openai(url, **client) as made:
            return await talk(made)

    return run(agent, turns, **options)


def posts(talk: Callable[..., Awaitable[Any]], turns: Any, client: Mapping[str, Any] = {}, **options: Any) -> Played:
    """:func:`chats` with ``talk(client, post)``; ``post(what, **body)`` posts to ``/SECRET/what``."""

    async def agent(url: str) -> Any:
        root = url.removesuffix("/v1")
        async with openai(url, **client) as made, httpx.AsyncClient() as web:
            return await talk(made, lambda what, **body: web.post(f"{root}/{what}", json=body))

    return run(agent, turns, **options)


def openai(url: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url, api_key="none", **options)


def anthropic(url: str, **options: Any) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", **options)
