"""The conversations of an episode: which turn goes on after which, and which are samples of one request."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.plugins.gateway.messages import Message, Reply, Request, ToolCall
from verl_turnkey.plugins.gateway.tree import Tree
from verl_turnkey.plugins.gateway.turns import Threads, Turn, discarded, threads_of

SYSTEM = Message("system", "You solve it.")


class Turns:
    """An episode whose replies are ``r0``, ``r1``, ...; a request is texts, those of replies being the model's.

    ``r0~``: with its thoughts, which some requests of a client hold, and others not. ``calls``: with a call that gives
    the task ``task r0.`` to a sub-agent.
    """

    def __init__(self, calls: bool = False) -> None:
        self.tree, self.turns, self._calls = Tree(), list[Turn](), calls

    def _of(self, number: int) -> tuple[ToolCall, ...]:
        task = {"name": "ask", "tasks": [{"text": f" task r{number}. "}]}
        return (ToolCall("delegate", task, f"call_{number}"),) if self._calls else ()

    def ask(
        self, *texts: str, tools: tuple[Any, ...] = (), role: str = "", begun_by: int | None = None, at: float = 0.0
    ) -> Turn:
        made = []
        for text in texts:
            if text[0] != "r":
                made.append(Message("user", text))
                continue
            name = text.strip("~")
            made.append(Message("assistant", name, self._of(int(name[1:])), "so" if text[-1] == "~" else None))
        parent = None if begun_by is None else f"e_{begun_by}"
        request, number = Request((SYSTEM, *made), tools, begun_by=parent), len(self.turns)
        match, nothing = self.tree.match(request), Any
        reply = Reply(f"e_{number}", f"r{number}", self._of(number))
        turn = Turn(number, match.request, match, nothing, nothing, reply, None, at)
        turn.role = role
        turn.node = node = self.tree.commit(turn.request, turn.reply, match.parent)
        turn.before = None if node.before is None else self.turns[self.tree.nodes.index(node.before)]
        self.turns.append(turn)
        return turn

    def threads(self, parallel: bool, trained: Sequence[int] | None = None) -> Threads:
        chosen = self.turns if trained is None else [self.turns[n] for n in trained]
        return threads_of(self.turns, chosen, parallel)


def rows_of(threads: Threads, turns: Sequence[Turn]) -> list[tuple[int, int, int | None]]:
    """Chain, depth and the turn that follows, of each turn."""
    number = {id(turn): n for n, turn in enumerate(turns)}
    after = [threads.following.get(id(turn)) for turn in turns]
    return [
        (threads.chain[id(turn)], threads.depth[id(turn)], None if next is None else number[id(next)])
        for turn, next in zip(turns, after, strict=True)
    ]


def places(threads: Threads, turns: Sequence[Turn]) -> list[tuple[int, int]] | None:
    return None if threads.place is None else [tuple(threads.place[id(turn)].values()) for turn in turns]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_a_tree_of_requests_is_read_as_it_was_made(seed: int):
    """Against plain recursions over the tree from which the requests were made."""
    random, made, texts = Random(seed), Turns(calls=True), []
    after: list[int] = []
    request: list[int] = []
    begins: list[bool] = []
    for number in range(random.randint(1, 7)):
        start = random.choice([-1, *range(len(texts))])
        agent = "" if start < 0 else random.choice(["", "", "named", "told"])  # a sub-agent that the reply began
        sent = (*([] if start < 0 or agent else (*texts[start], f"r{start}")), f"question {number}")
        sent = (*sent, f"Do task r{start}. Now.") if agent == "told" else sent
        first = len(texts)
        for _ in range(random.choice([1, 1, 3])):
            made.ask(*sent, begun_by=start if agent == "named" else None)
            texts.append(sent)
            after.append(start)
            request.append(first)
            begins.append(bool(agent))
    turns = range(len(texts))
    children = [[u for u in turns if after[u] == t and not begins[u]] for t in turns]

    def far(t: int) -> int:
        return max(below(u) for u in turns if request[u] == request[t])

    def below(t: int) -> int:
        return max((1 + far(u) for u in children[t]), default=0)

    following = [min((u for u in children[t] if far(u) + 1 == below(t)), default=None) for t in turns]
    depth = [0 if after[t] < 0 else None for t in turns]
    for t in turns:
        depth[t] = 0 if after[t] < 0 or begins[t] else depth[after[t]] + 1
    threads = made.threads(parallel=True)
    line = after == [*range(-1, len(texts) - 1)]
    assert places(threads, made.turns) == (None if line else [*zip(after, request, strict=True)])
    got = rows_of(threads, made.turns)
    assert [row[1:] for row in got] == [*zip(depth, following, strict=True)]
    for t in turns:
        keeps = after[t] >= 0 and not begins[t] and following[after[t]] == t
        assert (got[t][0] == got[after[t]][0]) if keeps else (got[t][0] not in [row[0] for row in got[:t]])
    assert threads.ends == {id(made.turns[t]) for t in turns if far(t) == 0}


@pytest.mark.parametrize(
    ("requests", "parallel", "after"),
    [
        # A conversation; one that is shown anew each time; one that was summarized; one whose last reply was left out.
        ([("q",), ("q", "r0", "a"), ("q", "r0", "a", "r1", "b")], False, None),
        ([("s0",), ("s1",), ("s2",)], False, None),
        ([("q",), ("q", "r0", "a"), ("so far",), ("so far", "r2", "b")], False, None),
        ([("q",), ("q", "r0", "a"), ("q", "r0", "a", "again")], False, None),
        ([("q",), ("q", "r0~", "a"), ("q", "r0", "a", "again")], False, None),
        # The same calls at the same time: only the messages tell what goes on after what.
        ([("s0",), ("s1",), ("s2",)], True, [-1, -1, -1]),
        ([("q",), ("q", "r0", "a"), ("so far",), ("so far", "r2", "b")], True, [-1, 0, -1, 2]),
        ([("q",), ("q", "r0", "a"), ("q", "r0", "a", "again")], True, [-1, 0, 0]),
        # Workers between two turns of their planner, one after the other.
        ([("p",), ("w1",), ("w1", "r1", "a"), ("w2",), ("p", "r0", "done")], False, [-1, -1, 1, -1, 0]),
        # Samples of one request, one after the other, of which the first goes on.
        ([("q",), ("q",), ("q",), ("q", "r0", "a")], False, [-1, -1, -1, 0]),
        ([("q",), ("q", "r0", "a"), ("q", "r0", "a"), ("q", "r0", "a", "r1", "b")], False, [-1, 0, 0, 1]),
        # A search that goes back: the turn that is left has none that follows it.
        ([("q",), ("q", "r0", "a"), ("q", "r0", "b")], False, [-1, 0, 0]),
    ],
)  # fmt: skip
def test_what_goes_on_after_what(requests: list[tuple[str, ...]], parallel: bool, after: list[int] | None):
    made = Turns()
    for texts in requests:
        made.ask(*texts)
    got = places(made.threads(parallel), made.turns)
    assert (None if got is None else [place[0] for place in got]) == after


@pytest.mark.parametrize(
    ("requests", "parallel", "after"),
    [
        # A planner and an executor in turns, each with its own messages; two players who are shown each state anew.
        ([("p",), ("x",), ("p", "r0", "a"), ("x", "r1", "b")], False, None),
        ([("p",), ("x",), ("p", "r0", "a"), ("x", "r1", "b")], True, None),
        ([("s0",), ("s1",), ("s2",), ("s3",)], False, None),
        # Equal requests of two roles are no samples of one; messages that both send are no conversation of both.
        ([("s",), ("s",)], True, None),
        ([("q",), ("q", "r0", "a"), ("q", "r0", "a", "r1", "b")], False, None),
        # Two executors between the turns of one planner are conversations of their own.
        ([("p",), ("x",), ("p", "r0", "a"), ("y",), ("p", "r0", "a", "r2", "b")], False, [-1, -1, 0, -1, 2]),
    ],
)
def test_a_turn_goes_on_after_one_of_its_own_role(
    requests: list[tuple[str, ...]], parallel: bool, after: list[int] | None
):
    made = Turns()
    for n, texts in enumerate(requests):
        made.ask(*texts, role=("planner", "executor")[n % 2])
    got = places(made.threads(parallel), made.turns)
    assert (None if got is None else [place[0] for place in got]) == after


@pytest.mark.parametrize(
    ("requests", "parallel", "after"),
    [
        # One sub-agent at a time, whose planner goes on; two at once, each with a turn more.
        ([("p",), ("task r0.",), ("task r0.", "r1", "a"), ("p", "r0", "b")], False, [-1, 0, 1, 0]),
        ([("p",), ("1: task r0.",), ("2: task r0.",), ("p", "r0", "b")], True, [-1, 0, 0, 0]),
        # A task in two replies is of neither; one that is seen at the end goes on after the call before, as any does.
        ([("p",), ("p",), ("task r0. task r1.",)], True, [-1, -1, -1]),
        ([("p",), ("task r0.",), ("task r0.!",)], False, None),
    ],
)
def test_a_sub_agent_goes_on_after_what_began_it(
    requests: list[tuple[str, ...]], parallel: bool, after: list[int] | None
):
    made = Turns(calls=True)
    for texts in requests:
        made.ask(*texts)
    got = places(made.threads(parallel), made.turns)
    assert (None if got is None else [place[0] for place in got]) == after


def test_a_reply_that_came_later_began_nothing():
    made = Turns(calls=True)
    made.ask("p", at=1.0).replied = 2.0
    made.ask("task r0.", at=1.5)
    assert places(made.threads(True), made.turns) == [(-1, 0), (-1, 1)]


@pytest.mark.parametrize(
    ("requests", "parallel", "unused"),
    [
        # Of three samples one goes on; another is shown in a later prompt as text.
        ([("q",), ("q",), ("q",), ("q", "r1", "a")], True, [0, 2]),
        ([("q",), ("q",), ("q",), ("which of r0, r2?",)], True, [1]),
        # A branch that is left loses its last turn; the answer is used, and states that are shown anew are a line.
        ([("q",), ("q", "r0", "a"), ("q", "r0", "b"), ("q", "r0", "b", "r2", "c")], True, [1]),
        ([("s0",), ("s1",), ("s2",)], False, []),
    ],
)
def test_replies_that_nothing_uses_are_discarded(requests: list[tuple[str, ...]], parallel: bool, unused: list[int]):
    made = Turns()
    for texts in requests:
        made.ask(*texts)
    assert [turn.number for turn in discarded(made.turns, made.turns, parallel)] == unused


def test_the_last_reply_of_a_role_is_used():
    made = Turns()
    for role in ("a", "a", "b"):
        made.ask("q", role=role)
    assert [turn.number for turn in discarded(made.turns, made.turns, True)] == [0]


def test_a_turn_that_is_left_behind_leads_nowhere():
    made = Turns()
    for texts in (("q",), ("q", "r0", "a"), ("q", "r0", "b"), ("q", "r0", "b", "r2", "c")):
        made.ask(*texts)
    assert rows_of(made.threads(False), made.turns) == [(0, 0, 2), (1, 1, None), (0, 1, 3), (0, 2, None)]


def test_other_tools_and_turns_that_are_not_trained_are_no_border():
    made = Turns()
    made.ask("q", tools=({"name": "f"},))
    made.ask("title")
    made.ask("q", "r0", "a", tools=({"name": "g"},))
    made.ask("q", "r0", "a", "r2", "b", tools=({"name": "f"},))
    assert places(made.threads(True, [0, 2, 3]), made.turns) is None
