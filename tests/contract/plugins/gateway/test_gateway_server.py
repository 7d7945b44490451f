"""The server of a process: episodes that are over, sockets, streams, and clients that mean harm."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import io
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_parts import ASKED, LIMITS, LOOK, Script, ask, called, chats, codec, openai, run, seeing, spelled
from openai import BadRequestError, InternalServerError, NotFoundError
from PIL import Image
from ray.exceptions import RayTaskError

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.gateway import exchange
from verl_turnkey.plugins.gateway import session as sessions
from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.gateway.messages import GatewayError, Message, Request
from verl_turnkey.plugins.gateway.server import Gateway, bound
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import Limits, Turn

WAYS: tuple[tuple[str, dict[str, str]], ...] = (
    ("/SECRET/v1/models", {}),
    ("/SECRET/v1/models/", {}),
    ("//SECRET//v1//models", {}),
    ("/SECRET/v1/v1/models", {}),
    ("/SECRET//v1//v1/models//", {}),
    ("/SECRET/v1/models?limit=20", {"authorization": "Bearer other", "x-api-key": "other"}),
    ("//v1/models/", {"authorization": "bearer SECRET"}),
    ("/v1/models", {"authorization": "BEARER  SECRET "}),
    ("/v1/models", {"Authorization": "SECRET"}),
    ("/v1/models", {"x-api-key": "SECRET"}),
    ("/v1/models", {"x-api-key": "none", "authorization": "Bearer SECRET"}),
    ("/v1/models", {"x-api-key": "SECRET", "authorization": "Bearer none"}),
)
"""how clients reach an episode"""


async def raw(port: int, request: str) -> str:
    """What the gateway answers on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


def test_an_address_that_this_node_does_not_have_is_named_with_it(monkeypatch) -> None:
    bound("127.0.0.2").close()

    class Elsewhere(socket.socket):
        """What a kernel without net.ipv4.ip_nonlocal_bind answers."""

        def bind(self, address: Any) -> None:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket, "socket", Elsewhere)
    named = rf"turnkey\.agent\.listen=198\.51\.100\.7: {socket.gethostname()} cannot listen there \(Cannot assign"
    with pytest.raises(ConfigError, match=named):
        bound("198.51.100.7")


async def test_an_episode_that_is_over_is_not_found_and_two_never_mix() -> None:
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
        assert (await web.get(f"http://127.0.0.1:{server.port}", headers=by_key)).status_code == 404
    for path, keys in WAYS:
        lines = [f"GET {path} HTTP/1.1", "host: x", "connection: close", *map(": ".join, keys.items()), "", ""]
        answer = await raw(server.port, "\r\n".join(lines).replace("SECRET", sessions[0].secret))
        assert answer.startswith("HTTP/1.1 200 "), (path, keys)
    server.remove(sessions[0])
    await sessions[0].close(0.1)
    async with openai(urls[0]) as client:
        with pytest.raises(NotFoundError):
            await ask(client)
    async with openai(urls[1]) as client:
        await ask(client)
    await server.stop()
    ada, bob = sessions
    assert {turn.reply.text for turn in ada.turns} == {"Ada"}
    assert {turn.reply.text for turn in bob.turns} == {"Bob"}
    assert (len(ada.turns), len(bob.turns)) == (4, 5)
    ids = [turn.reply.id for session in (ada, bob) for turn in session.turns]
    assert len(set(ids)) == len(ids)


async def test_a_sandbox_reaches_it_by_a_socket_of_its_owner_alone() -> None:
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
    assert reply.message.content == "Here."


def test_calls_that_run_at_the_end_are_dropped() -> None:
    generating = asyncio.Event()

    async def model() -> None:
        generating.set()
        await asyncio.sleep(60)

    async def agent(url: str) -> Any:
        async def late() -> None:
            async with openai(url, max_retries=0) as client:
                await ask(client)

        running = asyncio.ensure_future(late())
        await generating.wait()
        return running

    played = run(agent, ["Late."], wait=model, grace=0.1)
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [0, 9])
async def test_a_client_that_closes_its_side_gets_the_reply(stream: bool, late: int) -> None:
    """``late``: bytes that the client has got when the model answers; they are written to see whether it is there."""
    gate = asyncio.Event()
    async with two_episodes(gate.wait) as (port, session, _):
        body = json.dumps({"model": "policy", "messages": ASKED, "stream": stream})
        head = f"POST /{session.secret}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}\r\n\r\n{body}".encode())
        writer.write_eof()
        beginning = await reader.readexactly(late)
        gate.set()
        answer = (beginning + await reader.read()).decode()
        writer.close()
    assert answer.startswith("HTTP/1.1 200 OK\r\n")
    assert "Here." in answer
    assert len(session.turns) == 1


