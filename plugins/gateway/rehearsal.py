"""An episode of an agent with a stand-in for the model: what ``turnkey agent`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.envs.agents.base import AgentFailure, Outcome, cut, without_secret
from verl_turnkey.plugins.gateway import episode as episodes
from verl_turnkey.plugins.gateway.process import AgentProcess
from verl_turnkey.plugins.gateway.server import Gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.stand_in import Model, StandIn
from verl_turnkey.plugins.gateway.turns import Turn
from verl_turnkey.plugins.rollout.episode import Episode, RowBuilder

ROOM = 1 << 30
"""messages that fit into a prompt: stand-ins have no limit"""
WHY: Mapping[str, str] = {
    "history": "its messages do not begin with an earlier request and the reply to it",
    "tools": "the conversation goes on with other tools",
    "branch": "another request has gone on from there already",
    "edited": "a reply came back with other content than the model gave it",
    "thinking": "turnkey.agent.thinking=as_sent shows the model what the agent sends, without its past thoughts",
}
"""why a prompt does not extend a row"""


@dataclass(frozen=True)
class RehearsedTurn:
    """A request and its reply."""

    messages: int
    tools: int
    model: str
    after: int | None
    """the turn that it goes on after; None: it is rendered anew"""
    new: int
    """messages since that turn"""
    broke: str | None
    """why it does not extend a row, a key of :data:`WHY`; None: it does, or is the first"""
    reply: str
    trained: bool
    side_call: bool
    """whether it would not be trained in an episode that did not fail either"""
    state: Any = None
    reward: float | None = None


@dataclass(frozen=True)
class Rehearsal:
    """How an episode went."""

    turns: list[RehearsedTurn]
    rows: int
    """that training would get"""
    overruled: Mapping[str, int]
    """parameter -> requests in which it was ignored"""
    refused: int
    """requests that were answered with an error"""
    last_refusal: str | None
    failure: str | None
    """why the episode could not be trained"""
    leaves: str | None
    """what the agent leaves behind, so that a process plays one episode alone"""
    success: bool | None
    extra: Mapping[str, Any] = field(default_factory=dict)


async def rehearse(turnkey: Mapping[str, Any], task: Mapping[str, Any], model: Model) -> Rehearsal:
    """Let the agent of ``turnkey.agent.run`` play one task.

    Args:
        turnkey: the node ``turnkey`` of a configuration.
        task: what a row's column ``turnkey_task`` holds.
        model: stands in for the policy.

    Raises:
        ConfigError: a setting is wrong.
        ModuleImportError: the agent's function or the state's cannot be imported.
    """
    stand_in = StandIn(model)
    agents = AgentProcess(configuration(turnkey), stand_in)
    session = agents.session(stand_in.generate, {})
    outcome, failure = Outcome(), None
    server = Gateway()
    await server.start(agents.turnkey.agent.listen)
    server.add(session)
    try:
        with agents.workspace(session) as workspace:
            outcome = await agents.runner.run(task, await agents.handle(server, session, workspace))
    except Exception as error:  # of the agent; what it asked before is worth seeing
        failure = str(error) if isinstance(error, AgentFailure) else cut(f"{type(error).__name__}: {error}")
    finally:
        server.remove(session)
        await session.close(agents.turnkey.agent.grace)
        await server.stop()
        if (close := getattr(agents.runner, "close", None)) is not None:
            await close()
    return _rehearsal(session, outcome, agents, failure)


def configuration(turnkey: Mapping[str, Any]) -> DictConfig:
    """The part of verl's configuration that an agent process reads, with room for any conversation."""
    rollout = {"prompt_length": ROOM, "response_length": ROOM, "max_model_len": None}
    rollout |= {"multi_turn": {"format": "hermes"}}
    return OmegaConf.create({"turnkey": dict(turnkey), "actor_rollout_ref": {"rollout": rollout}, "reward": {}})


def _rehearsal(session: Session, outcome: Outcome, agents: AgentProcess, failure: str | None) -> Rehearsal:
    episode, rows = Episode(), 0
    if failure is None:
        try:
            options = agents.step_options(SimpleNamespace(keep_texts=False, before=()))
            order = episodes.played(session, outcome, options, episode)
            for step in episode.steps:
                step.record["composed_reward"] = step.record["reward"]
            merged = agents.turnkey.rollout.layout == "merged"
            rows = len(RowBuilder(0, False, (), merged, None).played(episodes.in_rows(episode, order)))
        except Exception as error:
            failure = str(error)
    trained = episodes.trained(session) if session.turns else []
    records = {id(turn): step.record for turn, step in zip(trained, episode.steps, strict=False)}
    numbers = {id(turn): number for number, turn in enumerate(session.turns)}
    own = {id(turn) for turn in trained}
    return Rehearsal(
        turns=[_turn(turn, numbers, records, id(turn) not in own) for turn in session.turns],
        rows=rows,
        overruled=dict(Counter(name for turn in session.turns for name in turn.request.overruled)),
        refused=session.counts.get("refused", 0),
        last_refusal=session.refused,
        failure=None if failure is None else without_secret(failure, session.secret),
        leaves=getattr(agents.runner, "leaves", None),
        success=None if failure is not None else episode.success,
        extra=outcome.extra,
    )


def _turn(
    turn: Turn, numbers: Mapping[int, int], records: Mapping[int, Mapping[str, Any]], side_call: bool
) -> RehearsedTurn:
    record = records.get(id(turn))
    return RehearsedTurn(
        messages=len(turn.request.messages),
        tools=len(turn.request.tools),
        model=turn.request.model,
        after=None if turn.parent is None else numbers.get(id(turn.parent)),
        new=len(turn.match.new),
        broke=turn.prompt.broke,
        reply=episodes.action_of(turn.reply),
        trained=record is not None,
        side_call=side_call,
        state=None if record is None else record["anchor"],
        reward=None if record is None else record["reward"],
    )
