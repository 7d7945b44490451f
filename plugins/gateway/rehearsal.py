"""An episode of an agent with a stand-in for the model, a script or a server: what ``turnkey agent`` shows.

No tokenizer is needed: a stand-in counts messages in the place of tokens, each is one id. What an agent sends, and how
its requests go on after each other, is as in training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.agents.base import AgentFailure, AgentResult, cut, without_secret
from verl_turnkey.envs.http import Endpoint, EndpointConfig
from verl_turnkey.plugins.gateway import episode as episodes
from verl_turnkey.plugins.gateway.codec import Calls, Ids, Messages, Parsed, Tools, TurnCodec
from verl_turnkey.plugins.gateway.dialects import parts
from verl_turnkey.plugins.gateway.messages import Message, ToolCall
from verl_turnkey.plugins.gateway.process import AgentProcess
from verl_turnkey.plugins.gateway.server import Gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import Turn
from verl_turnkey.plugins.rollout.episode import Episode, Generated, Prompt, RowBuilder

# --- stand-ins --------------------------------------------------------------------------------------------------------

Model = Callable[[Messages, Tools], Awaitable[Parsed]]
"""the model's turn after these messages"""

EXAMPLES: Mapping[str, Any] = {"string": "example", "integer": 1, "number": 1.0, "boolean": True, "array": []}
"""arguments of the built-in script, by the type in the tool's schema"""
DONE = Parsed("ok")


class StandIn(TurnCodec):
    """A codec and a model in one, whose ids stand for messages."""

    def __init__(self, model: Model) -> None:
        self.shows_tools = True
        self.stop_token_ids = []
        self.at_least = len
        self._model = model
        self._parts: list[Any] = []

    def first(self, messages: Messages, tools: Tools, images: list[Any] | None = None) -> list[int]:
        return [self._add(tuple(tools)), *map(self._add, messages)]

    def continued(self, prompt: Ids, sampled: Ids, calls: Calls, new: Messages, tools: Tools) -> list[int]:
        turn = self._parts[sampled[0]]
        if isinstance(turn, Parsed):  # its calls have ids by now
            self._parts[sampled[0]] = Message("assistant", turn.text, tuple(calls), turn.reasoning)
        return [*prompt, *sampled, *map(self._add, new)]

    async def read(self, ids: Ids, prompt: Ids, tools: Tools, stop: Sequence[str] = (), cut: bool = False) -> Parsed:
        turn = self._parts[ids[0]]
        return turn if isinstance(turn, Parsed) else Parsed(turn.text, turn.calls, turn.reasoning)

    def ended(self, ids: Ids) -> bool:
        return True

    def token(self, token_id: int) -> str:
        return ""

    async def generate(self, request_id: str, prompt: Prompt, sampling: dict[str, Any]) -> Generated:
        """The turn of the model that stands in."""
        started = perf_counter()
        tools, *messages = [self._parts[number] for number in prompt.ids]
        turn = await self._model(messages, tools)
        seconds = perf_counter() - started
        return Generated([self._add(turn)], None, turn.text, {}, num_preempted=-1, seconds=seconds)

    def _add(self, part: Any) -> int:
        self._parts.append(part)
        return len(self._parts) - 1


class Script:
    """Replies in their order. After the last one, or without any, it calls the first tool once and then answers ``ok``.

    Args:
        replies: see :func:`read_replies`.
    """

    def __init__(self, replies: Sequence[Parsed] = ()) -> None:
        self._replies = list(replies)

    async def __call__(self, messages: Messages, tools: Tools) -> Parsed:
        if self._replies:
            return self._replies.pop(0)
        if not tools or any(message.calls for message in messages):
            return DONE
        function = tools[0]["function"]
        return Parsed("", (ToolCall(function["name"], example(function.get("parameters") or {}), ""),))


class Server:
    """A model behind an OpenAI-compatible server.

    Args:
        url: such as http://host:8000/v1.
        model: its name there.
        api_key_env: environment variable with the key; None: no key is sent.
    """

    def __init__(self, url: str, model: str, api_key_env: str | None = None) -> None:
        self._endpoint = Endpoint(
            EndpointConfig(url, model, api_key_env, timeout=600.0, retries=2, cache_size=0),
            "/chat/completions",
            who="the model's server",
            expected="a chat completion",
            read=_message_of,
        )

    async def __call__(self, messages: Messages, tools: Tools) -> Parsed:
        question: dict[str, Any] = {"messages": [_sent(message) for message in messages]}
        message = await self._endpoint.ask(question | ({"tools": [*tools]} if tools else {}))
        calls = tuple(
            ToolCall(call["function"]["name"], parts.arguments(call["function"]["arguments"]), "")
            for call in message.get("tool_calls") or ()
        )
        reasoning = message.get("reasoning_content") or message.get("reasoning") or None
        return Parsed(message.get("content") or "", calls, reasoning)


