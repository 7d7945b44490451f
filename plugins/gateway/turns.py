"""Calls of the model in an episode: its limits, what agents report of turns, and which turn goes on after which."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from verl_turnkey.advantage.group_ops import conversations
from verl_turnkey.envs.answers import finite_reward
from verl_turnkey.envs.base import digest
from verl_turnkey.plugins.gateway.messages import GatewayError, Reply, Request, invalid
from verl_turnkey.plugins.gateway.tree import Match, Node, SharedIds, conversation_key
from verl_turnkey.plugins.rollout.episode import Generated, Prompt
from verl_turnkey.plugins.rollout.generation import generate
from verl_turnkey.plugins.verl_api import builders

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase

Generate = Callable[[str, Prompt, dict[str, Any]], Awaitable[Generated]]
"""``generate(request_id, prompt, sampling)``: the model's turn. Requests with equal ids come to the same server, and
never run at the same time. :class:`Aborted`: the server dropped it."""


class Aborted(RuntimeError):
    """The server stopped a turn before its end, for example because the weights change."""


async def policy_turn(loop: AgentLoopBase, request_id: str, prompt: Prompt, sampling: Mapping[str, Any]) -> Generated:
    """The policy's turn, as ``Generate``, by verl's client of the agent loop ``loop``."""
    if prompt.images:
        builders.check_takes_images(loop)
    turn = await generate(loop, request_id, prompt, sampling)
    if turn.stop_reason in ("aborted", "abort") or not turn.ids:
        raise Aborted(f"after {len(turn.ids)} tokens")
    return turn


@dataclass(frozen=True)
class Limits:
    """What an episode may use.

    Args:
        room: tokens that a prompt and the turn that answers it may have together.
        turn: tokens that the model may write in a turn; a prompt that leaves less room is full.
        turns: turns of an episode.
        thinking: ``keep``: the model sees its past thoughts although the agent does not send them; ``as_sent``: it sees
            what the agent sends, so that each turn is a row of its own.
        stop: strings that end a turn, besides those of a request.
        unsupported: whether requests are refused that ask for what would change the policy, or answered without it.
        leave_out: which turns are side calls, answered and not trained: those that match all of a mapping's keys, as in
            ``turnkey.agent.leave_out``.
        discarded: whether replies are trained that the agent did not use.
    """

    room: int
    turn: int
    turns: int = 50
    thinking: Literal["keep", "as_sent"] = "keep"
    stop: Sequence[str] = ()
    unsupported: Literal["refuse", "ignore"] = "refuse"
    leave_out: Sequence[Mapping[str, Any]] = ()
    discarded: Literal["train", "mask"] = "train"


@dataclass
class Turn:
    """One call of the model."""

    number: int
    """the first call of the episode is 0, in the order in which they began"""
    request: Request
    match: Match
    prompt: Prompt
    generated: Generated
    reply: Reply
    refused: str | None
    """why a tool call in it is invalid"""
    began: float
    """seconds of a clock, when the request came"""
    state: str | None = None
    """the key of the state before it, where the agent gave one or its files are looked at"""
    posted: float | None = None
    """when the agent gave it for its next turn, whichever that would be"""
    request_id: str = ""
    files: Mapping[str, str] | None = None
    """path -> digest of the agent's files when the request came, if a function of states sees them"""
    replied: float = 0.0
    """when it was answered"""
    parent: Turn | None = None
    """the turn that its prompt continues"""
    before: Turn | None = None
    """the turn whose reply its request holds last, in whatever wording"""
    node: Node | None = None
    """its place in the tree, once the agent has the reply"""
    role: str = ""
    """who takes it, as the request's model name says; empty: it names the policy alone, or another model"""
    renamed: bool = False
    """whether its request holds calls from replies under other ids"""

    @property
    def ids(self) -> SharedIds:
        """Its prompt and what the model wrote."""
        assert isinstance(self.prompt.ids, SharedIds)
        return self.prompt.ids.followed_by(self.generated.ids)


LONGEST_ROLE = 64
"""characters"""


def role_of(model: str, policy: str) -> str:
    """The role in a model's name, ``<policy>/<role>``; empty: it has none.

    Raises:
        GatewayError: the role is longer than :data:`LONGEST_ROLE`.
    """
    role = model.removeprefix(f"{policy}/") if model.startswith(f"{policy}/") else ""
    if len(role) > LONGEST_ROLE:
        raise _wrong("model", f"a role of at most {LONGEST_ROLE} characters after {policy}/", role)
    return role


