"""One call of the model in an episode, and what an episode may use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from verl_turnkey.plugins.gateway.messages import Reply, Request
from verl_turnkey.plugins.gateway.shared_ids import SharedIds
from verl_turnkey.plugins.gateway.tree import Match, Node
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
    """

    room: int
    turn: int
    turns: int = 50
    thinking: Literal["keep", "as_sent"] = "keep"
    stop: Sequence[str] = ()
    unsupported: Literal["refuse", "ignore"] = "refuse"
    leave_out: Sequence[Mapping[str, Any]] = ()


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
    replied: float = 0.0
    """when it was answered"""
    parent: Turn | None = None
    """the turn that its prompt continues"""
    before: Turn | None = None
    """the turn whose reply its request holds last, in whatever wording"""
    node: Node | None = None
    """its place in the tree, once the agent has the reply"""

    @property
    def ids(self) -> SharedIds:
        """Its prompt and what the model wrote."""
        assert isinstance(self.prompt.ids, SharedIds)
        return self.prompt.ids.followed_by(self.generated.ids)