async def test_replies_do_not_wait_for_acknowledgements() -> None:
    server = Gateway()
    _, writer = await asyncio.open_connection("127.0.0.1", await server.start())
    while not (connections := server._servers[0].server_state.connections):
        await asyncio.sleep(0.01)
    sockets = [connection.transport.get_extra_info("socket") for connection in connections]
    writer.close()
    options = [connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for connected in sockets]
    await server.stop()
    assert options == [1]


def test_a_result_that_fits_no_prompt_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(client: Any) -> None:
        reply = (await ask(client, tools=[LOOK])).message
        for method in ("first", "continued"):
            monkeypatch.setattr(Codec, method, lambda *_: pytest.fail("it was tokenized"))
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "a page\n" * 600_000}
        with pytest.raises(BadRequestError, match=r"messages take more than [0-9]{5,} tokens") as error:
            await ask(client, [*ASKED, spelled(reply), result], tools=[LOOK])
        assert error.value.code == "context_length_exceeded"

    assert chats(agent, [called('{"place": "cave"}')], client={"max_retries": 0}).session.failed is None


def test_a_failure_is_told_in_the_words_of_the_model_server() -> None:
    """Not in Ray's, whose first 300 characters are where it happened."""
    refused = RayTaskError("generate", "Traceback\n" * 50, ValueError("temperature must be in [0, 2]"), "ray", 1, "::1")

    async def agent(client: Any) -> None:
        with pytest.raises(InternalServerError, match="ValueError: temperature must be in"):
            await ask(client)

    def raises(_: str) -> str:
        raise refused.as_instanceof_cause()

    failed = chats(agent, raises, client={"max_retries": 0}).session.failed
    assert str(failed) == (
        "agent failure: the gateway could not answer a request: ValueError: temperature must be in [0, 2]"
    )


@asynccontextmanager
async def two_episodes(
    wait: Callable[[], Awaitable[Any]] | None = None, limits: Limits = LIMITS
) -> AsyncIterator[tuple[int, Session, Session]]:
    """The port of a gateway, a session for an agent that means harm, and one that must not notice it.

    ``wait``, ``limits``: of the first one.
    """
    model, server = codec(), Gateway()
    hostile = Session(model, Script(model, lambda _: "Here.", wait), {}, limits)
    honest = Session(model, Script(model, lambda _: "Here."), {}, LIMITS)
    for session in (hostile, honest):
        server.add(session)
    try:
        yield await server.start(), hostile, honest
    finally:
        await server.stop()


async def works(port: int, session: Session) -> None:
    async with openai(f"http://127.0.0.1:{port}/{session.secret}/v1") as client:
        assert (await ask(client)).message.content == "Here."


async def test_hostile_clients_cost_their_own_episode_alone() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20

    async with two_episodes() as (port, hostile, honest), httpx.AsyncClient(timeout=60) as web:
        url = f"http://127.0.0.1:{port}/{hostile.secret}/v1/chat/completions"
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
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
        arguments = '{"a":' * 600 + "1" + "}" * 600
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        nested = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "And?"}]
        statuses.append((await web.post(url, json={"model": "policy", "messages": nested})).status_code)
        assert statuses == [413, 413, 400, 400, 400, 400, 400, 400]
        assert hostile.failed is None
        await works(port, honest)
        for _, writer in slow:
            writer.close()
    assert honest.failed is None
    assert len(honest.turns) == 1


