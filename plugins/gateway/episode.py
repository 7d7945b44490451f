"""A session that has ended as an episode: one step for each call of the model that is trained."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from verl_turnkey.advantage import RecordError, make_step
from verl_turnkey.envs.agents.base import AgentFailure, AgentResult
from verl_turnkey.envs.answers import images_key
from verl_turnkey.plugins.gateway.messages import Message, Reply, Request
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.states import History, StateKey
from verl_turnkey.plugins.gateway.turns import (
    BY_NUMBER,
    USE_ID,
    Threads,
    Turn,
    discarded,
    reply_id,
    threads_of,
    unclear,
)
from verl_turnkey.plugins.rollout.columns import ROLE, ROLE_OUTCOME, TURN_LIMIT, countable, turn_limit
from verl_turnkey.plugins.rollout.episode import Episode, PlayedStep

LONGEST_TEXT = 200
"""characters of a text in `extra` that estimators can read; reward components get all of it"""
END = "(end)"
"""``next_anchor`` of a turn after which the agent asked nothing more in its conversation"""


@dataclass(frozen=True)
class StepOptions:
    """How turns become steps.

    Args:
        state: the key of a state, where the agent gives none itself; None: no other state is like it.
        penalty: ``turnkey.rollout.invalid_action_penalty``.
        texts: whether the method compares observations as text.
        before: columns that the method takes from the state before a step, without ``extra.``.
        components: whether ``turnkey.rewards`` has components other than the agent's own reward.
        turns: how many calls of the model an episode may have; 0: not known.
    """

    state: StateKey
    penalty: float = 0.0
    texts: bool = False
    before: Collection[str] = ()
    components: bool = False
    turns: int = 0


def played(session: Session, outcome: AgentResult, options: StepOptions, episode: Episode) -> list[PlayedStep]:
    """Fill ``episode`` with the steps of a session that has ended, in the order in which the agent got the replies.

    Returns:
        The same steps in the order of rows: each conversation whole, one after the other.

    Raises:
        AgentFailure: there is nothing to train, or no reward: 0 would be one.
    """
    if session.failed is not None:
        raise session.failed
    if not session.turns:
        refused = f"; the last answer of the gateway was: {session.refused}" if session.refused else ""
        raise AgentFailure(session.too_long or outcome.reason or f"the agent made no request{refused}")
    rewards = _turn_rewards(session, outcome)
    whole = outcome.reward if outcome.reward is not None else session.reward
    by_role = {**({} if outcome.verified else session.outcome), **outcome.outcome}
    if whole is None and not rewards and not by_role and (not options.components or outcome.reason):
        raise AgentFailure(
            outcome.reason
            or "the agent gave no reward: return a number, POST it to /reward, or set turnkey.rewards to components "
            "other than step"
        )
    if not (turns := trained(session)):
        raise AgentFailure("turnkey.agent.leave_out leaves out every call of the agent")
    numbers = {turn.reply.id: turn.reply.number for turn in session.turns}
    paid = {number for reply, number in numbers.items() if rewards.get(reply)}
    if untrained := paid - {turn.reply.number for turn in without_side_calls(session)}:
        raise AgentFailure(
            f"a reward of turn {min(untrained)}, which is not trained (turnkey.agent.leave_out, or another model's "
            "name): turns count from 0, those that are not trained included"
        )
    threads = threads_of(session.turns, turns, session.parallel_since is not None)
    policy, several = session.model, any(turn.role for turn in session.turns)
    roles = [turn.role or policy for turn in turns]
    took = {turn.role or policy for turn in session.turns}  # those of leave_out are paid nothing
    if unknown := by_role.keys() - took:
        known = ", ".join(sorted(took)) if several else f"none: name {session.model}/<role> as the model"
        raise AgentFailure(f"an outcome of the role {min(unknown)!r}, which took no turn; of the episode are: {known}")
    last = dict(zip(roles, turns, strict=True))
    steps: dict[int, PlayedStep] = {}
    ended, anchors = perf_counter(), _anchors(session.turns, options.state)
    for t, (turn, role) in enumerate(zip(turns, roles, strict=True)):
        earned = (whole or 0.0) + by_role.get(role, 0.0) if turn is last[role] else 0.0
        reward = rewards.get(turn.reply.id, 0.0) + earned
        ends = (id(turn) in threads.ends, outcome.truncated or session.full)
        tree = {} if threads.place is None else {**threads.place[id(turn)], "outcome": earned}
        # The plain name has no entry, so that episodes with and without calls of another role are one group to it.
        extra = {**outcome.extra, **({ROLE: turn.role} if turn.role else {})}
        if by_role:  # else each role succeeds with the episode
            extra[ROLE_OUTCOME] = by_role.get(role, 0.0)
        step = _step(t, turn, threads, options, extra, reward, ends, ended, tree, anchors)
        steps[id(turn)] = step
        episode.steps.append(step)
    episode.task = text_of(turns[0].request.messages[-1:])
    success = by_role.get(roles[0], 0.0) > 0 if by_role and outcome.success is None else outcome.success
    episode.end(success)
    return [steps[id(turn)] for turn in sorted(turns, key=_place)]


def _turn_rewards(session: Session, outcome: AgentResult) -> dict[str, float]:
    """The rewards of single turns by the id of their reply.

    Raises:
        AgentFailure: there is no such turn, or the numbers of turns do not tell them apart.
    """
    turns, rewards = session.turns, {} if outcome.verified else {**session.turn_rewards}
    what = unclear(turns, () if outcome.verified else session.numbered, session.parallel_since)
    if session.parallel_since is not None and any(isinstance(name, int) for name in outcome.turn_rewards):
        what = BY_NUMBER
    if what is not None:
        raise AgentFailure(f"{what}, but calls of the episode ran at the same time: {USE_ID}")
    for name, reward in outcome.turn_rewards.items():
        turn = session.by_reply.get(reply_id(name)) if isinstance(name, str) else None
        if isinstance(name, int) and name < len(turns):
            turn = turns[name]
        if turn is None:
            raise AgentFailure(f"a reward of turn {name}, but the episode has {len(turns)}, counted from 0")
        rewards[turn.reply.id] = reward
    return rewards


def trained(session: Session) -> list[Turn]:
    """The turns without side calls and without those that ``turnkey.agent.discarded`` masks."""
    turns = without_side_calls(session)
    if session.limits.discarded == "train":
        return turns
    masked = {id(turn) for turn in discarded(session.turns, turns, session.parallel_since is not None)}
    return [turn for turn in turns if id(turn) not in masked]


def without_side_calls(session: Session) -> list[Turn]:
    """The turns but those of another model's name, and those of ``turnkey.agent.leave_out``.

    Where all have another name, that rule does not hold.
    """
    turns, rules = session.turns, session.limits.leave_out
    turns = [turn for turn in turns if turn.role or turn.request.model == session.model] or turns
    return [turn for turn in turns if not any(_matches(turn.request, rule) for rule in rules)]


def _matches(request: Request, rule: Mapping[str, Any]) -> bool:
    """Whether a request is all that ``rule`` says."""
    return (
        ("no_tools" not in rule or rule["no_tools"] != request.offers_tools)
        and ("model" not in rule or rule["model"] == request.model)
        and ("system" not in rule or rule["system"] in text_of([m for m in request.messages if m.role == "system"]))
    )


def text_of(messages: Sequence[Message]) -> str:
    return "\n".join(message.text for message in messages)


def action_of(reply: Reply) -> str:
    """What methods compare of a turn: its calls in one spelling, or its text."""
    if not reply.calls:
        return reply.text.strip()
    return json.dumps([[call.name, call.arguments] for call in reply.calls], sort_keys=True, ensure_ascii=False)


def _arrived(request: Request) -> list[Message]:
    """The messages since the model's last turn."""
    arrived: list[Message] = []
    for message in reversed(request.messages):
        if message.role == "assistant":
            break
        arrived.append(message)
    return arrived[::-1]