def read_replies(file: Path) -> list[Parsed]:
    """The replies of a script: a JSON or YAML list, whose entries are texts or mappings.

    A mapping has ``text``, ``reasoning`` and ``calls``, a list of ``{"name": ..., "arguments": {...}}``.

    Raises:
        ConfigError: the file has another form.
    """
    try:
        entries = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: neither JSON nor YAML ({str(error)[:200]})") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: expected a list of replies, got {type(entries).__name__}")
    return [_reply(entry, f"{file}, reply {number}") for number, entry in enumerate(entries)]


def _reply(entry: Any, where: str) -> Parsed:
    if isinstance(entry, str):
        return Parsed(entry)
    if not isinstance(entry, Mapping) or not entry.keys() <= {"text", "reasoning", "calls"}:
        raise ConfigError(f"{where}: expected text, or a mapping of text, reasoning and calls, got {str(entry)[:80]}")
    calls = entry.get("calls") or []
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("arguments", {}), Mapping) or "name" not in call:
            raise ConfigError(f"{where}: expected calls of name and arguments, got {str(call)[:80]}")
    made = tuple(ToolCall(str(call["name"]), dict(call.get("arguments") or {}), "") for call in calls)
    return Parsed(str(entry.get("text") or ""), made, entry.get("reasoning"))


def example(schema: Mapping[str, Any]) -> Any:
    """A value that a JSON schema takes, as far as its types, choices and defaults tell."""
    if "enum" in schema or "const" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if "default" in schema:
        return schema["default"]
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return example(choices[0])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: example(properties.get(name) or {}) for name in schema.get("required") or ()}
    return EXAMPLES.get(kind)


def _sent(message: Message) -> dict[str, Any]:
    """A message as Chat Completions has it."""
    sent: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.calls:
        sent["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": parts.spelled(call)}}
            for call in message.calls
        ]
    if message.role == "tool":
        sent["tool_call_id"] = message.call_id
    return sent


def _message_of(answer: Any) -> dict[str, Any] | None:
    message = answer["choices"][0]["message"]
    json.dumps(message)
    return message if isinstance(message, dict) else None


# --- the episode ------------------------------------------------------------------------------------------------------

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
    role: str = ""
    """who takes it; empty: the model's name has no role"""
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
    other_models: Mapping[str, int] = field(default_factory=dict)
    """name in ``turnkey.agent.models`` -> requests for it"""


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
    outcome, failure = AgentResult(), None
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
        await agents.runner.close()
    return _rehearsal(session, outcome, agents, failure)


def configuration(turnkey: Mapping[str, Any]) -> DictConfig:
    """The part of verl's configuration that an agent process reads, with room for any conversation."""
    rollout = {"prompt_length": ROOM, "response_length": ROOM, "max_model_len": None}
    rollout |= {"multi_turn": {"format": "hermes"}}
    return OmegaConf.create({"turnkey": dict(turnkey), "actor_rollout_ref": {"rollout": rollout}, "reward": {}})


def _rehearsal(session: Session, outcome: AgentResult, agents: AgentProcess, failure: str | None) -> Rehearsal:
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
    in_training = {id(turn) for turn in trained}
    return Rehearsal(
        turns=[_turn(turn, numbers, records, id(turn) not in in_training) for turn in session.turns],
        rows=rows,
        overruled=dict(Counter(name for turn in session.turns for name in turn.request.overruled)),
        refused=session.counts.get("refused", 0),
        last_refusal=session.refused,
        failure=None if failure is None else without_secret(failure, session.secret),
        leaves=getattr(agents.runner, "leaves", None),
        success=None if failure is not None else episode.success,
        extra=outcome.extra,
        other_models=dict(Counter(call["model"] for call in session.other_calls)),
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
        role=turn.role,
        state=None if record is None else record["anchor"],
        reward=None if record is None else record["reward"],
    )
