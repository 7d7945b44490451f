"""Which turn a request goes on after, also of random agents, and how the ids of their prompts are kept."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_api import WEATHER

from verl_turnkey.plugins.gateway import tree as module
from verl_turnkey.plugins.gateway.dialects import Chat, Messages, Responses
from verl_turnkey.plugins.gateway.messages import Dialect, GatewayError, Message, Reply, Request, ToolCall
from verl_turnkey.plugins.gateway.tree import Node, SharedIds, Tree

# --- requests ---------------------------------------------------------------------------------------------------------
SYSTEM, USER = Message("system", "Be brief."), Message("user", "Weather?")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": WEATHER},
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


def turn(number: int, text: str = "", *arguments: dict[str, Any], reasoning: str | None = "Hm.\n") -> Reply:
    calls = tuple(ToolCall("weather", values, f"call_e_{number}_{j}") for j, values in enumerate(arguments))
    return Reply(f"e_{number}", text, calls, reasoning)


def sent(reply: Reply) -> Message:
    """A reply as clients of Chat Completions send it back."""
    return replace(reply.message, item_id=None, reasoning=None)


def result(reply: Reply, text: str = "sun", number: int = 0) -> Message:
    return Message("tool", text, call_id=reply.calls[number].id)


def chains_of(tree: Tree) -> list[list[Node]]:
    numbers = range(max(node.chain for node in tree.nodes) + 1)
    return [[node for node in tree.nodes if node.chain == number] for number in numbers]


class Episode:
    """A tree, and requests with tools that are answered."""

    def __init__(self) -> None:
        self.tree = Tree()

    def answer(self, messages: list[Message], reply: Reply, tools: tuple[Any, ...] = (TOOL,), **fields: Any) -> Node:
        request = Request(tuple(messages), tools, **fields)
        match = self.tree.match(request)
        node = self.tree.commit(request, reply, match.parent)
        assert (node.parent, node.new, node.reason) == (match.parent, match.new, match.reason)
        assert node.tools == match.tools
        past = match.parent.messages if match.parent else ()
        assert node.messages == (*past, *match.new, reply.message)
        return node

    def chains(self) -> list[list[str]]:
        return [[node.reply.id for node in chain] for chain in chains_of(self.tree)]


CITY = turn(0, "", {"city": "Bern", "days": 1.0, "near": [{"b": 1, "a": None}]})


def begun() -> Episode:
    episode = Episode()
    assert episode.answer([SYSTEM, USER], CITY).reason is None
    return episode


@pytest.mark.parametrize(
    "changed",
    [
        sent(CITY),
        CITY.message,
        replace(CITY.message, item_id=None),
        replace(sent(CITY), reasoning="Hm."),
        replace(sent(CITY), reasoning="quite another thought"),
        replace(sent(CITY), text=" \n"),
        replace(
            sent(CITY),
            calls=(ToolCall("weather", {"near": [{"a": None, "b": 1.0}], "days": 1, "city": "Bern"}, "call_e_0_0"),),
        ),
        replace(sent(CITY), item_id="of another server"),
        replace(sent(CITY), calls=(replace(CITY.calls[0], id="another"),)),
    ],
)
def test_a_turn_that_came_back_is_recognized(changed: Message):
    episode = begun()
    node = episode.answer([SYSTEM, replace(USER, text="Weather?\n"), changed, result(CITY)], turn(1, "Sun."))
    assert (node.reason, node.chain, node.depth, len(episode.tree.nodes)) == (None, 0, 1, 2)
    assert node.parent is episode.tree.nodes[0]
    assert node.new == (result(CITY),)
    assert node.messages[2] == CITY.message
    assert episode.chains() == [["e_0", "e_1"]]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (replace(sent(CITY), text="I look."), "edited"),
        (replace(sent(CITY), calls=(replace(CITY.calls[0], arguments={"city": "Genf"}),)), "edited"),
        (replace(sent(CITY), calls=(replace(CITY.calls[0], arguments={**CITY.calls[0].arguments, "days": True}),)),
         "edited"),
        (replace(sent(CITY), calls=(replace(CITY.calls[0], name="time"),)), "edited"),
        (replace(sent(CITY), calls=(*CITY.calls, ToolCall("weather", {}, "another"))), "edited"),
        (replace(sent(CITY), calls=(), item_id="e_0", text="No call."), "edited"),
        (replace(sent(CITY), calls=(replace(CITY.calls[0], id="another", arguments={"city": "Genf"}),)), "history"),
        (replace(sent(CITY), calls=(), text="No call."), "history"),
    ],
)  # fmt: skip
def test_a_turn_that_came_back_changed(changed: Message, reason: str):
    episode = begun()
    node = episode.answer([SYSTEM, USER, changed, result(CITY)], turn(1, "Sun."))
    assert (node.parent, node.reason) == (None, reason)
    assert node.new == (SYSTEM, USER, changed, result(CITY))
    assert episode.chains() == [["e_0"], ["e_1"]]


@pytest.mark.parametrize(
    ("named", "parent", "before"), [(None, 2, 1), ("e_0", 0, 0), ("e_1", 1, 1), ("of another", 2, 1)]
)
def test_of_equal_replies_the_client_names_the_one_that_it_continues(named: str | None, parent: int, before: int):
    """Else it is the last that nothing continues; also where other tools begin a new row."""
    episode, past = Episode(), [SYSTEM, USER, sent(turn(0, "Sun.")), USER]
    for number in range(3):
        episode.answer([SYSTEM, USER], turn(number, "Sun."))
    node = episode.answer(past, turn(3, "Rain."), begun_by=named)
    assert node.parent is node.before is episode.tree.nodes[parent]
    node = episode.answer(past, turn(4, "Snow."), tools=(OTHER,), begun_by=named)
    assert (node.parent, node.before) == (None, episode.tree.nodes[before])


BOTH = Reply("e_0", "Two.", tuple(
    ToolCall(name, {"city": "Bern"}, f"call_e_0_{j}", written=f"functions.{name}:{j}")
    for j, name in enumerate(("weather", "time"))
))  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "results", "known"),
    [
        (("call_e_0_0", "call_e_0_1"), ("call_e_0_1", "call_e_0_0"), ("call_e_0_1", "call_e_0_0")),
        (("a", "b"), ("b", "a"), ("call_e_0_1", "call_e_0_0")),
        (("a", "b"), ("b",), ("call_e_0_1",)),
        (("a", "b"), ("call_e_0_1", "call_e_0_0"), ("call_e_0_1", "call_e_0_0")),
        (("a", "b"), ("time", "weather"), ("call_e_0_1", "call_e_0_0")),
        (("call_e_0_0", "call_e_0_1"), ("time", "weather"), ("call_e_0_1", "call_e_0_0")),
        (("a", "a"), ("a", "a"), ("call_e_0_0", "call_e_0_1")),
        (("a", "b"), ("c", "d"), ("call_e_0_0", "call_e_0_1")),
        (("a", "b"), ("c",), ("c",)),
    ],
)
def test_calls_whose_ids_a_client_changed(calls: tuple[str, ...], results: tuple[str, ...], known: tuple[str, ...]):
    """By the client's ids, the tools' names or the order; a result that none of these tells apart keeps its id."""
    episode, last, past = Episode(), BOTH, [USER]
    episode.answer(past, BOTH)
    for number in (1, 2):  # also further down, where the turn before has been recognized
        ids = [i.replace("e_0", last.id) for i in (*calls, *results)]
        back = tuple(ToolCall(call.name, call.arguments, i) for call, i in zip(last.calls, ids, strict=False))
        past += [replace(sent(last), calls=back), *(Message("tool", "sun", call_id=i) for i in ids[len(calls) :])]
        match = episode.tree.match(Request(tuple(past), (TOOL,)))
        assert (match.parent, match.reason) == (episode.tree.nodes[-1], None)
        assert [message.call_id for message in match.new] == [i.replace("e_0", last.id) for i in known]
        made = [call for message in match.request.messages for call in message.calls]
        assert [call.written for call in made] == ["functions.weather:0", "functions.time:1"] * number
        turns = (replace(call, id=f"call_e_{number}_{j}") for j, call in enumerate(BOTH.calls))
        last = replace(BOTH, id=f"e_{number}", calls=tuple(turns))
        episode.answer(past, last)
    assert len(episode.chains()) == 1


def test_a_call_of_another_id_that_two_turns_made_is_neither():
    episode = Episode()
    for number in range(2):
        episode.answer([USER], turn(number, "", {"city": "Bern"}))
    back = Message("assistant", "", (ToolCall("weather", {"city": "Bern"}, "a"),))
    match = episode.tree.match(Request((USER, back, Message("tool", "sun", call_id="a")), (TOOL,)))
    assert match.parent is None
    assert match.request.messages[1:] == (back, Message("tool", "sun", call_id="a"))


def test_a_later_turn_is_edited():
    """The turns before it are kept: the prompt goes on after the last that is unchanged."""
    episode = begun()
    second = turn(1, "", {"city": "Genf"})
    past = [SYSTEM, USER, sent(CITY), result(CITY)]
    episode.answer(past, second)
    changed = replace(sent(second), text="or else")
    node = episode.answer([*past, changed, result(second)], turn(2, "Sun."))
    assert (node.parent, node.reason) == (episode.tree.nodes[0], "edited")
    assert node.new == (result(CITY), changed, result(second))


def test_parallel_calls_come_back_all_or_edited():
    both = turn(0, "Two.", {"city": "Bern"}, {"city": "Genf"})
    results = [result(both, "sun", 0), result(both, "rain", 1)]
    episode = Episode()
    episode.answer([USER], both)
    assert episode.answer([USER, sent(both), *results], turn(1, "Done.")).reason is None
    half = replace(sent(both), calls=both.calls[1:])
    assert episode.answer([USER, half, results[1]], turn(2, "Done.")).reason == "edited"
    swapped = replace(sent(both), calls=both.calls[::-1])
    assert episode.answer([USER, swapped, *results], turn(3, "Done.")).reason == "edited"
    assert episode.chains() == [["e_0", "e_1"], ["e_2"], ["e_3"]]


def test_a_result_is_that_of_its_call():
    """The same texts under each other's ids are another conversation, from the results on."""
    both = turn(0, "Two.", {"city": "Bern"}, {"city": "Genf"})
    first, second = result(both, "sun", 0), result(both, "rain", 1)
    episode, after = Episode(), turn(1, "Done.")
    node = episode.answer([USER], both)
    episode.answer([USER, sent(both), first, second], after)
    swapped = [replace(first, call_id=second.call_id), replace(second, call_id=first.call_id)]
    again = episode.answer([USER, sent(both), *swapped, sent(after), Message("user", "And?")], turn(2, "Rain."))
    assert again.parent is node
    assert again.new[:2] == tuple(swapped)