def _step(
    t: int,
    turn: Turn,
    threads: Threads,
    options: StepOptions,
    extra: Mapping[str, Any],
    reward: float,
    ends: tuple[bool, bool],
    ended: float,
    tree: Mapping[str, float],
    anchors: Mapping[int, str],
) -> PlayedStep:
    last, truncated = ends
    after = threads.following.get(id(turn))
    results = [] if after is None else [message for message in _arrived(after.request) if message.role == "tool"]
    errors = sum(message.error for message in results)
    seconds = max(0.0, (ended if after is None else after.began) - turn.replied)
    extra = {**extra, "chain": threads.chain[id(turn)], "depth": threads.depth[id(turn)]}
    next_extra = {**extra, "tool_calls": len(turn.reply.calls), "tool_errors": errors, "seconds_tools": seconds}
    arrived = _arrived(turn.request)
    observation = text_of(arrived)
    images = [image for message in arrived for image in message.images]
    answer = "" if after is None else text_of(_arrived(after.request))
    invalid = turn.refused or ("the agent answered a call with an error" if errors else None)
    columns: dict[str, Any] = {
        **{name: value for name, value in countable(extra, next_extra, options.before).items() if _short(value)},
        "next_anchor": END if after is None else anchors[id(after)],
    }
    if TURN_LIMIT in options.before:
        columns[TURN_LIMIT] = turn_limit(options.turns, columns.get(TURN_LIMIT))
    record = _record(
        step=t,
        reward=reward,
        anchor=anchors[id(turn)],
        action=action_of(turn.reply),
        valid=invalid is None,
        penalty=0.0 if invalid is None else options.penalty,
        terminated=last and not truncated,
        truncated=last and truncated,
        version=turn.generated.version,
        **tree,
        extra=columns | ({"text": observation, "images": images_key(images)} if options.texts else {}),
    )
    return PlayedStep(
        prompt=turn.prompt,
        turn=turn.generated,
        record=record,
        observation=observation,
        images=images,
        answer=answer,
        invalid=invalid,
        unparsed=turn.refused is not None,
        seconds=seconds,
        extra=extra,
        next_extra=next_extra,
        content=turn.reply.text,
    )


