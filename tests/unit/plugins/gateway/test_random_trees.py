"""Requests of random agents, against a rule that compares each turn message by message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.plugins.gateway.messages import Message, Reply, Request, ToolCall
from verl_turnkey.plugins.gateway.tree import Node, Tree

TEXTS = ["", "a", " a\n", "b"]
ARGUMENTS: list[dict[str, Any]] = [{}, {"x": 1}, {"x": 1.0}, {"x": True}, {"x": [1, {"y": 2.0, "z": None}]}]
TOOLS = [(), ({"name": "f", "n": 1},), ({"name": "f", "n": 1}, {"name": "g"}), ({"name": "g"}, {"n": 1, "name": "f"})]


def equal(ours: Any, theirs: Any) -> bool:
    """JSON values: 1 and 1.0 are the same number, True is none."""
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return ours == theirs


def same(ours: Message, theirs: Message, known: set[str]) -> bool:
    if theirs.item_id in known and ours.item_id != theirs.item_id:
        return False
    calls = len(ours.calls) == len(theirs.calls) and all(
        (a.id, a.name) == (b.id, b.name) and equal(a.arguments, b.arguments)
        for a, b in zip(ours.calls, theirs.calls, strict=False)
    )
    return calls and (ours.role, ours.text.strip(), ours.call_id) == (theirs.role, theirs.text.strip(), theirs.call_id)


def as_set(tools: Sequence[Any]) -> set[str]:
    return {json.dumps(tool, sort_keys=True) for tool in tools}


def naive(nodes: list[Node], request: Request) -> tuple[int, list[Node]]:
    """Messages of the longest turns that a request begins with, and these turns."""
    known = {node.reply.id for node in nodes}
    fits = [
        node
        for node in nodes
        if as_set(node.tools) == as_set(request.tools)
        and len(node.messages) < len(request.messages)
        and all(same(a, b, known) for a, b in zip(node.messages, request.messages, strict=False))
    ]
    longest = max((len(node.messages) for node in fits), default=0)
    return longest, [node for node in fits if len(node.messages) == longest]


@st.composite
def messages_after(draw: st.DrawFn, past: Sequence[Message]) -> tuple[Message, ...]:
    """A conversation that goes on, as a client spells it; sometimes it changes what is past."""
    spelled = []
    for message in past:
        if message.role == "assistant":
            message = replace(message, reasoning=draw(st.sampled_from([None, message.reasoning, "other"])))
            message = replace(message, item_id=draw(st.sampled_from([None, message.item_id, "foreign"])))
            respelled = [replace(call, arguments=json.loads(json.dumps(call.arguments))) for call in message.calls]
            message = replace(message, calls=tuple(respelled))
        if draw(st.integers(0, 9)) == 0:
            message = replace(message, text=draw(st.sampled_from(TEXTS)))
        if draw(st.integers(0, 19)) > 0:
            spelled.append(message)
    answers = [
        Message("tool", draw(st.sampled_from(TEXTS)), call_id=call.id) for call in (past[-1].calls if past else ())
    ]
    return (*spelled, *answers, Message("user", draw(st.sampled_from(TEXTS))))


@given(st.data())
def test_the_longest_turn_that_a_request_begins_with(data: st.DataObject):
    tree = Tree()
    for number in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.sampled_from([None, *tree.nodes]))
        messages = data.draw(messages_after(() if start is None else start.messages))
        request = Request(messages, data.draw(st.sampled_from(TOOLS)))
        longest, fits = naive(tree.nodes, request)
        match = tree.match(request)
        if fits:
            assert match.parent in fits
            assert not match.parent.children or all(node.children for node in fits)
        else:
            assert match.parent is None
        assert match.new == messages[longest:]
        assert as_set(match.tools) == as_set(request.tools)
        if match.reason is None:
            assert not tree.nodes or (match.parent is not None and not match.parent.children)
        elif match.parent is None:
            assert match.reason in ("history", "tools", "edited", "branch")
        calls = data.draw(st.lists(st.sampled_from(ARGUMENTS), max_size=2))
        made = tuple(ToolCall("f", arguments, f"call_e_{number}_{j}") for j, arguments in enumerate(calls))
        reply = Reply(f"e_{number}", data.draw(st.sampled_from(TEXTS)), made, data.draw(st.sampled_from([None, "so"])))
        node = tree.commit(request, reply, match.parent)
        assert (node.reason, node.new) == (match.reason, match.new)
    placed = [node for chain in tree.chains() for node in chain]
    assert sorted(node.number for node in placed) == list(range(len(tree.nodes)))
    for chain in tree.chains():
        assert chain[0].parent is None or chain[0].parent.children[0] is not chain[0]
        assert all(after.parent is before and before.children[0] is after for before, after in pairwise(chain))


@given(st.data())
def test_a_client_that_changes_nothing_has_one_chain(data: st.DataObject):
    tree, past = Tree(), [Message("system", "a")]
    for number in range(data.draw(st.integers(1, 8))):
        past.append(Message("user", data.draw(st.sampled_from(TEXTS))))
        drops = data.draw(st.booleans())
        sent = [replace(message, reasoning=None, item_id=None) if drops else message for message in past]
        request = Request(tuple(sent), data.draw(st.sampled_from(TOOLS[2:])))
        match = tree.match(request)
        assert match.reason is None
        calls = tuple(
            ToolCall("f", arguments, f"call_e_{number}_{j}") for j, arguments in enumerate(ARGUMENTS[: number % 3])
        )
        reply = Reply(f"e_{number}", data.draw(st.sampled_from(TEXTS)), calls, "so")
        tree.commit(request, reply, match.parent)
        past += [reply.message, *(Message("tool", "b", call_id=call.id) for call in calls)]
    assert len(tree.chains()) == 1