def test_a_turn_that_is_dropped_from_the_history():
    episode = begun()
    talk = turn(1, "No call.")
    past = [SYSTEM, USER, sent(CITY), result(CITY)]
    episode.answer(past, talk)
    node = episode.answer([*past, Message("user", "Call a tool.")], turn(2, "Sun."))
    assert (node.parent, node.reason) == (episode.tree.nodes[0], "branch")
    assert node.new == (result(CITY), Message("user", "Call a tool."))
    assert episode.chains() == [["e_0", "e_1"], ["e_2"]]


def test_tools():
    episode = Episode()
    first = turn(0, "", {"city": "Bern"})
    episode.answer([USER], first, (TOOL, OTHER))
    past = [USER, sent(first), result(first)]
    function = TOOL["function"]
    respelled = {"function": {name: function[name] for name in reversed(function)}, "type": "function"}
    node = episode.answer(past, turn(1, "Sun."), (OTHER, respelled))
    assert (node.reason, node.tools) == (None, (TOOL, OTHER))
    fewer = episode.answer(past, turn(2, "Sun."), (TOOL,))
    assert (fewer.parent, fewer.reason, fewer.tools) == (None, "tools", (TOOL,))
    longer = [*past, Message("assistant", "Sun."), Message("user", "Thanks.")]
    back = episode.answer(longer, turn(3, "Bye."), (TOOL, OTHER))
    assert (back.parent, back.reason) == (node, None)
    none = episode.answer([*longer, Message("assistant", "Bye."), USER], turn(4, "Hm."), ())
    assert (none.parent, none.reason) == (None, "tools")
    # The tools come back: the turn without them stands in the messages as one that the model did not write there.
    again = episode.answer([*longer, Message("assistant", "Bye."), USER, Message("assistant", "Hm."), USER],
                           turn(5, "So."), (TOOL, OTHER))  # fmt: skip
    assert (again.parent, again.reason) == (back, "tools")
    assert episode.chains() == [["e_0", "e_1", "e_3", "e_5"], ["e_2"], ["e_4"]]


