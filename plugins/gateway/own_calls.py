"""Ids of calls as the gateway gave them, in requests of clients that give calls and results ids of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from verl_turnkey.plugins.gateway.messages import Message, Reply, ToolCall


class OwnCalls:
    """The calls of an episode's replies. ``key``: the hash of a message and of those before it, by their hash."""

    def __init__(self, key: Callable[[bytes, Message], bytes]) -> None:
        self._key = key
        self._calls: dict[str, ToolCall] = {}
        self._answers: defaultdict[bytes, list[Reply]] = defaultdict(list)
        """by the messages before them"""

    def add(self, before: bytes, reply: Reply) -> None:
        """Take the reply to the messages with the hash ``before``."""
        if reply.calls:
            self._calls |= {call.id: call for call in reply.calls}
            self._answers[before].append(reply)

    def restored(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages, in which calls of replies and their results have the ids of these calls, and calls also those
        that the model wrote.

        A turn whose calls all have other ids is the reply with equal text and calls to the messages before it, if there
        is exactly one.
        """
        own: list[Message] = []
        hashed, before, results = 0, b"", iter(())
        for number, message in enumerate(messages):
            if message.calls:
                calls = message.calls
                if not any(call.id in self._calls for call in calls):
                    for past in own[hashed:]:
                        before = self._key(before, past)
                    hashed, content = len(own), self._content(message)
                    answers = self._answers.get(before, ())
                    equal = [reply.calls for reply in answers if self._content(reply.message) == content]
                    calls = equal[0] if len(equal) == 1 else calls
                after = takewhile(lambda later: later.role != "assistant", messages[number + 1 :])
                results = iter(self._results([m.call_id for m in after if m.role == "tool"], message.calls, calls))
                written = [self._calls.get(call.id, call).written for call in calls]
                calls = (replace(call, written=i) for call, i in zip(calls, written, strict=True))
                message = replace(message, calls=tuple(calls))
            elif message.role == "tool":
                message = replace(message, call_id=next(results, message.call_id))
            own.append(message)
        return tuple(own)

    def _results(
        self, ids: list[str | None], sent: Sequence[ToolCall], calls: Sequence[ToolCall]
    ) -> Sequence[str | None]:
        """Of which ``calls`` the results with ``ids`` are, which a client sent after ``sent``.

        They name a call by its id, by the one that the client gave it, or by its tool; or there is one for each.
        """
        own = [call.id for call in calls]
        if any(i in self._calls for i in ids) or not any(i in self._calls for i in own):
            return ids
        for names in ([call.id for call in sent], [call.name for call in calls]):
            if len({*names}) == len(names) and {*ids} <= {*names}:
                return [own[names.index(i)] for i in ids if i is not None]
        return own if len(ids) == len(own) else ids

    def _content(self, message: Message) -> bytes:
        return self._key(b"", replace(message, calls=tuple(replace(call, id="") for call in message.calls)))