async def test_a_flood_of_requests_costs_its_own_episode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "AT_ONCE", 4)
    gate = asyncio.Event()
    limit = httpx.Limits(max_connections=None)
    async with (
        two_episodes(gate.wait, Limits(4000, 200, turns=6)) as (port, hostile, honest),
        httpx.AsyncClient(timeout=60, limits=limit) as web,
    ):

        async def post(number: int) -> int:
            body = {"model": "policy", "messages": [{"role": "user", "content": str(number)}]}
            url = f"http://127.0.0.1:{port}/{hostile.secret}/v1/chat/completions"
            return (await web.post(url, json=body)).status_code

        flood = [asyncio.ensure_future(post(number)) for number in range(100)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        await works(port, honest)
        gate.set()
        statuses = [*await asyncio.gather(*flood), *[await post(number) for number in range(100, 110)]]
    assert len(hostile.turns) == statuses.count(200) == 6
    assert {*statuses} == {200, 400}


def test_calls_beyond_those_that_run_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "AT_ONCE", 4)
    running, most, full = 0, 0, asyncio.Event()

    async def model() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            full.set()
        await full.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        running -= 1

    async def agent(client: Any) -> Any:
        questions = [[{"role": "user", "content": str(number)}] for number in range(30)]
        return await asyncio.gather(*(ask(client, messages) for messages in questions))

    played = chats(
        agent, lambda prompt: "Here.", wait=model, limits=replace(LIMITS, turns=30), client={"max_retries": 0}
    )
    assert [choice.message.content for choice in played.value] == ["Here."] * 30
    assert most == 4


async def test_calls_that_wait_in_line_at_the_end_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "AT_ONCE", 1)
    gate, model = asyncio.Event(), codec()
    script = Script(model, lambda _: "Here.", gate.wait)
    session = Session(model, script, {}, LIMITS)
    request = Request((Message("user", "Where?"),))
    tasks = [session.begin(bytes([number]), request, False) for number in range(3)]
    while not script.prompts:
        await asyncio.sleep(0.01)
    closing = asyncio.ensure_future(session.close(60))
    await asyncio.sleep(0)
    gate.set()
    await closing
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [Turn, GatewayError, GatewayError]
    assert len(script.prompts) == 1


async def test_a_client_that_never_reads_its_replies_runs_out_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "AT_ONCE", 2)
    generating, gate = asyncio.Event(), asyncio.Event()

    async def model() -> None:
        generating.set()
        await gate.wait()

    limits = Limits(4000, 200, turns=2)
    async with two_episodes(model, limits) as (port, session, _), httpx.AsyncClient(timeout=60) as web:
        url = f"http://127.0.0.1:{port}/{session.secret}/v1/chat/completions"
        body = {"model": "policy", "messages": ASKED}
        for _ in range(4):
            generating.clear()
            gate.clear()
            call = asyncio.ensure_future(web.post(url, json=body))
            await generating.wait()
            call.cancel()
            while session.bodies.bytes:  # until the gateway has noticed
                await asyncio.sleep(0.01)
            gate.set()
            while session._tasks:
                await asyncio.sleep(0.01)
        refusal = await web.post(url, json=body)
    assert refusal.status_code == 400
    assert "closed the connection before 4 replies" in refusal.text
    assert not session.turns


async def test_bodies_that_are_sent_at_the_same_time_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODIES_BYTES", 2**20)
    async with two_episodes() as (port, hostile, honest), httpx.AsyncClient(timeout=60) as web:

        async def post(session: Session) -> int:
            url = f"http://127.0.0.1:{port}/{session.secret}/reward"
            return (await web.post(url, content=b'{"reward": 1.0}' + b" " * 100_000)).status_code

        head = f"POST /{hostile.secret}/reward HTTP/1.1\r\nhost: x\r\ncontent-length: 2000000\r\n\r\n"
        _, slow = await asyncio.open_connection("127.0.0.1", port)
        slow.write(head.encode() + b" " * 1_000_000)
        while hostile.bodies.bytes < 1_000_000:
            await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(post(hostile))
        statuses = [await post(honest)]
        monkeypatch.setattr(exchange, "BODY_SECONDS", 0.0)
        statuses.append(await post(hostile))
        assert not waiting.done()
        monkeypatch.setattr(exchange, "BODY_SECONDS", 60.0)
        slow.close()
        assert [*statuses, await waiting] == [200, 503, 200]


async def test_a_url_without_end_is_cut_off() -> None:
    async with two_episodes() as (port, _, honest):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = 0
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /")
            while sent < 2**22:
                writer.write(b"x" * 2**14)
                await writer.drain()
                sent += 2**14
                await asyncio.sleep(0)
            await asyncio.wait_for(reader.read(), 5)
        await works(port, honest)
    assert sent < 2**22


