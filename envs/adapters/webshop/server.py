"""A small JSON server for WebShop, run by the Python that WebShop is installed in: standard library only, Python 3.8.

    python webshop_server.py --products 1000 --port 8020      # in WebShop's checkout
    python webshop_server.py --factory my_shop:make           # any shop with WebShop's text interface

One server holds one catalogue and any number of shoppers. Calls are POSTs of JSON, carried out one at a time:

    /info   {}                                          -> {"goals": 6910}
    /reset  {"session": 3, "id": null}                  -> a page with the "id" of the shopper
    /step   {"id": "7f3a...", "action": "click[buy now]"} -> a page

A page is ``{"id", "observation", "reward", "done", "has_search_bar", "clickables", "options"}``. An ``id`` given to
``/reset`` is used again. Errors are 400 (bad call), 404 (unknown id or path) and 500 (the shop raised), with
``{"error": ...}``.

A shop has ``reset(session=int) -> (observation, _)``, ``step(action) -> (observation, reward, done, _)`` and
``get_available_actions() -> {"has_search_bar": bool, "clickables": [...]}``. It may have ``options``, a dict of what is
chosen on the current page (WebShop's plain text does not show it), and ``goals``, the number of sessions.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import sys
import threading
import traceback
import uuid
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Dict  # noqa: UP035 - this file has to run on Python 3.8

JSON = Dict[str, Any]  # noqa: UP006


class CallError(Exception):
    """A call that cannot be carried out, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Shops:
    """The shoppers of one catalogue. Safe in threads: everything happens under one lock.

    Args:
        factory: makes a shop for one more shopper.
        limit: shoppers kept; beyond it the least recently used one is dropped.
    """

    def __init__(self, factory: Callable[[], Any], limit: int = 1000) -> None:
        self._factory = factory
        self._limit = limit
        self._lock = threading.Lock()
        self._shops: OrderedDict[str, Any] = OrderedDict()
        self._routes = {"/info": self._info, "/reset": self._reset, "/step": self._step}

    def call(self, path: str, payload: JSON) -> JSON:
        """Answer one call of the protocol. Raises ``CallError``, and what the shop raises."""
        if path not in self._routes or not isinstance(payload, dict):
            raise CallError(404, f"no such call: {path}. There are {', '.join(self._routes)}, with a JSON object")
        with self._lock:
            return self._routes[path](payload)

    def _info(self, payload: JSON) -> JSON:
        shop = next(iter(self._shops.values())) if self._shops else self._factory()
        return {"goals": getattr(shop, "goals", None)}

    def _reset(self, payload: JSON) -> JSON:
        session = payload.get("session")
        if isinstance(session, bool) or not isinstance(session, int) or session < 0:
            raise CallError(400, f"session must be an integer from 0, not {session!r}")
        id = self._find(payload.get("id"))
        return self._page(id, self._shops[id].reset(session=session)[0], 0.0, False)

    def _step(self, payload: JSON) -> JSON:
        id, action = payload.get("id"), payload.get("action")
        if not isinstance(action, str):
            raise CallError(400, f"action must be text, not {action!r}")
        if id not in self._shops:
            raise CallError(404, f"no shopper {id!r}: the server was started anew, or has more than {self._limit}")
        self._shops.move_to_end(id)
        return self._page(id, *self._shops[id].step(action)[:3])

    def _find(self, id: str | None) -> str:
        """The shopper ``id`` if it is known, else a new one."""
        if id in self._shops:
            self._shops.move_to_end(id)
            return id
        new = uuid.uuid4().hex  # random, so that ids from before a restart stay unknown
        self._shops[new] = self._factory()
        if len(self._shops) > self._limit:
            self._shops.popitem(last=False)
        return new

    def _page(self, id: str, observation: str, reward: float, done: bool) -> JSON:
        shop = self._shops[id]
        actions = shop.get_available_actions()
        return {
            "id": id,
            "observation": observation,
            "reward": float(reward),
            "done": bool(done),
            "has_search_bar": bool(actions["has_search_bar"]),
            "clickables": list(actions["clickables"]),
            "options": dict(getattr(shop, "options", {})),
        }


class _WebShop:
    """WebShop's own text environment, with ``goals`` and ``options``."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.step = env.step
        self.get_available_actions = env.get_available_actions
        self.goals = len(env.server.goals)

    def reset(self, session: int) -> Any:
        self._env.server.user_sessions.pop(self._env.session, None)  # else the catalogue keeps every session
        return self._env.reset(session=session)

    @property
    def options(self) -> JSON:
        return self._env.server.user_sessions[self._env.session]["options"]


def webshop(products: int | None = None, human_goals: bool = True, observation_mode: str = "text") -> Callable[[], Any]:
    """A factory of WebShop's text environments that share one catalogue, to be called in WebShop's checkout."""
    # Prices and price limits are drawn from the global generator while the catalogue loads, before WebShop seeds it.
    random.seed(233)
    from web_agent_site.envs import WebAgentTextEnv  # pyright: ignore[reportMissingImports]

    arguments = {"observation_mode": observation_mode, "num_products": products, "human_goals": human_goals}
    catalogue = WebAgentTextEnv(**arguments).server
    numbers = itertools.count()
    # A prefix for each: shoppers with the same goal would share a session.
    return lambda: _WebShop(WebAgentTextEnv(server=catalogue, session_prefix=f"{next(numbers)}-", **arguments))


def load_factory(name: str) -> Callable[[], Any]:
    """The function ``module:function``. Raises ValueError, which says what is wrong."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"the factory must be importable as module:function, {name!r} is not ({error})") from error


def serve(shops: Shops, host: str, port: int) -> ThreadingHTTPServer:
    """A server, not yet running; port 0 takes any free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length") or 0)
                try:
                    payload = json.loads(self.rfile.read(length) or b"{}")
                except ValueError as error:
                    raise CallError(400, f"the call is not JSON: {error}") from error
                status, answer = 200, shops.call(self.path, payload)
            except CallError as error:
                status, answer = error.status, {"error": str(error)}
            except Exception as error:  # an error of the shop fails this call only
                traceback.print_exc()
                status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            # One send for header and body: two would wait for each other's acknowledgement.
            self._headers_buffer.append(b"\r\n" + body)  # pyright: ignore[reportAttributeAccessIssue]
            self.flush_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1024  # the episodes of a batch call at the same moment

    return Server((host, port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="JSON server for WebShop, or for a shop with its text interface")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from other machines")
    parser.add_argument("--port", type=int, default=8020)
    parser.add_argument("--products", type=int, help="products of WebShop's catalogue: 100, 1000, 100000; default: all")
    parser.add_argument("--synthetic-goals", action="store_true", help="generated goals instead of the human ones")
    parser.add_argument("--factory", help="module:function that makes a shop, instead of WebShop")
    parser.add_argument("--limit", type=int, default=1000, help="shoppers at the same time")
    options = parser.parse_args()
    sys.path[0] = ""  # the working directory in place of this file's folder, whose modules would hide others
    factory = (
        load_factory(options.factory)
        if options.factory
        else webshop(options.products, human_goals=not options.synthetic_goals)
    )
    server = serve(Shops(factory, options.limit), options.host, options.port)
    print(f"shop server on http://{options.host}:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