def _short(value: Any) -> bool:
    """Whether a value of `extra` becomes a column: every turn of the episode carries it."""
    return not isinstance(value, str) or len(value) <= LONGEST_TEXT


def _record(**fields: Any) -> dict[str, Any]:
    try:
        return make_step(**fields)
    except RecordError as error:  # of what the agent gave as reward or in `extra`
        raise AgentFailure(f"the agent's result: {error}") from error


def _place(turn: Turn) -> tuple[int, int]:
    """Where a turn is among the rows: its chain in the tree, and the turns before it."""
    assert turn.node is not None
    return turn.node.chain, turn.node.depth


def _anchors(turns: Sequence[Turn], state: StateKey) -> dict[int, str]:
    """The key of the state before each turn, by its identity: the agent's own, or else that of ``state``."""
    made: dict[int, str | None] = {}
    anchors: dict[int, str] = {}
    for turn in turns:
        before = turn.parent
        if isinstance(state, History):
            past = None if before is None else made[id(before)]
            made[id(turn)] = state.after(past, before.request, turn.request) if past and before else state(turn.request)
        elif turn.state is None:
            made[id(turn)] = state(turn.request, turn.files)
        key = made[id(turn)] if turn.state is None else turn.state
        anchors[id(turn)] = f"(no other) {turn.reply.id}" if key is None else key
    return anchors


def in_rows(episode: Episode, order: Sequence[PlayedStep]) -> Episode:
    """The episode with its steps in the order of rows; they keep their numbers."""
    return replace(episode, steps=[*order])