def test_a_sub_agent_has_a_chain_of_its_own():
    episode = begun()
    helper = [Message("system", "You look things up."), Message("user", "Bern")]
    reply = turn(1, "Sunny.")
    assert episode.answer(helper, reply, (OTHER,)).reason == "history"
    main = turn(2, "", {"city": "Genf"})
    assert episode.answer([SYSTEM, USER, sent(CITY), result(CITY, "Sunny.")], main).reason is None
    assert episode.answer([*helper, sent(reply), Message("user", "Genf")], turn(3, "Rain."), (OTHER,)).reason is None
    assert episode.chains() == [["e_0", "e_2"], ["e_1", "e_3"]]
    assert [node.depth for node in episode.tree.nodes] == [0, 0, 1, 1]


def test_requests_that_run_at_the_same_time():
    tree = begun().tree
    request = Request((SYSTEM, USER, sent(CITY), result(CITY)), (TOOL,))
    first, second = tree.match(request), tree.match(request)
    assert first == second
    assert (first.parent, first.reason) == (tree.nodes[0], None)
    assert len(tree.nodes) == 1
    nodes = [tree.commit(request, turn(number, "Sun."), first.parent) for number in (1, 2)]
    root = tree.nodes[0]
    assert [(node.parent, node.reason, node.chain) for node in nodes] == [(root, None, 0), (root, "branch", 1)]
    assert tree.match(request).reason == "branch"


