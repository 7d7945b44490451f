"""Which call of the model a request is another attempt at: SDKs send one again whose reply they did not get.

Equal requests are calls of their own: an agent may want several samples. One that says that it is sent again
(``x-stainless-retry-count``) takes a call of the same body whose client has left before its reply, each call once. If
there is none, or it has failed, the earlier attempt was refused or never arrived, so this is a new call; except that
the only call of this body, if it was answered, is the one whose reply did not get through. ``Idempotency-Key`` names a
call once and for all.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from verl_turnkey.plugins.gateway.messages import GatewayError

Call = asyncio.Task[Any]


@dataclass
class _Attempts:
    """At equal requests, or at those of one idempotency key."""

    left: list[Call] = field(default_factory=list)
    """whose clients left before the reply"""
    answered: list[Call] = field(default_factory=list)
    refused: int = 0
    """answered with an error after which SDKs try again"""
    named: tuple[bytes, Call] | None = None
    """of an idempotency key: the body and the call"""


class Retries:
    """The attempts of one episode, by ``key``: equal for equal requests, or for those of one idempotency key.

    ``retried``: the client says that it has sent the request before. ``named``: the body of a request that has an
    idempotency key.
    """

    def __init__(self) -> None:
        self._attempts: defaultdict[bytes, _Attempts] = defaultdict(_Attempts)

    def __len__(self) -> int:
        return len(self._attempts)

    def earlier(self, key: bytes, retried: bool, named: bytes | None) -> Call | None:
        """The call that a request is another attempt at; None: it is a new one.

        Raises:
            GatewayError: another body had that key.
        """
        attempts = self._attempts.get(key)
        if attempts is None:
            return None
        if attempts.named is not None:
            if attempts.named[0] != named:
                words = "Idempotency-Key: another request of this episode used it: give each request its own key"
                raise GatewayError(400, "invalid_request", words)
            return None if _failed(attempts.named[1]) else attempts.named[1]
        if not retried:
            return None
        if attempts.left:
            call = attempts.left.pop(0)
            return None if _failed(call) else call
        if attempts.refused:
            attempts.refused -= 1
            return None
        return attempts.answered[0] if len(attempts.answered) == 1 else None

    def began(self, key: bytes, call: Call, named: bytes | None) -> None:
        if named is not None:
            self._attempts[key].named = named, call

    def ended(self, key: bytes, call: Call, answered: bool) -> None:
        """An attempt is over; ``answered``: its client has the reply."""
        attempts = self._attempts[key]
        if _failed(call):
            error, attempts.named = None if call.cancelled() else call.exception(), None
            attempts.refused += not (isinstance(error, GatewayError) and error.status < 408)
        elif not answered:
            attempts.left.append(call)
        elif call not in attempts.answered:
            attempts.answered.append(call)
        if attempts == _Attempts():
            del self._attempts[key]


def _failed(call: Call) -> bool:
    return call.done() and (call.cancelled() or call.exception() is not None)