async def test_refused_requests_are_not_kept() -> None:
    async with two_episodes(limits=Limits(300, 100)) as (port, session, _), httpx.AsyncClient(timeout=60) as web:
        url = f"http://127.0.0.1:{port}/{session.secret}/v1/chat/completions"
        too_long = {"model": "policy", "messages": [{"role": "user", "content": "word " * 300}]}
        too_many = {"model": "policy", "messages": [{"role": "user", "content": ""}] * 10_000}
        statuses = [(await web.post(url, json=body)).status_code for body in (too_long, too_many)]
        assert "more than 10000 tokens" in str(session.refused)
        assert [*statuses, session._started, len(session._running)] == [400, 400, 1, 0]


def picture(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def results(calls: Sequence[Any], *grays: int) -> list[Any]:
    """A result for each call, with a picture in it."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": [picture(Image.new("L", (9, 9), gray))]}
        for call, gray in zip(calls, grays, strict=True)
    ]


def test_images_in_results_of_tools_follow_the_last_result() -> None:
    async def agent(url: str) -> Any:
        messages = [*ASKED]
        async with openai(url) as client:
            for grays in ((10, 20), (30,), ()):
                reply = (await ask(client, messages, tools=[LOOK])).message
                messages += [spelled(reply), *results(reply.tool_calls or [], *grays)]
                messages += [{"role": "user", "content": [picture(Image.new("L", (9, 9), 40))]}] * (len(grays) == 1)
            drawn = [*ASKED, {"role": "assistant", "content": [picture(Image.new("L", (9, 9)))]}, *ASKED[1:]]
            with pytest.raises(BadRequestError, match="images belong in messages of the user and in results of tools"):
                await ask(client, drawn)

    model, look = seeing(), '{"place": "cave"}'
    played = run(agent, [called(look, look), called(look), "Here."], model=model)
    assert played.breaks == ["first"]
    levels = [[image.getpixel((0, 0))[0] for image in turn.prompt.images or ()] for turn in played.session.turns]
    assert levels == [[], [10, 20], [10, 20, 30, 40]]
    patch = model.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [prompt.count(patch) for prompt in played.script.prompts] == [4 * len(grays) for grays in levels]
    last = played.session.turns[2]
    for ids in (last.prompt.ids, model.first(last.request.messages, [LOOK], last.prompt.images)):
        text = model.tokenizer.decode([*ids]).replace("<|image_pad|>" * 4, "<image>")
        assert "<|im_start|>tool\n<|im_end|>\n<|im_start|>user\n<image><image><|im_end|>\n<|im_start|>assist" in text
    assert played.rows[0].multi_modal_data["images"] == last.prompt.images


def test_a_model_without_images_takes_none_in_results_of_tools() -> None:
    async def agent(client: Any) -> Any:
        reply = (await ask(client, tools=[LOOK])).message
        past = [*ASKED, spelled(reply)]
        with pytest.raises(BadRequestError, match="this model takes no images"):
            await ask(client, [*past, *results(reply.tool_calls, 10)], tools=[LOOK])
        dark = [{"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "dark"}]
        return await ask(client, [*past, *dark], tools=[LOOK])

    played = chats(agent, [called('{"place": "cave"}'), "Here."])
    assert played.value.message.content == "Here."
    assert played.session.failed is None


def test_images_are_bounded_and_for_models_that_take_them() -> None:
    def body(image: Image.Image, times: int) -> Any:
        return {"model": "policy", "messages": [{"role": "user", "content": [picture(image)] * times}]}

    async def agent(url: str) -> Any:
        async with httpx.AsyncClient(timeout=60) as web:
            bodies = (body(Image.new("L", (6000, 6000)), 2), body(Image.new("L", (9, 9)), 1))
            return [(await web.post(f"{url}/chat/completions", json=body)).text for body in bodies]

    large, small = run(agent, []).value
    assert "may have 67108864 pixels together" in large
    assert "this model takes no images" in small


def test_bodies_of_another_form_are_refused_and_cost_nothing_else() -> None:
    half = {"model": "policy", "messages": [{"role": "user", "content": "half \ud83d"}]}
    wrong = ({"input": "Where?", "include": True}, {"input": "Where?", "include": 7})

    async def agent(url: str) -> Any:
        async with httpx.AsyncClient(timeout=60) as web:
            statuses = [(await web.post(f"{url}/responses", json=body)).status_code for body in wrong]
            content = json.dumps(half)  # as clients in Python write it, in ASCII
            return [*statuses, (await web.post(f"{url}/chat/completions", content=content)).status_code]

    played = run(agent, ["Here."])
    assert played.value == [400, 400, 200]
    assert played.session.failed is None
    assert played.session.turns[0].request.messages[0].text == "half ?"
