"""The conversations of an episode, as a tree of its turns: which goes on after which, and which are samples of one.

A turn goes on after the one whose reply its request holds last. Where the calls of an episode ran at the same time,
nothing else counts, and a request that holds no reply begins a conversation. An agent that makes one call after another
may write its past in other words: there such a request goes on after the call before it, unless a later one takes up
what came before, as after a sub-agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.group_ops import conversations
from verl_turnkey.plugins.gateway.tree import conversation_key
from verl_turnkey.plugins.gateway.turns import Turn


@dataclass(frozen=True)
class Threads:
    """By the identity of a turn."""

    chain: Mapping[int, int]
    """number of its conversation; of several turns that go on after one, those on the longest way keep its number"""
    depth: Mapping[int, int]
    following: Mapping[int, Turn]
    """the turn that goes on after it, the first of those on the longest way; a turn without one has no entry"""
    ends: frozenset[int]
    """turns at the end of a conversation"""
    place: Mapping[int, Mapping[str, int]] | None
    """``after`` and ``request`` of its record; None: each turn goes on after the one before it"""


def threads_of(every: Sequence[Turn], turns: Sequence[Turn], parallel: bool) -> Threads:
    """The conversations of ``turns``, those of ``every`` turn of an episode that are trained.

    ``parallel``: whether calls ran at the same time.
    """
    before = _before(every, parallel)
    number = {id(turn): n for n, turn in enumerate(turns)}
    after, request, first = np.full(len(turns), -1), np.zeros(len(turns), dtype=np.int64), {}
    for turn in turns:
        n, earlier = number[id(turn)], before[id(turn)]
        request[n] = first.setdefault((None if earlier is None else id(earlier), _request_key(turn)), n)
        while earlier is not None and id(earlier) not in number:
            earlier = before[id(earlier)]
        after[n] = -1 if earlier is None else number[id(earlier)]
    steps = np.arange(len(turns))
    tree = conversations(after, request, steps)
    following: dict[int, Turn] = {}
    chain: dict[int, int] = {}
    for n, turn in enumerate(turns):
        goes_on = tree.main[n] and id(turns[after[n]]) not in following
        chain[id(turn)] = chain[id(turns[after[n]])] if goes_on else len(set(chain.values()))
        if goes_on:
            following[id(turns[after[n]])] = turn
    depth = {id(turns[n]): level for level, rows in enumerate(tree.levels) for n in rows.tolist()}
    ends = frozenset(id(turns[n]) for n in np.flatnonzero(tree.distance == 0).tolist())
    line = (after == steps - 1).all() and (request == steps).all()
    place = {id(turn): {"after": int(after[n]), "request": int(request[n])} for n, turn in enumerate(turns)}
    return Threads(chain, depth, following, ends, None if line else place)


def _before(turns: Sequence[Turn], parallel: bool) -> dict[int, Turn | None]:
    """The turn that each goes on after."""
    place = {id(turn): n for n, turn in enumerate(turns)}
    before: dict[int, Turn | None] = {}
    taken_up = len(turns)  # the earliest turn that this one or a later one goes on after
    returns = []
    for turn in reversed(turns):
        taken_up = min(taken_up, len(turns) if turn.before is None else place[id(turn.before)])
        returns.append(taken_up)
    for n, (turn, earliest) in enumerate(zip(turns, reversed(returns), strict=True)):
        before[id(turn)] = turn.before
        if parallel or n == 0 or turn.before is turns[n - 1]:
            continue
        last = turns[n - 1]
        messages, sent = turn.request.messages, len(last.request.messages)
        if _request_key(turn) == _request_key(last):
            before[id(turn)] = before[id(last)]  # another sample
        elif _held(turn) <= sent < len(messages) and _request_key(last).endswith(conversation_key(messages[:sent])):
            before[id(turn)] = last  # its reply was left out or written anew
        elif turn.before is None and earliest >= n:
            before[id(turn)] = last
    return before


def _request_key(turn: Turn) -> bytes:
    assert turn.node is not None
    return turn.node.request_key


def _held(turn: Turn) -> int:
    """Messages of the conversation that a turn goes on after."""
    return 0 if turn.before is None or turn.before.node is None else turn.before.node.length