def test_several_samples_of_a_first_turn():
    episode = Episode()
    nodes = [episode.answer([USER], turn(number, text)) for number, text in enumerate(["Sun.", "Sun.", "Rain."])]
    assert [node.reason for node in nodes] == [None, "branch", "branch"]
    sure = [USER, Message("assistant", "Sun."), Message("user", "Sure?")]
    # No id tells equal texts apart. The last of them goes on, and once it has gone on the one before.
    later = [episode.answer(sure, turn(number, "Yes.")) for number in (3, 4, 5)]
    assert [(node.parent, node.reason) for node in later] == [(nodes[1], None), (nodes[0], None), (nodes[1], "branch")]
    assert episode.chains() == [["e_0", "e_4"], ["e_1", "e_3"], ["e_2"], ["e_5"]]


def test_equal_replies_are_told_apart_by_their_ids():
    episode = Episode()
    nodes = [episode.answer([USER], turn(number, "Sun.")) for number in range(3)]
    again = Message("user", "And now?")
    for number, node in enumerate(nodes):
        named = Message("assistant", "Sun.", item_id=f"e_{number}")
        child = episode.answer([USER, named, again], turn(3 + number, "Sun."))
        assert (child.parent, child.reason) == (node, None)
    # The same further down, where the later turn alone has an id.
    last = Message("assistant", "Sun.", item_id="e_4")
    deeper = episode.answer([USER, Message("assistant", "Sun."), again, last, again], turn(6, "Sun."))
    assert deeper.parent is episode.tree.nodes[4]
    # The ids of two conversations in one: it goes on after the turn whose past has the ids that were sent.
    mixed = [USER, Message("assistant", "Sun.", item_id="e_0"), again, last, again]
    node = episode.answer(mixed, turn(7, "Sun."))
    assert (node.parent, node.reason) == (nodes[0], "branch")
    assert [calls.reply.id for calls in episode.tree.nodes if calls.parent is nodes[0]] == ["e_3", "e_7"]


def test_equal_calls_are_told_apart_by_their_ids():
    episode = Episode()
    replies = [turn(number, "", {"city": "Bern"}) for number in range(2)]
    nodes = [episode.answer([USER], reply) for reply in replies]
    for reply, node in zip(replies, nodes, strict=True):
        assert episode.answer([USER, sent(reply), result(reply)], turn(7, "Sun.")).parent is node
    crossed = episode.answer([USER, sent(replies[0]), result(replies[1])], turn(8, "Sun."))
    assert (crossed.parent, crossed.reason) == (nodes[0], "branch")


def replied(dialect: Dialect, reply: Reply, text: str) -> dict[str, Any]:
    """The body of a request that sends a reply back, whole, and asks ``text``."""
    body = dialect.render(reply, Request((USER,)))
    if isinstance(dialect, Chat):
        return {"messages": [{"role": "user", "content": "Weather?"}, body["choices"][0]["message"],
                             {"role": "user", "content": text}]}  # fmt: skip
    if isinstance(dialect, Messages):
        past = {"role": "assistant", "content": body["content"]}
        return {"messages": [{"role": "user", "content": "Weather?"}, past, {"role": "user", "content": text}]}
    return {"input": [{"role": "user", "content": "Weather?"}, *body["output"], {"role": "user", "content": text}]}


