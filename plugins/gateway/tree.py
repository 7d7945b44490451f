"""Which turn a request goes on after: the conversations of an episode as a tree.

A node is one call of the model: the messages that were sent, and the reply. A request continues the node with the most
messages whose messages and reply are its beginning. Clients do not send a conversation back as it was. So messages are
compared by what clients keep:

- texts without white space around them, the ids of calls, names and parsed arguments, the call that a result is of;
- reasoning not at all: many drop it, and some change its white space;
- the ids of calls are the gateway's own and name a turn. So do the ids of items, where an API sends them back. Where a
  client gives calls other ids, the turn is the one with equal content in that place, if there is exactly one;
- tools as a set of schemas with sorted keys.

Where nothing else tells them apart, replies with equal texts are the same turn.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Literal, overload

import numpy as np

from verl_turnkey.envs.answers import first_difference, images_key
from verl_turnkey.plugins.gateway.messages import Message, Reply, Request, ToolCall, invalid


@dataclass(frozen=True, eq=False)
class SharedIds(Sequence[int]):
    """Ids that begin as an earlier sequence does; only the others are stored.

    An agent's prompts extend each other: as lists, those of an episode would take memory quadratic in its turns.

    Args:
        new: (L - shared,), int32, what follows the shared ids.
        before: the earlier sequence.
        shared: how many of its first ids these begin with.
    """

    new: np.ndarray
    before: SharedIds | None = None
    shared: int = 0

    @classmethod
    def of(cls, ids: Sequence[int], before: SharedIds | None = None) -> SharedIds:
        """``ids``, of which those that ``before`` begins with, too, are not stored again. Linear in both."""
        new = np.asarray(ids, np.int32)
        if before is None:
            return cls(new)
        length = min(len(new), len(before))
        differs = new[:length] != before._since(0)[:length]
        shared = int(differs.argmax()) if differs.any() else length
        return cls(new[shared:].copy(), before, shared) if shared else cls(new)

    def followed_by(self, ids: Sequence[int]) -> SharedIds:
        """These ids and then ``ids``."""
        return SharedIds(np.asarray(ids, np.int32), self, len(self))

    def __len__(self) -> int:
        return self.shared + len(self.new)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return int(self._since(0)[index])
        start, stop, step = index.indices(len(self))
        if step < 0:
            return self._since(0)[index].tolist()
        return self._since(start)[: max(0, stop - start) : step].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def _since(self, start: int) -> np.ndarray:
        """The ids from position ``start`` on."""
        parts: list[np.ndarray] = []
        ids, stop = self, len(self)
        while True:
            if stop > ids.shared:
                parts.append(ids.new[max(0, start - ids.shared) : stop - ids.shared])
                stop = ids.shared
            if stop <= start or ids.before is None:
                return np.concatenate(parts[::-1]) if parts else ids.new[:0]
            ids = ids.before


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
        whole: list[Message] = []
        hashed, before, results = 0, b"", iter(())
        for number, message in enumerate(messages):
            if message.calls:
                calls = message.calls
                if not any(call.id in self._calls for call in calls):
                    for past in whole[hashed:]:
                        before = self._key(before, past)
                    hashed, content = len(whole), self._content(message)
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
            whole.append(message)
        return tuple(whole)

    def _results(
        self, ids: list[str | None], sent: Sequence[ToolCall], calls: Sequence[ToolCall]
    ) -> Sequence[str | None]:
        """Of which ``calls`` the results with ``ids`` are, which a client sent after ``sent``.

        They name a call by its id, by the one that the client gave it, or by its tool; or there is one for each.
        """
        made = [call.id for call in calls]
        if any(i in self._calls for i in ids) or not any(i in self._calls for i in made):
            return ids
        for names in ([call.id for call in sent], [call.name for call in calls]):
            if len({*names}) == len(names) and {*ids} <= {*names}:
                return [made[names.index(i)] for i in ids if i is not None]
        return made if len(ids) == len(made) else ids

    def _content(self, message: Message) -> bytes:
        return self._key(b"", replace(message, calls=tuple(replace(call, id="") for call in message.calls)))


Tools = tuple[Mapping[str, Any], ...]
Reason = Literal["history", "tools", "branch", "edited"]
"""Why a request does not extend a chain: no turn's messages are its beginning; they are, but with other tools; another
request has gone on there already; a reply has come back with other content than the model gave it."""


@dataclass(eq=False)
class Node:
    """A call of the model that has been answered."""

    request: Request
    """messages and tools that the tree has already are the same objects"""
    reply: Reply
    parent: Node | None
    new: tuple[Message, ...]
    """messages between the parent's reply and this one; without a parent, all that were sent"""
    tools: Tools
    """as the prompt shows them"""
    reason: Reason | None
    """why it does not extend its parent's chain; None: it does, or it is the first"""
    chain: int
    """number of its chain; a node's first child continues the chain, further children begin one"""
    depth: int
    """nodes before it, from the start of its conversation"""
    length: int
    """messages of its conversation, the reply included"""
    key: bytes
    """hash of these messages"""
    request_key: bytes
    """equal for equal requests"""
    before: Node | None
    """the turn whose reply the request holds last: its parent, or one that came back edited or with other tools"""
    children: list[Node] = field(default_factory=list)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Its conversation, the reply included."""
        parts: list[tuple[Message, ...]] = []
        node: Node | None = self
        while node is not None:
            parts.append((*node.new, node.reply.message))
            node = node.parent
        return tuple(message for part in reversed(parts) for message in part)


@dataclass(frozen=True)
class Match:
    """Where a request goes on."""

    request: Request
    """with all messages; those that the tree has already are the same objects"""
    parent: Node | None
    """the turn after which the request goes on; None: its prompt is rendered anew"""
    new: tuple[Message, ...]
    """the messages after the parent's reply, or all"""
    reason: Reason | None
    """why it does not extend a chain; None: it does, or it is the first request"""
    tools: Tools
    """the request's, in the order in which the episode showed this set first"""