USE_ID = "name the turn by the id of its reply, turn=reply.id"
BY_NUMBER = "a reward of a turn by its number"
LONGEST_KEY = 1000
"""characters of a state's key; in the place of a longer one stands its digest"""


def reply_id(name: str) -> str:
    """The id of a reply, ``<episode>_<turn>``, in what an API calls it: ``chatcmpl-``, ``msg_`` or ``resp_`` before."""
    return re.sub("^(chatcmpl-|msg_|resp_)", "", name)


def turn_of(body: Mapping[str, Any], turns: Sequence[Turn], by_reply: Mapping[str, Turn]) -> Turn | None:
    """The turn that a report names, by its number or by the id of its reply; None: it names none.

    Raises:
        GatewayError: the episode has no such turn.
    """
    name = body.get("turn")
    if name is None:
        return None
    if isinstance(name, str) and (turn := by_reply.get(reply_id(name))) is not None:
        return turn
    if isinstance(name, bool) or not isinstance(name, int) or not 0 <= name < len(turns):
        raise _wrong("turn", f"the id of a reply or a number below {len(turns)}", name)
    return turns[name]


def reward_of(body: Mapping[str, Any]) -> float:
    """The reward that was posted.

    Raises:
        GatewayError: expected a finite number.
    """
    value = body.get("reward")
    if isinstance(value, bool):
        raise _wrong("reward", "a number", value)
    try:
        return finite_reward(value, "reward")
    except ValueError as error:
        raise invalid(str(error)) from None


def state_of(body: Mapping[str, Any]) -> str:
    """The key of a state.

    Raises:
        GatewayError: the body holds no text under ``key``.
    """
    key = body.get("key")
    if not isinstance(key, str):
        raise _wrong("key", "text", key)
    return key if len(key) <= LONGEST_KEY else digest(key)


def unclear(turns: Sequence[Turn], numbered: Iterable[float], parallel_since: float | None) -> str | None:
    """Which report may be of another turn than the agent meant, as calls ran at the same time; None: none.

    ``numbered``: when rewards of turns were posted by number; ``parallel_since``: when two turns ran together first.
    """
    posted: list[tuple[str, float, float, Turn | None]] = [(BY_NUMBER, at, at, None) for at in numbered]
    posted += [("a state for the next turn", t.posted, t.replied, t) for t in turns if t.posted is not None]
    for what, begin, end, about in posted:
        others = any(turn is not about and turn.began < end and turn.replied > begin for turn in turns)
        if others or (parallel_since is not None and parallel_since < end):
            return what
    return None


def _wrong(name: str, expected: str, value: Any) -> GatewayError:
    return invalid(f"{name}: expected {expected}, got {str(value)[:80]!r}")


# The conversations of an episode, as a tree of its turns: which goes on after which, and which are samples of one.
#
# A turn goes on after the one whose reply its request holds last. Where the calls of an episode ran at the same time,
# nothing else counts, and a request that holds no reply begins a conversation. An agent that makes one call after
# another may write its past in other words: there such a request goes on after the call before it, unless a later one
# takes up what came before, as after a sub-agent. A turn continues only turns of its own role.
#
# A reply may begin a sub-agent's conversation, which then counts as a branch of that reply's turn. It is the reply that
# the client names, or else the only one with a text in a call's arguments that the first request repeats.

SHORTEST_TASK = 8
"""least characters of a text in a call's arguments that identifies the sub-agent it began"""


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
    """``after`` and ``request`` of its record; None: each turn goes on after the one of its role before it"""