@pytest.mark.parametrize("dialect", [Chat(), Responses(), Messages()], ids=lambda dialect: dialect.path)
@pytest.mark.parametrize("reply", [turn(0, "Sun."), turn(0, "Two.", {"city": "Bern"}, {"city": "Genf"})])
def test_what_each_api_sends_back_is_recognized(dialect: Dialect, reply: Reply):
    episode = Episode()
    for other in range(5, 7):
        episode.answer([USER], replace(reply, id=f"e_{other}", calls=()), ())
    node = episode.answer([USER], reply, ())
    episode.answer([USER], replace(reply, id="e_9", calls=()), ())
    match = episode.tree.match(dialect.parse(replied(dialect, reply, "Sure?"), unsupported="refuse"))
    assert match.reason is None
    if reply.calls or not isinstance(dialect, Chat):
        assert match.parent is node


def test_previous_reply_by_its_id():
    episode = Episode()
    first = turn(0, "", {"city": "Bern"})
    node = episode.answer([SYSTEM, USER], first, instructions=True)
    again = episode.answer([SYSTEM, result(first)], turn(1, "Sun."), previous="e_0", instructions=True)
    assert (again.parent, again.new, again.reason) == (node, (result(first),), None)
    assert again.messages[:2] == (SYSTEM, USER)
    other = Message("system", "Be rude.")
    changed = episode.answer([other, Message("user", "Sure?")], turn(2, "Yes!"), previous="e_1", instructions=True)
    assert (changed.parent, changed.reason) == (None, "history")
    assert changed.messages[:2] == (other, USER)
    assert len(changed.messages) == 7
    # Instructions hold for their own request: without them the system's message is gone.
    without = episode.answer([Message("user", "Why?")], turn(3, "So."), previous="e_2")
    assert (without.parent, without.reason, without.messages[0]) == (None, "history", USER)
    followed = episode.answer([Message("user", "Go on.")], turn(4, "No."), previous="e_3")
    assert (followed.parent, followed.reason) == (without, None)
    with pytest.raises(GatewayError, match="this episode has no reply 'e_99'"):
        episode.tree.match(Request((USER,), previous="e_99"))


def test_each_message_of_a_request_is_read_once(monkeypatch: pytest.MonkeyPatch):
    """The cost of a request does not grow with the number of turns besides that of its own messages."""
    episode, past = begun(), [SYSTEM, USER, sent(CITY), result(CITY)]
    for number in range(1, 30):
        reply = turn(number, "", {"city": str(number)})
        episode.answer(past, reply)
        past += [sent(reply), result(reply)]
    hashed = []
    key = module._key
    monkeypatch.setattr(module, "_key", lambda before, message: hashed.append(message) or key(before, message))
    match = episode.tree.match(Request(tuple(past), (TOOL,)))
    assert match.parent is episode.tree.nodes[-1]
    assert hashed == past


# --- random agents ----------------------------------------------------------------------------------------------------
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
    for chain in chains_of(tree):
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
    assert len(chains_of(tree)) == 1


# --- token ids --------------------------------------------------------------------------------------------------------
IDS = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(IDS, IDS, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([1, 2, -1])), min_size=1))
def test_they_are_read_as_a_list(turns: list[tuple[list[int], list[int], int, int, int]]) -> None:
    before, past = None, list[int]()
    for prompt, response, start, stop, step in turns:
        expected = [*past[: max(0, start)], *prompt]
        ids = SharedIds.of(expected, before)
        assert (len(ids), [*ids], ids[start:stop:step]) == (len(expected), expected, expected[start:stop:step])
        assert all(ids[i] == expected[i] and isinstance(ids[i], int) for i in range(-len(ids), len(ids)))
        assert past[: ids.shared] == expected[: ids.shared]
        assert past[ids.shared : ids.shared + 1] != expected[ids.shared : ids.shared + 1] or ids.shared == len(expected)
        before, past = ids.followed_by(response), [*expected, *response]
        assert [*before] == past


def test_the_prompts_of_an_episode_are_stored_once() -> None:
    prompts, before = [SharedIds.of(range(1000))], None
    for turn in range(50):
        before = prompts[-1].followed_by([turn])
        prompts.append(SharedIds.of([*before, 7, 8], before))
    assert [len(prompt.new) for prompt in prompts] == [1000] + [2] * 50
    assert all([*later][: len(earlier)] == [*earlier] for earlier, later in pairwise(prompts))
