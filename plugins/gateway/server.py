"""The HTTP server of a worker process, through which the agents of its episodes ask the model.

==========================================  =============================================================
``POST /{secret}/v1/chat/completions`` ...  a call of the model, in any of the dialects; of another one, of any API
``GET  /{secret}/v1/models``                the policy, with the tokens that fit into its context
``POST /{secret}/reward``                   ``{"reward": 1.0}``, with ``"turn": ID`` of a turn or a ``"role"``
``POST /{secret}/state``                    ``{"key": "..."}``: the state before the next turn, or before ``"turn": ID``
``POST /{secret}/finish``                   the agent has ended; may hold a reward
==========================================  =============================================================

An episode's secret is in the path of its URL. Where a client drops the path, the secret is taken from its API key
(``Authorization: Bearer`` or ``x-api-key``). Whatever has no secret of a running episode is answered with 404.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.agents.base import AgentFailure
from verl_turnkey.envs.answers import read_json
from verl_turnkey.plugins.config.agent import ANYWHERE
from verl_turnkey.plugins.gateway.dialects import DIALECTS
from verl_turnkey.plugins.gateway.exchange import Exchange, Gone, Receive, Send
from verl_turnkey.plugins.gateway.messages import Dialect, GatewayError, Request, invalid
from verl_turnkey.plugins.gateway.session import Session, Turn
from verl_turnkey.plugins.notices import warn_once

COUNT_TOKENS = "/v1/messages/count_tokens"
"""of Anthropic's API: the tokens of the prompt that a request would have"""
PARENT = "x-turnkey-parent"
"""header with the id of the reply that began a sub-agent"""
SLOW_BYTES = 100_000
"""bytes from which a body is read outside the event loop, as any with images is"""
PING_SECONDS = 10.0
"""a stream that waits for the model sends a comment as often, so that nothing between cuts it"""
MOST_EPISODES = 20_000
"""whose calls are counted"""
KEEP_ALIVE_SECONDS = 600
"""an agent's connection may be idle as long: uvicorn's 5 seconds cut it while a tool runs"""