class Tree:
    """The calls of the model in one episode. It changes in :meth:`commit` alone, so requests may run in parallel."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        """in the order of their commits"""
        self._by_reply: dict[str, Node] = {}
        self._by_call: dict[str, Node] = {}
        self._own_calls = OwnCalls(_key)
        self._ends: defaultdict[tuple[bytes, bytes], list[Node]] = defaultdict(list)
        """by tools and conversation"""
        self._tools: defaultdict[bytes, set[bytes]] = defaultdict(set)
        """of each conversation"""
        self._chains = 0
        self._starts: set[tuple[bytes, bytes]] = set()
        """tools and messages of the requests that begin conversations"""
        self._first_tools: dict[bytes, Tools] = {}
        """of each set of tools, as it was sent first"""
        self._messages: dict[bytes, Message] = {}
        """the last message with this hash of it and all before it"""

    def whole(self, request: Request) -> Request:
        """The request with all messages of its conversation, where it names the reply before by its id.

        The instructions of the request before do not hold for this one. Calls have the ids of the replies that they
        stand in, whatever ids a client gave them.

        Raises:
            GatewayError: there is no such reply.
        """
        if request.previous is None:
            return replace(request, messages=self._own_calls.restored(request.messages))
        node = self._by_reply.get(request.previous)
        if node is None:
            name = "previous_response_id"
            raise invalid(f"{name}: this episode has no reply {request.previous!r}", param=name)
        first = int(request.instructions)
        past = node.messages[int(node.request.instructions) :]
        messages = (*request.messages[:first], *past, *request.messages[first:])
        return replace(request, messages=self._own_calls.restored(messages), previous=None)

    def match(self, request: Request) -> Match:
        """Where a request goes on, in time linear in its body.

        Raises:
            GatewayError: as :meth:`whole`.
        """
        request = self.whole(request)
        keys, tools = _keys(request.messages), _tools_key(request.tools)
        request = self._shared(request, keys, tools)
        parent = self._longest(request, keys, tools)
        new = request.messages[0 if parent is None else parent.length :]
        first_tools = self._first_tools.get(tools, request.tools)
        return Match(request, parent, new, self._reason(request.messages, keys, tools, parent), first_tools)

    def commit(self, request: Request, reply: Reply, parent: Node | None) -> Node:
        """Add the turn that answers ``request``, after ``parent``, the one that :meth:`match` gave."""
        request = self.whole(request)
        keys, tools = _keys(request.messages), _tools_key(request.tools)
        request = self._shared(request, keys, tools)
        self._messages |= zip(keys, request.messages, strict=True)
        last = keys[-1] if keys else b""
        node = Node(
            request=request,
            reply=reply,
            parent=parent,
            new=request.messages[0 if parent is None else parent.length :],
            tools=self._first_tools.setdefault(tools, request.tools),
            reason=self._reason(request.messages, keys, tools, parent),
            chain=self._chains if parent is None or parent.children else parent.chain,
            depth=0 if parent is None else parent.depth + 1,
            length=len(request.messages) + 1,
            key=_key(last, reply.message),
            request_key=tools + last,
            before=self._before(request, keys, parent),
        )
        self._chains = max(self._chains, node.chain + 1)
        if parent is not None:
            parent.children.append(node)
        self.nodes.append(node)
        self._by_reply[reply.id] = node
        self._by_call |= dict.fromkeys((call.id for call in reply.calls), node)
        self._ends[tools, node.key].append(node)
        self._tools[node.key].add(tools)
        if keys:
            self._starts.add((tools, last))
        self._own_calls.add(last, reply)
        return node

    def _shared(self, request: Request, keys: Sequence[bytes], tools: bytes) -> Request:
        """The request without copies of what the tree has: every request repeats the conversation before it."""
        messages = tuple(
            earlier if earlier == message else message
            for message, earlier in zip(request.messages, map(self._messages.get, keys), strict=True)
        )
        first_tools = self._first_tools.get(tools)
        return replace(request, messages=messages, tools=first_tools if first_tools == request.tools else request.tools)

    def _longest(self, request: Request, keys: Sequence[bytes], tools: bytes) -> Node | None:
        """The node with the most messages that begin those of ``request``."""
        messages = request.messages
        for length in range(len(messages) - 1, 0, -1):
            if ends := [node for node in self._ends.get((tools, keys[length - 1]), ()) if self._named(node, messages)]:
                return _of_equals(ends, request.begun_by)
        return None

    def _before(self, request: Request, keys: Sequence[bytes], parent: Node | None) -> Node | None:
        messages = request.messages
        for length in range(len(messages) - 1, 0 if parent is None else parent.length, -1):
            key, message = keys[length - 1], messages[length - 1]
            ends = [node for tools in self._tools.get(key, ()) for node in self._ends[tools, key]]
            ends = [node for node in ends if self._named(node, messages)]
            if message.role == "assistant" and (edited := self._turn_of(message)) is not None:
                ends = ends or [edited]
            if ends:
                return _of_equals(ends, request.begun_by)
        return parent

    def _named(self, end: Node, messages: Sequence[Message]) -> bool:
        """Whether no message of ``messages`` has the id of another turn than the one that stands there."""
        node: Node | None = end
        while node is not None:
            item_id = messages[node.length - 1].item_id
            if item_id != node.reply.id and item_id in self._by_reply:
                return False
            node = node.parent
        return True

    def _reason(
        self, messages: Sequence[Message], keys: Sequence[bytes], tools: bytes, parent: Node | None
    ) -> Reason | None:
        if not self.nodes:
            return None
        past = 0 if parent is None else parent.length
        if any(self._edited(message) for message in messages[past:]):
            return "edited"
        if any(self._tools.get(key, {tools}) != {tools} for key in keys[past:-1]):
            return "tools"
        if parent is not None:
            return "branch" if parent.children else None
        return "branch" if keys and (tools, keys[-1]) in self._starts else "history"

    def _turn_of(self, message: Message) -> Node | None:
        """The turn that a message names by the ids of its calls, or by its own."""
        named = (self._by_call.get(call.id) for call in message.calls)
        return next(filter(None, named), None) or self._by_reply.get(message.item_id or "")

    def _edited(self, message: Message) -> bool:
        """Whether a message has an id of a reply, and other content."""
        if message.role != "assistant":
            return False
        node = self._turn_of(message)
        return node is not None and _key(b"", message) != _key(b"", node.reply.message)


def _of_equals(ends: Sequence[Node], named: str | None) -> Node:
    """The one whose reply the client names; else the last without a child, or the last."""
    last = next((node for node in reversed(ends) if not node.children), ends[-1])
    return next((node for node in ends if node.reply.id == named), last)


def conversation_key(messages: Sequence[Message]) -> bytes:
    """The end of ``request_key`` of the requests with these messages, as clients send them back."""
    return _keys(messages)[-1] if messages else b""


def _keys(messages: Iterable[Message]) -> list[bytes]:
    """A hash for each message, of it and of all before it."""
    keys, last = [], b""
    for message in messages:
        last = _key(last, message)
        keys.append(last)
    return keys


def _key(before: bytes, message: Message) -> bytes:
    calls = [[call.id, call.name, plain(call.arguments)] for call in message.calls]
    compared = [message.role, message.text.strip(), calls, message.call_id, images_key(message.images)]
    content = json.dumps(compared, sort_keys=True)
    return blake2b(before + content.encode(), digest_size=16).digest()


def _tools_key(tools: Tools) -> bytes:
    schemas = sorted({json.dumps(tool, sort_keys=True, default=str) for tool in tools})
    return blake2b("\n".join(schemas).encode(), digest_size=16).digest()


def plain(value: Any) -> Any:
    """A JSON value in one spelling: clients in some languages write ``1.0`` as ``1``, and order keys as they like."""
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def difference(past: Sequence[Message], sent: Sequence[Message]) -> str | None:
    """The first of the messages ``sent`` that differs from the conversation ``past``; None: there is none."""
    for n, (old, new) in enumerate(zip(past, sent, strict=False)):
        if conversation_key([old]) == conversation_key([new]):
            continue
        was, now = (message.text or json.dumps([asdict(call) for call in message.calls]) for message in (old, new))
        texts = f"{_from(was, now)!r}", f"{_from(now, was)!r}"
        if was == now and images_key(old.images) != images_key(new.images):
            was, now = (" ".join(message.pictures) or "no image" for message in (old, new))
            texts = now, f"{was}{' with other content' * (was == now)}"
        return f"message {n}, {new.role}: {texts[0]}, was {old.role}: {texts[1]}"
    return None


def _from(other: str, text: str) -> str:
    """``text`` from shortly before the place where it differs from ``other``."""
    begin = max(0, first_difference(other, text) - 10)
    return "..." * (begin > 0) + text[begin : begin + 40]