def threads_of(every: Sequence[Turn], turns: Sequence[Turn], parallel: bool) -> Threads:
    """The conversations of ``turns``, those of ``every`` turn of an episode that are trained.

    ``parallel``: whether calls ran at the same time.
    """
    before = _before(every, parallel)
    began = _began(every, before)
    number = {id(turn): n for n, turn in enumerate(turns)}
    after, request, first = np.full(len(turns), -1), np.zeros(len(turns), dtype=np.int64), {}
    own = after.copy()  # without what began a sub-agent
    for turn in turns:
        n, earlier, on = number[id(turn)], before[id(turn)] or began.get(id(turn)), id(turn) not in began
        request[n] = first.setdefault((turn.role, None if earlier is None else id(earlier), _request_key(turn)), n)
        while earlier is not None and (id(earlier) not in number or earlier.role != turn.role):
            on = on and id(earlier) not in began
            earlier = before[id(earlier)] or began.get(id(earlier))
        after[n] = -1 if earlier is None else number[id(earlier)]
        own[n] = after[n] if on else -1
    steps = np.arange(len(turns))
    tree = conversations(own, request, steps)
    following: dict[int, Turn] = {}
    chain: dict[int, int] = {}
    for n, turn in enumerate(turns):
        goes_on = tree.main[n] and id(turns[own[n]]) not in following
        chain[id(turn)] = chain[id(turns[own[n]])] if goes_on else len(set(chain.values()))
        if goes_on:
            following[id(turns[own[n]])] = turn
    depth = {id(turns[n]): level for level, rows in enumerate(tree.levels) for n in rows.tolist()}
    ends = frozenset(id(turns[n]) for n in np.flatnonzero(tree.distance == 0).tolist())
    roles = [turn.role for turn in turns]
    latest = dict.fromkeys(roles, -1)
    line = (request == steps).all()
    for n, role in enumerate(roles):
        line, latest[role] = line and after[n] == latest[role], n
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
    latest: dict[str, Turn] = {}  # by role
    for n, (turn, earliest) in enumerate(zip(turns, reversed(returns), strict=True)):
        before[id(turn)] = turn.before
        last, latest[turn.role] = latest.get(turn.role), turn
        if parallel or last is None or turn.before is last:
            continue
        if turn.before is None and turn.request.begun_by not in (None, last.request.begun_by):
            continue
        messages, sent = turn.request.messages, len(last.request.messages)
        if _request_key(turn) == _request_key(last):
            before[id(turn)] = before[id(last)]  # another sample
        elif _held(turn) <= sent < len(messages) and _request_key(last).endswith(conversation_key(messages[:sent])):
            before[id(turn)] = last  # its reply was left out or written anew
        elif turn.before is None and earliest >= n:
            before[id(turn)] = last
    return before


def _began(turns: Sequence[Turn], before: Mapping[int, Turn | None]) -> dict[int, Turn]:
    """First turn of a conversation -> the turn whose reply began it; no entry: none did, or several may have."""
    by_reply = {turn.reply.id: turn for turn in turns}
    tasks = [(turn, [text for call in turn.reply.calls for text in _texts(call.arguments)]) for turn in turns]
    began: dict[int, Turn] = {}
    for n, turn in enumerate(turns):
        if n == 0 or before[id(turn)] is not None:
            continue
        if turn.request.begun_by is not None:
            began[id(turn)] = by_reply[turn.request.begun_by]
            continue
        sent = "\n".join(message.text for message in turn.request.messages)
        earlier = [t for t, texts in tasks[:n] if t.replied <= turn.began and any(text in sent for text in texts)]
        if len(earlier) == 1:
            began[id(turn)] = earlier[0]
    return began


def _texts(value: Any) -> list[str]:
    """The texts in a call's arguments that are long enough to identify what it began."""
    if isinstance(value, str):
        return [value.strip()] if len(value.strip()) >= SHORTEST_TASK else []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [text for part in inner for text in _texts(part)]


def discarded(every: Sequence[Turn], turns: Sequence[Turn], parallel: bool) -> list[Turn]:
    """Those of ``turns`` whose reply the agent did not use: no later request continues it or contains its text.

    The last reply of the episode, and of each role, is used. Arguments as in :func:`threads_of`.
    """
    before = _before(every, parallel)
    began = _began(every, before)
    used = {id(turn) for turn in {turn.role: turn for turn in turns}.values()}
    used |= {id(turn) for turn in [*before.values(), *began.values()] if turn is not None}
    unused, later = set[int](), set[str]()
    for turn in reversed(every):
        text = turn.reply.text.strip()
        if id(turn) not in used and not (text and any(text in other for other in later)):
            unused.add(id(turn))
        later.update(message.text for message in turn.request.messages)
    return [turn for turn in turns if id(turn) in unused]


def _request_key(turn: Turn) -> bytes:
    assert turn.node is not None
    return turn.node.request_key


def _held(turn: Turn) -> int:
    """Messages of the conversation that a turn goes on after."""
    return 0 if turn.before is None or turn.before.node is None else turn.before.node.length