class Gateway:
    """The sessions of this process by their secret, and the ASGI application that serves them."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._servers: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._socket: asyncio.Future[str] | None = None
        self.port = 0

    def add(self, session: Session) -> None:
        self._sessions[session.secret] = session
        _calls.setdefault(session.secret, 0)
        if len(_calls) > MOST_EPISODES:
            del _calls[next(iter(_calls))]

    def url(self, secret: str, host: str) -> str:
        """The base URL of an episode, at an address that :meth:`start` listens on."""
        host = "127.0.0.1" if host in ANYWHERE else host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{secret}/v1"

    def remove(self, session: Session) -> None:
        """From now on calls with its secret are answered with 404."""
        self._sessions.pop(session.secret, None)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen on ``host``; returns the port, which the system chooses for 0."""
        listener = bound(host, port)
        await self._serve(listener)
        self.port = listener.getsockname()[1]
        return self.port

    async def unix_socket(self) -> str:
        """The path of a socket on which it listens, too; it can be bound into a sandbox that has no network."""
        if self._socket is None:
            self._socket = asyncio.ensure_future(self._listen_on_socket())
        return await asyncio.shield(self._socket)

    async def _listen_on_socket(self) -> str:
        folder = tempfile.mkdtemp(prefix="turnkey-gw-")  # for its owner alone
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = f"{folder}/s"  # short: such paths have at most 107 bytes
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        await self._serve(listener)
        return path

    async def _serve(self, listener: socket.socket) -> None:
        import uvicorn

        from verl_turnkey.plugins.gateway.connection import Connection, Server

        listener.listen(1024)
        listener.setblocking(False)
        config = uvicorn.Config(
            self,
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        server = Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the gateway's server stopped while it was starting")
            await asyncio.sleep(0.005)
        self._servers.append(server)
        self._tasks.append(task)

    async def stop(self) -> None:
        """Close all listeners and connections."""
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        dialect: Dialect | None = None
        session, exchange = None, Exchange(receive, send)
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            session, path = self._session(scope["path"], headers)
            if scope["method"] in ("GET", "HEAD"):
                await exchange.json(200, _models(session, path))
                return
            call = path.removesuffix("/count_tokens") if path == COUNT_TOKENS else path
            dialect = next((dialect for dialect in DIALECTS if call == f"/v1{dialect.path}"), None)
            others = session.models is not None and path.startswith("/v1/")
            unknown = dialect is None and path not in ("/reward", "/state", "/finish")
            if scope["method"] != "POST" or (unknown and not others):
                raise GatewayError(404, "not_found", f"there is no {scope['method']} {path[:80]} here")
            with session.bodies.receiving() as take:
                raw = await exchange.body(headers.get("content-length"), take)
                if others:
                    body = await asyncio.to_thread(_object, raw) if len(raw) > SLOW_BYTES else _object(raw)
                    if await session.other_model(body, path, exchange):
                        return
                    if unknown:
                        raise GatewayError(404, "not_found", f"{session.model} has no {path[:80]}")
                read = partial(_read, raw, dialect, session.limits.unsupported)
                images = b"image" in raw
                async with session.bodies.decoding if images else nullcontext():
                    sent = await asyncio.to_thread(read) if images or len(raw) > SLOW_BYTES else read()
                    pictures = [picture for message in getattr(sent, "messages", ()) for picture in message.images]
                    await take(sum(3 * picture.width * picture.height for picture in pictures))
                if dialect is not None and isinstance(sent, Request):
                    if path == COUNT_TOKENS:
                        await exchange.json(200, {"input_tokens": await session.tokens(sent)})
                    else:
                        await self._answer(session, dialect, headers, path, raw, sent, exchange)
                else:
                    session.report(path[1:], sent)
                    await exchange.json(200, {"ok": True})
        except (GatewayError, RecursionError) as error:
            deep = invalid("a message, tool or argument is nested too deeply")
            refusal = deep if isinstance(error, RecursionError) else error
            if session is not None:
                session.refuse(refusal)
            await exchange.error(refusal, dialect)
        except (Gone, asyncio.CancelledError):
            pass
        except Exception as error:  # costs this call; the server goes on
            cause = getattr(error, "cause", None)  # of the model server; Ray's own text begins with a traceback
            raised = cause if isinstance(cause, Exception) else error
            failure = GatewayError(500, "internal_error", f"{type(raised).__name__}: {str(raised)[:300]}")
            message = f"the gateway could not answer a request: {failure.message}"
            warn_once(message)
            if session is not None and session.failed is None:
                session.failed = error if isinstance(error, EnvironmentFailure) else AgentFailure(message)
            await exchange.error(failure, dialect)
        finally:
            exchange.close()

    def _session(self, path: str, headers: Mapping[str, str]) -> tuple[Session, str]:
        """The session of a call, and the path below its secret."""
        names = [name for name in path.split("/") if name]  # clients join URLs with too many slashes
        keys = headers.get("x-api-key", ""), re.sub("(?i)^bearer ", "", headers.get("authorization", "").strip())
        secrets = [*names[:1], *(key.strip() for key in keys)]
        session = next(filter(None, map(self._sessions.get, secrets)), None)
        if names and names[0] in self._sessions:
            del names[0]
        if "v1" in names and (secret := next((secret for secret in secrets if secret in _calls), None)):
            _calls[secret] += 1
        if session is None:
            raise GatewayError(404, "episode_over", "there is no such episode, or it is over")
        while names[:2] == ["v1", "v1"]:  # clients that add it themselves
            del names[0]
        return session, "/" + "/".join(names)

    async def _answer(
        self,
        session: Session,
        dialect: Dialect,
        headers: Mapping[str, str],
        path: str,
        raw: bytes,
        request: Request,
        exchange: Exchange,
    ) -> None:
        once, body = headers.get("idempotency-key"), hashlib.blake2b(raw).digest()
        key = hashlib.blake2b(f"{path}\0{once or ''}\0".encode() + (b"" if once else body)).digest()
        retried = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        request = replace(request, begun_by=headers.get(PARENT) or None)
        running, answered = session.begin(key, request, retried, body if once else None), False
        try:
            while not await exchange.wait(running, PING_SECONDS):
                if request.stream:
                    await exchange.ping()
            turn: Turn = running.result()
            if exchange.gone:
                return  # without a reply that arrives there is no turn
            reply, answered = session.commit(turn), True
            if request.stream:
                await exchange.events(dialect.stream(reply, request))
            else:
                await exchange.json(200, dialect.render(reply, request))
        finally:
            session.end(key, running, answered)


def _read(raw: bytes, dialect: Dialect | None, unsupported: Literal["refuse", "ignore"]) -> Any:
    """A body as the request that it is in the dialect; without one as a JSON object, an empty body as an empty one."""
    body = _object(raw)
    try:
        return body if dialect is None else dialect.parse(body, unsupported=unsupported)
    except GatewayError:
        raise
    except Exception as error:  # a body of another form than that of its API
        what = f"the body cannot be read: {type(error).__name__}: {str(error)[:200]}"
        raise invalid(what) from None


def _object(raw: bytes) -> Mapping[str, Any]:
    try:
        body = read_json(raw.decode()) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise invalid(f"expected a JSON object, got {type(body).__name__}")
    return body


def _models(session: Session, path: str) -> dict[str, Any]:
    others = [] if session.models is None else session.models.names
    model = {
        "id": session.model,
        "object": "model",
        "created": 1,
        "owned_by": "verl-turnkey",
        "max_model_len": session.limits.room,
        "type": "model",
        "display_name": session.model,
        "created_at": "1970-01-01T00:00:00Z",
    }
    if path == "/v1/models":
        ends = {"first_id": session.model, "last_id": [session.model, *others][-1]}
        data = [model, *({"id": name, "object": "model", "created": 1, "owned_by": "user"} for name in others)]
        return {"object": "list", "data": data, "has_more": False, **ends}
    if path.startswith("/v1/models/"):
        return {**model, "id": path.removeprefix("/v1/models/")}
    raise GatewayError(404, "not_found", f"there is no GET {path[:80]} here")


def bound(host: str, port: int = 0) -> socket.socket:
    """A socket at the address ``turnkey.agent.listen``.

    Raises:
        ConfigError: this node does not have it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only with it
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"turnkey.agent.listen={host}: {socket.gethostname()} cannot listen there ({error.strerror}): expected "
            "an address of every node that runs agents, such as 127.0.0.1, or 0.0.0.0 in a closed network"
        ) from None
    return listener


_calls: dict[str, int] = {}
"""by an episode's secret, of running episodes and of the last :data:`MOST_EPISODES`"""


def calls_of(secret: str) -> int:
    """Calls that came for an episode of this process, after its end included."""
    return _calls.get(secret, 0)


_gateways: dict[asyncio.AbstractEventLoop, tuple[Gateway, asyncio.Task[int]]] = {}


async def gateway(host: str = "127.0.0.1") -> Gateway:
    """The gateway of this process, started by the first episode on its event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _gateways:
        new = Gateway()
        _gateways[loop] = new, loop.create_task(new.start(host))
    started, starting = _gateways[loop]
    await asyncio.shield(starting)
    return started
