"""Requests that name another model than the policy (``turnkey.agent.models``), by real clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest
from gateway_parts import ASKED, Played, ask, chats
from other_model import OtherModel, other_model

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.http import EndpointConfig
from verl_turnkey.plugins.config.agent import AgentConfig
from verl_turnkey.plugins.gateway.messages import GatewayError
from verl_turnkey.plugins.gateway.models import Models
from verl_turnkey.plugins.gateway.session import Session

KEY = "a-key-of-the-user"


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherModel]:
    monkeypatch.setenv("A_VARIABLE", KEY)
    with other_model() as served:
        yield served


def play(talk: Any, url: str) -> Played:
    entry = {"url": url, "model": "big", "key_env": "A_VARIABLE"}
    config = AgentConfig(models={"judge": entry, "lost": {"url": "http://127.0.0.1:9"}})
    models = Models(config.endpoints(), "policy")
    return chats(talk, ["Here.", "There."], client={"max_retries": 0}, models=models)


def test_requests_for_another_model_go_to_it_as_they_are(judge: OtherModel) -> None:
    """Chat Completions, streamed as well, Responses and embeddings; with all parameters, and the user's key."""

    async def agent(client: Any) -> Any:
        await ask(client)
        request: Any = {"model": "judge", "messages": ASKED, "temperature": 0.5, "n": 1}
        whole = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True)
        streamed = "".join([chunk.choices[0].delta.content async for chunk in stream])
        response = await client.responses.create(model="judge", input="hello", text={"format": {"type": "json_object"}})
        embedded = await client.embeddings.create(model="judge", input="hello", encoding_format="float")
        await ask(client)
        names = [model.id async for model in client.models.list()]
        return whole.choices[0].message.content, streamed, response.output_text, embedded.data[0].embedding, names

    played = play(agent, judge.url)
    assert played.value == ("for big", "for big", "a response", [0.5, 1.0], ["policy", "judge", "lost"])
    assert [path for path, _, _ in judge.requests] == [
        "/v1/chat/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
    ]
    assert {key for _, key, _ in judge.requests} == {f"Bearer {KEY}"}
    assert judge.requests[0][2] == {"model": "big", "messages": ASKED, "temperature": 0.5, "n": 1}
    assert len(played.session.turns) == len(played.steps) == len(played.script.prompts) == 2
    assert played.session.counts["models/judge"] == 4
    calls = played.session.other_calls
    assert [(call["model"], call["after_turns"]) for call in calls] == [("judge", 1)] * 4
    assert "Where is it?" in calls[0]["request"]
    assert "for big" in calls[0]["reply"]
    assert '"delta"' in calls[1]["reply"]


@pytest.mark.parametrize(
    ("model", "text", "error", "words"),
    [
        (
            "judge",
            "fail",
            openai.InternalServerError,
            "model 'judge' at http://127.0.0.1.* answers 500: .*luck, Bearer",
        ),
        ("lost", "hello", openai.InternalServerError, "the model 'lost' at http://127.0.0.1:9 .* gives no answer"),
        ("judgee", "hello", openai.NotFoundError, "no model 'judgee': known are policy, policy/<role>, judge, lost"),
        ("", "hello", openai.NotFoundError, "there is no model ''"),
    ],
)
def test_a_model_that_fails_or_is_unknown_is_an_error_and_never_the_policy(
    judge: OtherModel, model: str, text: str, error: type[openai.APIStatusError], words: str
) -> None:
    async def agent(client: Any) -> None:
        with pytest.raises(error, match=words) as raised:
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
        assert raised.value.code == ("model_failed" if model in ("judge", "lost") else "model_not_found")
        assert KEY not in str(raised.value)
        with pytest.raises(openai.NotFoundError, match="policy has no /v1/embeddings"):
            await client.embeddings.create(model="policy", input="hello")
        await client.chat.completions.create(model="policy/planner", messages=ASKED)

    played = play(agent, judge.url)
    assert len(played.script.prompts) == 1
    calls = played.session.other_calls
    assert [(call["model"], KEY in call["error"]) for call in calls] == [(model, False)] * (model in ("judge", "lost"))


@pytest.mark.parametrize("path", ["/../admin", "/chat/%2e%2e/admin", "/embeddings%3Fx=1", "/.", "//host"])
def test_no_path_leads_out_of_the_api(path: str) -> None:
    """The key of the user's server is for its model alone."""
    models = Models({"judge": EndpointConfig("http://127.0.0.1:9/v1", "big")}, "policy")
    with pytest.raises(GatewayError, match="expected a path below /v1"):
        asyncio.run(models.answer("judge", path, {}, cast(Any, None)))


def test_a_call_ends_with_its_episode() -> None:
    """A model that hangs outlives neither the agent nor the log's copy of the calls."""

    async def hangs() -> tuple[Session, asyncio.Task[Any]]:
        session = Session(cast(Any, None), cast(Any, None), {}, cast(Any, None), "policy")
        call = asyncio.create_task(session._while_open(asyncio.sleep(60, {})))
        await asyncio.sleep(0)
        await session.close(0.0)
        with pytest.raises(GatewayError, match="the episode has ended"):
            await call
        return session, call

    session, call = asyncio.run(hangs())
    assert call.done()
    assert not session._others


@pytest.mark.parametrize("key", [None, "two\nlines", "\u043a"])
def test_a_key_that_is_missing_or_no_header_is_said(
    judge: OtherModel, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key is None:
        monkeypatch.delenv("A_VARIABLE")
    else:
        monkeypatch.setenv("A_VARIABLE", key)

    async def agent(client: Any) -> None:
        await ask(client)
        with pytest.raises(openai.InternalServerError, match="set the environment variable A_VARIABLE on every node"):
            await client.chat.completions.create(model="judge", messages=ASKED)

    play(agent, judge.url)
    assert judge.requests == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("http://judge/v1", r"turnkey.agent.models.judge: expected a mapping of url, model, key_env, timeout"),
        ({"model": "big"}, r"expected a mapping of url, model"),
        ({"url": "judge:8000"}, r"turnkey.agent.models.judge.url: expected http"),
        ({"url": "http://judge/v1", "api_key": "k"}, r"expected keys of url, model, key_env, timeout"),
        ({"url": "http://judge/v1", "key_env": 3}, r"expected texts as url, model and key_env"),
        ({"url": "http://judge/v1", "timeout": "long"}, r"expected a number as timeout"),
        ({"url": "http://judge/v1", "timeout": 0}, r"turnkey.agent.models.judge.timeout: expected positive seconds"),
    ],
)
def test_entries_that_are_no_endpoints(entry: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AgentConfig(models={"judge": entry}).endpoints()
    with pytest.raises(ConfigError, match="another name than the policy's, policy"):
        AgentConfig(models={"policy/judge": {"url": "http://judge/v1"}}).endpoints()
