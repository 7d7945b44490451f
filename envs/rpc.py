"""JSON over HTTP with the standard library, for environments and retrievers that are servers.

Proxies from environment variables are ignored: these servers run in the same cluster, where a proxy that swallows calls
to 127.0.0.1 is the more common accident. A call may change an environment: it is sent again only when it certainly did
not arrive, which http.client can tell and urllib cannot. The client of judges (``rewards/endpoint.py``) is separate
because its needs are the opposite: proxies on the way to hosted models, questions that may be asked twice, and waits
(``Retry-After``) that hold no thread.
"""

from __future__ import annotations

import http.client
import json
import time
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from verl_turnkey.envs.errors import EnvironmentKwargsError

_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
_BUSY = (502, 503, 504)  # a proxy or a server that asks the client to retry later


def on_this_machine(url: str) -> bool:
    """Whether a server is reached by this machine's own name or loopback address, as by no proxy."""
    host = urlsplit(url).hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


class ServerError(RuntimeError):
    """A server cannot be reached, refused a call, or answered in an unexpected form."""


def check_url(url: Any, key: str) -> str:
    """``url`` without a slash at its end. ``key`` is the argument that the error names."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        good = parts.scheme in _CONNECTIONS and bool(parts.hostname) and parts.port != 0
        good = good and "@" not in parts.netloc  # a login would not be sent, and errors would show it
    except ValueError:  # half an IPv6 address, or a port that is not a number
        good = False
    if not good:
        raise EnvironmentKwargsError(f"{key} must be a URL like http://127.0.0.1:8000, without a login, not {url!r}")
    return url.rstrip("/")


def post_json(url: str, payload: Any, *, timeout: float, key: str, attempts: int = 3, repeatable: bool = False) -> Any:
    """Send ``payload`` and return the answer, both JSON.

    Args:
        timeout: seconds to wait for the connection, and for each piece of the answer.
        key: the configuration key that holds the address, for the errors.
        attempts: how often to try, with growing pauses (0.2 s, 0.4 s, ...).
        repeatable: whether asking twice does no harm. A call that is not repeatable is tried again only when it
            certainly did not arrive.

    Raises:
        ServerError: after the last attempt.
    """
    # Servers do not expect half a surrogate pair, which a decoder can leave in a text.
    body = json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace")
    reason = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(0.1 * 2**attempt)
        try:
            return _post(url, body, timeout)
        except _NotSentError as error:
            reason = f"cannot be reached ({error}): is it running? Its address is set in {key}"
        except _RefusedError as error:
            reason = f"answered {error}"
            if not (repeatable and error.status in _BUSY):
                break
        except (OSError, http.client.HTTPException) as error:
            reason = f"did not answer within {timeout:g} s or broke off ({type(error).__name__}: {error})"
            if not repeatable:
                break
    raise ServerError(f"the server at {url} {reason}")


class _NotSentError(Exception):
    """No connection: the call did not arrive."""


class _RefusedError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:1000]}")
        self.status = status


def _post(url: str, body: bytes, timeout: float) -> Any:
    parts = urlsplit(url)
    connection = _CONNECTIONS[parts.scheme](parts.hostname or "", parts.port, timeout=timeout)
    try:
        try:
            connection.connect()
        except OSError as error:
            raise _NotSentError(error) from None
        # http.client sets TCP_NODELAY, so that its two sends (header, body) do not wait for an acknowledgement.
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, {"Content-Type": "application/json", "Connection": "close"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise _RefusedError(answer.status, text.decode("utf-8", "replace"))
    try:
        return json.loads(text)
    except ValueError:
        raise _RefusedError(answer.status, f"no JSON, but {text[:200]!r}") from None
