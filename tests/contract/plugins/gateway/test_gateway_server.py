"""The server of a process: episodes that are over, sockets, streams, and clients that mean harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_parts import LIMITS, Script, codec, openai, run
from openai import NotFoundError
from test_clients import ASKED, spelled
from test_endings import ask

from verl_turnkey.plugins.gateway.server import Gateway
from verl_turnkey.plugins.gateway.session import Session


def test_an_episode_that_is_over_is_not_found_and_two_never_mix() -> None:
    async def both() -> list[Session]:
        model = codec()
        server = Gateway()
        await server.start()
        sessions = [Session(model, Script(model, [name] * 9), {}, LIMITS) for name in ("Ada", "Bob")]
        for session in sessions:
            server.add(session)
        urls = [f"http://127.0.0.1:{server.port}/{session.secret}/v1" for session in sessions]

        async def chat(url: str) -> None:
            async with openai(url) as client:
                messages: list[Any] = [*ASKED]
                for _ in range(4):
                    messages += [spelled((await ask(client, messages)).message), {"role": "user", "content": "And?"}]

        await asyncio.gather(*map(chat, urls))
        async with httpx.AsyncClient() as web:
            assert (await web.get(f"{urls[0]}/models")).json()["data"][0]["max_model_len"] == LIMITS.room
            by_key = {"authorization": f"Bearer {sessions[0].secret}"}
            assert (await web.get(f"http://127.0.0.1:{server.port}/v1/models", headers=by_key)).status_code == 200
            assert (await web.get(f"http://127.0.0.1:{server.port}/guess/v1/models")).status_code == 404
        server.remove(sessions[0])
        await sessions[0].close(0.1)
        async with openai(urls[0]) as client:
            with pytest.raises(NotFoundError):
                await ask(client)
        async with openai(urls[1]) as client:
            await ask(client)
        await server.stop()
        return sessions

    ada, bob = asyncio.run(both())
    assert {turn.reply.text for turn in ada.turns} == {"Ada"}
    assert {turn.reply.text for turn in bob.turns} == {"Bob"}
    assert (len(ada.turns), len(bob.turns)) == (4, 5)
    ids = [turn.reply.id for session in (ada, bob) for turn in session.turns]
    assert len(set(ids)) == len(ids)


def test_a_sandbox_reaches_it_by_a_socket_of_its_owner_alone() -> None:
    async def over_socket() -> Any:
        model = codec()
        server, session = Gateway(), Session(model, Script(model, ["Here."]), {}, LIMITS)
        await server.start()
        server.add(session)
        path = await server.unix_socket()
        assert path == await server.unix_socket()
        assert Path(path).parent.stat().st_mode & 0o077 == 0
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with (
            httpx.AsyncClient(transport=transport) as web,
            openai(f"http://127.0.0.1:8000/{session.secret}/v1", http_client=web) as client,
        ):
            reply = await ask(client)
        await server.stop()
        return reply

    assert asyncio.run(over_socket()).message.content == "Here."


def test_calls_that_run_at_the_end_are_dropped() -> None:
    async def agent(url: str) -> Any:
        async def late() -> None:
            async with openai(url, max_retries=0) as client:
                await ask(client)

        running = asyncio.ensure_future(late())
        await asyncio.sleep(0.3)
        return running

    played = run(agent, ["Late."], wait=lambda: asyncio.sleep(60), grace=0.1)
    assert len(played.script.prompts) == 1
    assert not played.session.turns


def test_a_stream_that_waits_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_turnkey.plugins.gateway.server.PING_SECONDS", 0.1)

    async def agent(url: str) -> Any:
        body = {"model": "policy", "messages": ASKED, "stream": True}
        async with httpx.AsyncClient() as web, web.stream("POST", f"{url}/chat/completions", json=body) as answer:
            return [line async for line in answer.aiter_lines() if line]

    played = run(agent, ["Here."], wait=lambda: asyncio.sleep(0.35))
    assert played.value[0] == ": ping"
    assert json.loads(played.value[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
    assert played.value[-1] == "data: [DONE]"


def test_hostile_clients_cost_their_own_episode_alone() -> None:
    async def both() -> Session:
        model = codec()
        server = Gateway()
        await server.start()
        hostile, honest = (Session(model, Script(model, lambda _: "Here."), {}, LIMITS) for _ in range(2))
        for session in (hostile, honest):
            server.add(session)
        root = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(timeout=60) as web:
            url = f"{root}/{hostile.secret}/v1/chat/completions"

            async def endless() -> AsyncIterator[bytes]:
                for _ in range(100):
                    yield b" " * 2**20

            slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
            begun = f"POST /{hostile.secret}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n"
            for _, writer in slow:
                writer.write(begun.encode())
            statuses = [(await web.post(url, content=b" " * 100 * 2**20)).status_code]
            try:
                statuses.append((await web.post(url, content=endless())).status_code)
            except httpx.TransportError:  # it is cut off while it still sends
                statuses.append(413)
            deep = "[" * 100_000 + "]" * 100_000
            bodies = (b"\xff", b"[1]", b"{}", f'{{"messages": {deep}}}'.encode(), b'{"messages": [{"role": "x"}]}')
            statuses += [(await web.post(url, content=body)).status_code for body in bodies]
            assert statuses == [413, 413, 400, 400, 400, 400, 400]
            async with openai(f"{root}/{honest.secret}/v1") as client:
                assert (await ask(client)).message.content == "Here."
            for _, writer in slow:
                writer.close()
        await server.stop()
        return honest

    honest = asyncio.run(both())
    assert honest.failed is None
    assert len(honest.turns) == 1
