"""One episode of an agent: its calls of the model, as a tree of turns, with their budgets, retries and end."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any
from uuid import uuid4

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.plugins.gateway.codec import TurnCodec, reply_of
from verl_turnkey.plugins.gateway.exchange import Bodies, Exchange
from verl_turnkey.plugins.gateway.limits import without_log_probs
from verl_turnkey.plugins.gateway.messages import GatewayError, Reply, Request, invalid
from verl_turnkey.plugins.gateway.models import Models
from verl_turnkey.plugins.gateway.tree import Match, SharedIds, Tree
from verl_turnkey.plugins.gateway.turns import (
    USE_ID,
    Aborted,
    Generate,
    Limits,
    Turn,
    reply_id,
    reward_of,
    role_of,
    state_of,
    turn_of,
)
from verl_turnkey.plugins.rollout.episode import Prompt
from verl_turnkey.plugins.rollout.generation import was_cut
from verl_turnkey.plugins.rollout.prompts import PromptError, guarded

# Which call of the model a request is another attempt at: SDKs send one again whose reply they did not get.
#
# Equal requests are calls of their own: an agent may want several samples. One that says that it is sent again
# (``x-stainless-retry-count``) takes a call of the same body whose client has left before its reply, each call once. If
# there is none, or it has failed, the earlier attempt was refused or never arrived, so this is a new call; except that
# the only call of this body, if it was answered, is the one whose reply did not get through. ``Idempotency-Key`` names
# a call once and for all.

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
                raise invalid("Idempotency-Key: another request of this episode used it: give each request its own key")
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


AT_ONCE = 64
"""most calls of one episode that run at the same time; further ones wait in line"""


@dataclass
class Session:
    """The calls of one episode.

    Args:
        codec: of the model.
        generate: the model.
        sampling: parameters that the policy is sampled with; those of a request are ignored.
        limits: what the episode may use.
        model: the policy's name for agents.
        observe: the key of the agent's state, called when a request has come and before the model is asked, as the
            agent waits then; None: no other state is like it. It may block.
        files: path -> digest of the agent's files, read at the same moment, for a user's function of states; None: the
            function sees no files.
        models: other models that requests may name; None: the policy answers all.
    """

    codec: TurnCodec
    generate: Generate
    sampling: Mapping[str, Any]
    limits: Limits
    model: str = "policy"
    observe: Callable[[Request], str | None] | None = None
    files: Callable[[], Mapping[str, str] | None] | None = None
    models: Models | None = None

    bodies: Bodies = field(default_factory=Bodies)
    """of its requests that are read or answered"""
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    tag: str = field(default_factory=lambda: secrets.token_hex(4))
    """part of the ids of calls, by which the turns of two episodes differ"""
    turns: list[Turn] = field(default_factory=list)
    """those whose reply the agent has, in that order"""
    reward: float | None = None
    """what the agent reported of the episode"""
    turn_rewards: dict[str, float] = field(default_factory=dict)
    """id of a reply -> what the agent reported of its turn"""
    outcome: dict[str, float] = field(default_factory=dict)
    """role -> what the agent reported that the episode pays it"""
    by_reply: dict[str, Turn] = field(default_factory=dict)
    parallel_since: float | None = None
    """when two of these turns were under way at the same time first; None: each began after the one before it"""
    numbered: list[float] = field(default_factory=list)
    """when rewards of turns were posted by their number"""
    next_state: tuple[str, float] | None = None
    """the key of the state that the agent gave for a request that has not arrived, and when"""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """set when the agent says that it has ended"""
    closed: bool = False
    failed: EnvironmentFailure | None = None
    """why the episode cannot be trained, whatever the agent returns"""
    too_long: str | None = None
    """why it has no turn, if its first prompt does not fit"""
    refused: str | None = None
    """the last error that the agent got"""
    full: bool = False
    """whether the agent ran out of turns"""
    counts: dict[str, int] = field(default_factory=dict)
    """requests by what was ignored, refused, or left out"""
    other_calls: list[dict[str, Any]] = field(default_factory=list)
    """what the log has of requests that other models answered"""

    def __post_init__(self) -> None:
        self._tree = Tree()
        self._by_node: dict[int, Turn] = {}
        self._running = Retries()
        self._tasks: set[asyncio.Task[Turn]] = set()
        self._others: set[asyncio.Task[Any]] = set()  # calls of other models
        self._busy: set[str] = set()
        self._line = asyncio.Semaphore(AT_ONCE)
        self._started = self._failed = 0

    def begin(self, key: bytes, request: Request, retried: bool, named: bytes | None = None) -> asyncio.Task[Turn]:
        """The running turn of a request; nobody has its reply before :meth:`commit`. :meth:`end` ends the attempt.

        ``key``, ``retried``, ``named``: see :class:`Retries`.

        Raises:
            GatewayError: the episode is over or has no turn left, the messages are too many for any prompt, the request
                asks for log-probabilities and turns have none, or no reply of the episode began its conversation.
        """
        self._check_open()
        self._check_room(f"more than {len(request.messages)}", len(request.messages))  # before any is looked at
        earlier = self._running.earlier(key, retried, named)
        if earlier is not None:
            self._count("retried")
            return earlier
        running = sum(not task.done() for task in self._tasks)
        unread = self._started - self._failed - running - len(self.turns)
        if unread >= self.limits.turns + AT_ONCE:
            words = f"the client closed the connection before {unread} replies of this episode"
            raise GatewayError(400, "turn_limit", words)
        if len(self.turns) + running >= self.limits.turns:
            self.full = True
            words = f"turn limit reached: the episode has {self.limits.turns} turns (turnkey.rollout.max_turns)"
            raise GatewayError(400, "turn_limit", words)
        if request.begun_by is not None:
            if (name := reply_id(request.begun_by)) not in self.by_reply:
                raise invalid(f"X-Turnkey-Parent: this episode has no reply {request.begun_by[:80]!r}")
            request = replace(request, begun_by=name)
        if not self.sampling.get("logprobs"):
            request = without_log_probs(request, self.limits.unsupported)
        number, self._started = self._started, self._started + 1
        task = asyncio.create_task(self._turn(number, request))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self._running.began(key, task, named)
        return task

    def end(self, key: bytes, call: asyncio.Task[Turn], answered: bool) -> None:
        """An attempt of :meth:`begin` is over; ``answered``: its client has the reply."""
        if not self.closed:
            self._running.ended(key, call, answered)

    def commit(self, turn: Turn) -> Reply:
        """Take a turn into the episode: its reply is on the way to the agent.

        Raises:
            GatewayError: the episode has ended meanwhile.
        """
        self._check_open()
        if turn.node is None:
            turn.parent, turn.replied = self._parent(turn.match), perf_counter()
            turn.reply = replace(turn.reply, number=len(self.turns))
            turn.node = node = self._tree.commit(turn.request, turn.reply, turn.match.parent)
            turn.before = None if node.before is None else self._by_node[id(node.before)]
            overlaps = (max(other.began, turn.began) for other in self.turns if other.replied > turn.began)
            self.parallel_since = min(filter(None, (self.parallel_since, *overlaps)), default=None)
            self._by_node[id(turn.node)] = self.by_reply[turn.reply.id] = turn
            self.turns.append(turn)
            for name in turn.request.overruled:
                self._count(f"overruled/{name}")
            if turn.refused:
                self._count("unparsed")
        return turn.reply

    async def other_model(self, body: Mapping[str, Any], path: str, exchange: Exchange) -> bool:
        """Let another model answer a request that names it; False: it is for the policy.

        Raises:
            GatewayError: the episode is over, or as :class:`Models`.
        """
        self._check_open()
        if self.models is None or (name := self.models.named(body)) is None:
            return False
        self._count(f"models/{name}")
        call: dict[str, Any] = {"model": name, "after_turns": len(self.turns)}
        self.other_calls.append(call)
        try:
            call |= await self._while_open(self.models.answer(name, path.removeprefix("/v1"), body, exchange))
        except GatewayError as error:
            call["error"] = error.message[:300]
            raise
        return True

    async def _while_open(self, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """What the log has of another model's answer, unless the episode ends before."""
        task = asyncio.create_task(answer)
        self._others.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise GatewayError(404, "episode_over", "the episode has ended")
            return task.result()
        finally:
            task.cancel()
            self._others.discard(task)

    async def tokens(self, request: Request) -> int:
        """Tokens of the prompt that a request would have. Raises GatewayError: as a call of the model would."""
        self._check_open()
        return len((await self._prompt(self._tree.match(request))).ids)

    def refuse(self, error: GatewayError) -> None:
        """Note an error that the agent gets."""
        if not self.closed:
            self.refused = error.message[:300]
            self._count("refused")

    async def _turn(self, number: int, request: Request) -> Turn:
        posted, self.next_state = self.next_state, None
        began = perf_counter()
        try:
            async with self._line:
                self._check_open()
                return await self._generated(number, request, posted, began)
        except BaseException:
            if self.next_state is None:
                self.next_state = posted  # the client sends the request again, in the same state
            raise

    async def _generated(
        self, number: int, request: Request, posted_state: tuple[str, float] | None, began: float
    ) -> Turn:
        """The turn of a request; ``posted_state``: the key of its state, if the agent gave one, and when."""
        state, posted = posted_state or (None, None)
        sent, request = request, self._tree.whole(request)
        if state is None and self.observe is not None:
            state = await asyncio.to_thread(self.observe, request) or f"(no other) {self.tag}_{number}"
        files = None if self.files is None else await asyncio.to_thread(self.files)
        match = self._tree.match(request)
        request = match.request
        prompt = await self._prompt(match)
        sampling = self._sampling(request, len(prompt.ids))
        # The id of the turn before, whose prompt that server has cached, unless another call is using it.
        parent = self._parent(match)
        request_id = uuid4().hex if parent is None or parent.request_id in self._busy else parent.request_id
        self._busy.add(request_id)
        try:
            generated = await self.generate(request_id, prompt, sampling)
        except Aborted as error:
            raise GatewayError(503, "overloaded", f"the model server stopped the turn {error}") from error
        finally:
            self._busy.discard(request_id)
        stop = sampling.get("stop") or ()
        tools = request.tools if self.codec.shows_tools else ()
        cut = was_cut(generated, sampling, self.codec.ended(generated.ids))
        parsed = await self.codec.read(generated.ids, prompt.ids, tools, stop, cut)
        reply = reply_of(f"{self.tag}_{number}", request, prompt, generated, parsed, sampling, self.codec, cut)
        return Turn(
            number,
            request,
            match,
            prompt,
            generated,
            reply,
            parsed.refused,
            began,
            state,
            posted,
            request_id,
            files,
            role=role_of(request.model, self.model),
            renamed=not sent.call_ids <= request.call_ids,
        )

    async def _prompt(self, match: Match) -> Prompt:
        """The prompt of a request."""
        request = match.request
        if request.tools and not self.codec.shows_tools and self.limits.unsupported == "refuse":
            raise GatewayError(
                400,
                "unsupported_parameter",
                "tools: the model's chat template shows no tools (turnkey.agent.unsupported=ignore leaves them out)",
            )
        tools = match.tools if self.codec.shows_tools else ()
        images = [image for message in request.messages for image in message.images] or None
        parent = self._parent(match)
        before = parent.ids if parent is not None else self.turns[-1].ids if self.turns else None
        appended = None
        try:
            least = await guarded(self.codec.at_least, request.messages)
            self._check_room(f"more than {least}", least)
            if parent is not None and self.limits.thinking == "keep":
                past = parent.prompt.ids, parent.generated.ids
                appended = await guarded(self.codec.continued, *past, parent.reply.calls, match.new, tools)
            rendered = appended or await guarded(self.codec.first, request.messages, tools, images)
            ids = await guarded(SharedIds.of, rendered, before)
        except PromptError as error:
            raise invalid(f"{error}"[:300]) from error
        self._check_room(str(len(ids)), len(ids))
        reason: str | None = match.reason
        if parent is not None and appended is None:
            reason = "thinking" if self.limits.thinking == "as_sent" else "template"
        elif parent is not None and ids.shared < len(parent.ids):
            reason = "boundary"
        return Prompt(ids, images, reason)

    def _check_room(self, words: str, tokens: int) -> None:
        if tokens + self.limits.turn <= self.limits.room:
            return
        if not self.turns:
            self.too_long = (
                f"the agent's first prompt takes {words} tokens, and a turn of "
                f"{self.limits.turn} (turnkey.rollout.max_tokens_per_turn) must fit into {self.limits.room} "
                "with it (data.max_prompt_length + data.max_response_length, or rollout.max_model_len)"
            )
        raise GatewayError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {self.limits.room} tokens. However, your messages take "
            f"{words} tokens, which leaves no room for an answer of {self.limits.turn}",
        )

    def _sampling(self, request: Request, prompt_tokens: int) -> dict[str, Any]:
        wanted = min(request.max_tokens or self.limits.turn, self.limits.turn, self.limits.room - prompt_tokens)
        ends = {"stop": [*self.limits.stop, *request.stop], "stop_token_ids": self.codec.stop_token_ids}
        return {**self.sampling, "max_tokens": max(1, wanted), **{name: end for name, end in ends.items() if end}}

    def _parent(self, match: Match) -> Turn | None:
        return None if match.parent is None else self._by_node[id(match.parent)]

    def report(self, what: str, body: Mapping[str, Any]) -> None:
        """Take what the agent posts to ``/{secret}/{what}``: a reward, a state, or that it has ended.

        Raises:
            GatewayError: the body is not of that form, or the episode is over.
        """
        self._check_open()
        turn, by_id = turn_of(body, self.turns, self.by_reply), isinstance(body.get("turn"), str)
        if self.parallel_since is not None and not by_id and (turn is not None or what == "state"):
            raise invalid(f"calls of this episode ran at the same time: {USE_ID}")
        if what == "state" and turn is not None:
            turn.state, turn.posted = state_of(body), None
        elif what == "state":
            self.next_state = state_of(body), perf_counter()
        elif what == "reward" or body.get("reward") is not None:
            reward, role = reward_of(body), body.get("role")
            if role is not None and (turn is not None or not isinstance(role, str)):
                raise invalid("role: expected the name of a role, without a turn")
            if role is not None:
                self.outcome[role] = reward
            elif turn is None:
                self.reward = reward
            else:
                self.turn_rewards[turn.reply.id] = reward
                self.numbered += [] if by_id else [perf_counter()]
        if what == "finish":
            self.finished.set()

    async def close(self, grace: float) -> None:
        """End the episode: no call is taken, and the results of running ones are dropped.

        Returns once none of them runs any more, after ``grace`` seconds at the latest.
        """
        self.closed = True
        self.finished.set()
        for task in self._others:
            task.cancel()
        if running := [task for task in self._tasks if not task.done()]:
            _, late = await asyncio.wait(running, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._running = Retries()

    def _check_open(self) -> None:
        if self.closed:
            raise GatewayError(404, "episode_over", "the episode is over")

    def _ended(self, task: asyncio.Task[Turn]) -> None:
        self._tasks.discard(task)
        # Reading the exception keeps asyncio from warning of it where nobody waits any more.
        if task.cancelled() or task.exception() is not None:
            self._failed += 1

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
