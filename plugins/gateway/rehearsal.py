"""Episodes of an agent with a stand-in for the model, a script or a server: what ``turnkey agent`` shows.

No tokenizer is needed: without one, a stand-in counts messages instead of tokens, one id each. What an agent sends, and
how its requests continue each other, is as in training.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError, compute_credit
from verl_turnkey.envs.agents.base import AgentFailure, AgentResult, cut, without_secret
from verl_turnkey.envs.rewards import Composition, GroupMember, Groups, RewardError, compose
from verl_turnkey.envs.tasks import PartialRow
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins.config import command_line
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.overrides import read
from verl_turnkey.plugins.config.resolve import VERLS_CRITIC as VERLS_MODEL  # verl's default for both
from verl_turnkey.plugins.config.schema import (
    credit_modify,
    credit_params,
    estimator_of,
    reward_entries,
    turnkey_config,
)
from verl_turnkey.plugins.credit.rows import BREAK, read_rows
from verl_turnkey.plugins.credit.trainer_columns import from_trainer, tokens_of
from verl_turnkey.plugins.gateway import episode as episodes
from verl_turnkey.plugins.gateway.codec import Calls, Codec, Ids, Messages, Parsed, Tools, TurnCodec
from verl_turnkey.plugins.gateway.messages import Message
from verl_turnkey.plugins.gateway.models import Model
from verl_turnkey.plugins.gateway.process import AgentProcess
from verl_turnkey.plugins.gateway.server import Gateway, calls_of
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.tree import difference
from verl_turnkey.plugins.gateway.turns import Turn, reply_id
from verl_turnkey.plugins.rollout.episode import Episode, Generated, PlayedStep, Prompt, RowBuilder


class Counting(TurnCodec):
    """A stand-in's codec whose ids stand for messages."""

    def __init__(self) -> None:
        self.shows_tools = True
        self.stop_token_ids = []
        self.at_least = len
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

    def contents(self, prompt: Prompt) -> tuple[Messages, Tools]:
        """What the ids of a prompt show."""
        tools, *messages = [self._parts[number] for number in prompt.ids]
        return messages, tools

    def written(self, turn: Parsed, messages: Messages, tools: Tools, most: int) -> list[int]:
        """At most so many ids of the model's turn."""
        return [self._add(turn)]

    def _add(self, part: Any) -> int:
        self._parts.append(part)
        return len(self._parts) - 1


class Rendering(Codec):
    """The codec of a run's model, with which a stand-in writes its turns as that model would."""

    def __init__(self, *of_codec: Any) -> None:
        super().__init__(*of_codec)
        self._prompts: dict[tuple[int, ...], tuple[Messages, Tools]] = {}
        self._turns: dict[tuple[int, ...], Parsed] = {}

    def first(self, messages: Messages, tools: Tools, images: list[Any] | None = None) -> list[int]:
        ids = super().first(messages, tools, images)
        self._prompts[tuple(ids)] = messages, tools
        return ids

    def continued(self, prompt: Ids, sampled: Ids, calls: Calls, new: Messages, tools: Tools) -> list[int] | None:
        ids = super().continued(prompt, sampled, calls, new, tools)
        if ids is not None:
            turn = self._turns[tuple(sampled)]
            message = Message("assistant", turn.text, tuple(calls), turn.reasoning)
            self._prompts[tuple(ids)] = [*self._prompts[tuple(prompt)][0], message, *new], tools
        return ids

    def contents(self, prompt: Prompt) -> tuple[Messages, Tools]:
        """What a prompt shows: prompts with other images may have equal ids."""
        messages, tools = self._prompts[tuple(prompt.ids)]
        images = iter(prompt.images or ())
        return [replace(message, images=tuple(islice(images, len(message.images)))) for message in messages], tools

    def written(self, turn: Parsed, messages: Messages, tools: Tools, most: int) -> list[int]:
        """At most so many ids of the model's turn: what its chat template puts behind the prompt."""
        past = self._rendered([replace(message, images=()) for message in messages], {})
        answer = self._message(Message("assistant", turn.text, turn.calls, turn.reasoning), {})
        template = getattr(getattr(self._builder, "processor", None), "chat_template", None)
        render = partial(
            self.tokenizer.apply_chat_template, chat_template=template, tools=[*tools] or None, tokenize=False
        )
        prompt, whole = render(past, add_generation_prompt=True), render([*past, answer])
        end = self.tokenizer.eos_token
        text = whole.removeprefix(prompt).rpartition(end)[0] if whole.startswith(prompt) else turn.text
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id][:most]
        self._turns[tuple(ids)] = turn
        return ids


SECONDS = 0.05, 0.25
"""least and most that a scripted reply takes where episodes run at the same time, so that parallel calls overlap"""


async def answered(
    codec: Counting | Rendering, model: Model, wait: bool, request_id: str, prompt: Prompt, sampling: dict[str, Any]
) -> Generated:
    """The turn of the stand-in for the model. ``wait``: it takes :data:`SECONDS`."""
    started = perf_counter()
    messages, tools = codec.contents(prompt)
    turn = await model(messages, tools)
    if wait:
        await asyncio.sleep(random.uniform(*SECONDS))
    ids = codec.written(turn, messages, tools, sampling["max_tokens"])
    return Generated(ids, None, turn.text, {}, num_preempted=-1, seconds=perf_counter() - started)


ROOM = 1 << 30
"""tokens or messages that fit into a prompt, where no key sets a limit"""
WHY: Mapping[str, str] = {
    "history": "its messages do not begin with an earlier request and the reply to it",
    "tools": "the conversation goes on with other tools",
    "branch": "another request already continued from this point",
    "prefix": "calls of one conversation overlapped, so each has its own row",
    "edited": "a reply came back with other content than the model gave it",
    "thinking": "turnkey.agent.thinking=as_sent shows the model what the agent sends, without its past thoughts",
    "template": "the model's chat template cannot append these messages: change the order of roles",
    "boundary": "the appended messages change the last sampled tokens",
}
"""why a row begins; all but ``prefix``: why its prompt does not extend another"""


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
    """whether its model's name or ``turnkey.agent.leave_out`` excludes it from training"""
    role: str = ""
    """who takes it; empty: the model's name has no role"""
    images: Sequence[str] = ()
    """those of its new messages, each with its size"""
    state: Any = None
    reward: float | None = None
    composed_reward: float | None = None
    """the reward composed by ``turnkey.rewards``, from which credit is computed; None: the episode failed"""
    differs: str | None = None
    """for a prompt that is rendered anew: where it differs from the conversation before it"""
    follows: int | None = None
    """the turn that leads to it, from which its reward is discounted; None: there is none"""
    credit: float | None = None
    """its advantage among the episodes of a rehearsal; None: there is only one episode, or the method needs what only
    training has"""


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
    warnings: list[str] = field(default_factory=list)
    """what would cost credit or rows in training"""
    unrewarded: Sequence[int] = ()
    """trained turns without a reward of their own, if another turn has one"""
    method_error: str | None = None
    """why the method would stop a run with this group"""


@dataclass
class _Played:
    """A played episode that is to become a :class:`Rehearsal`."""

    session: Session
    outcome: AgentResult
    failure: str | None
    requests: int
    """that had arrived when it ended"""
    episode: Episode = field(default_factory=Episode)
    order: Sequence[PlayedStep] = ()
    """its steps in the order of rows"""
    rows: list[Any] = field(default_factory=list)
    unpaid: Mapping[str, str] = field(default_factory=dict)
    """component of ``turnkey.rewards`` that is left out -> why"""


def configuration(words: Sequence[str]) -> DictConfig:
    """The configuration of a launch line, by default with ``+turnkey=gigpo``.

    ``data.max_prompt_length`` and ``data.max_response_length`` apply where ``words`` set them; else there is room for
    any conversation.

    Raises:
        ConfigError: a word or a setting is wrong.
    """
    keys = [read(word)[0] for word in words]
    line = [*([] if "turnkey" in keys else ["+turnkey=gigpo"]), *words]
    command_line.check(line)
    config = composed(line)
    for key in ("prompt", "response"):
        if f"data.max_{key}_length" not in keys:
            OmegaConf.update(config, f"actor_rollout_ref.rollout.{key}_length", ROOM)
    import_modules(turnkey_config(config).modules)
    return config


def codec_for(config: DictConfig) -> Counting | Rendering:
    """The codec of ``actor_rollout_ref.model.path``; one that counts messages where that is verl's default.

    Raises:
        ConfigError: there is no tokenizer, or it does not suit the configuration.
    """
    model = config.actor_rollout_ref.model
    if model.path == VERLS_MODEL:
        return Counting()
    from transformers import AutoConfig
    from verl.utils import hf_processor, hf_tokenizer

    from verl_turnkey.plugins.verl_api.builders import builder_of

    path = str(Path(model.get("tokenizer_path") or model.path).expanduser())
    trusts = bool(model.get("trust_remote_code"))
    try:
        tokenizer: Any = hf_tokenizer(path, trust_remote_code=trusts)
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor_rollout_ref.model.path: no tokenizer in {path!r} ({str(error)[:200]})") from error
    try:
        hf_config: Any = AutoConfig.from_pretrained(str(Path(model.path).expanduser()), trust_remote_code=trusts)
    except (OSError, ValueError):  # a folder with a tokenizer alone
        hf_config = None
    # As in verl's workers: the processor of a vision-language model renders all prompts, also of text alone.
    processor = hf_processor(path, trust_remote_code=trusts) if hasattr(hf_config, "vision_config") else None
    tokenizer.chat_template = model.get("custom_chat_template") or tokenizer.chat_template
    if processor is not None:
        own = processor.chat_template or tokenizer.chat_template
        processor.chat_template = model.get("custom_chat_template") or own
    builder = builder_of(config, tokenizer, processor, getattr(hf_config, "model_type", None))
    rollout = config.actor_rollout_ref.rollout
    stop_token_ids = turnkey_config(config).rollout.stop_token_ids
    return Rendering(tokenizer, builder, rollout.multi_turn.format, stop_token_ids)


async def rehearse(
    config: DictConfig,
    task: Mapping[str, Any],
    new_model: Callable[[], Model],
    times: int = 1,
    at_once: int = 1,
    slow: bool = False,
) -> list[Rehearsal]:
    """Let the agent of ``turnkey.agent.run`` play one task.

    Args:
        config: from :func:`configuration`.
        task: what a row's column ``turnkey_task`` holds.
        new_model: makes the stand-in for the policy in one episode.
        times: number of episodes, a group for which credit is computed.
        at_once: episodes that run at the same time.
        slow: replies take :data:`SECONDS`.

    Raises:
        ConfigError: a setting is wrong.
        ModuleImportError: the agent's function or the state's cannot be imported.
    """
    codec = codec_for(config)
    agents, places = AgentProcess(config, codec), asyncio.Semaphore(at_once)
    rewards = compose(reward_entries(config, agents.turnkey))
    why = "tokens are counted only if actor_rollout_ref.model.path names a model"
    unpaid = dict.fromkeys(rewards.counting_tokens if isinstance(codec, Counting) else (), why)
    server = Gateway()
    await server.start(agents.turnkey.agent.listen)

    async def play() -> _Played:
        session = agents.session(partial(answered, codec, new_model(), slow), {})
        outcome, failure = AgentResult(), None
        async with places:
            server.add(session)
            try:
                with agents.workspace(session) as workspace:
                    outcome = await agents.runner.run(task, await agents.handle(server, session, workspace))
            except Exception as error:  # of the agent; what it asked before is worth seeing
                failure = str(error) if isinstance(error, AgentFailure) else cut(f"{type(error).__name__}: {error}")
            finally:
                server.remove(session)
                await session.close(agents.turnkey.agent.grace)
        return _Played(session, outcome, failure, calls_of(session.secret))

    try:
        episodes_played = await asyncio.gather(*(play() for _ in range(times)))
    finally:
        await server.stop()
        await agents.runner.close()
    for played in episodes_played:
        _to_steps(played, agents)
    await _apply_rewards([played for played in episodes_played if played.failure is None], rewards, task, unpaid)
    rehearsals = [_rehearsal(played, agents) for played in episodes_played]
    return _with_credit(config, agents, episodes_played, rehearsals) if times > 1 else rehearsals


def _to_steps(played: _Played, agents: AgentProcess) -> None:
    """Fill the episode with its steps."""
    options = agents.step_options(SimpleNamespace(keep_texts=False, before=()))
    try:
        if played.failure is None:
            played.order = episodes.played(played.session, played.outcome, options, played.episode)
    except Exception as error:
        played.failure = str(error)


async def _apply_rewards(
    group: Sequence[_Played], rewards: Composition, task: Mapping[str, Any], unpaid: Mapping[str, str]
) -> None:
    """Write the composed rewards as in training, without ``unpaid`` and what fails on a field that a task has not."""
    paid = await _paid(group, rewards.without(unpaid), row := PartialRow(task))
    errors = {result.component: result for result in paid if isinstance(result, RewardError) and result.component}
    for label, error in errors.items() if row.lacks else ():
        await _paid(group, rewards.without({*rewards.labels} - {label}), alone := PartialRow(task))
        if alone.lacks:
            why = f"{error}; a rehearsal sees only the task, not the whole data row"
            await _apply_rewards(group, rewards, task, {**unpaid, label: why})
            return
    for played, result in zip(group, paid, strict=True):
        played.unpaid = unpaid
        if isinstance(result, RewardError):
            played.failure, played.episode = f"{result}; in training, the episode would fail likewise", Episode()
            continue
        for step, with_rewards in zip(played.episode.steps, result.steps, strict=True):
            step.record.update(with_rewards.record)


async def _paid(group: Sequence[_Played], rewards: Composition, row: PartialRow) -> list[Episode | RewardError]:
    """Copies of the episodes with their composed rewards, or why there are none."""
    copies = [replace(played.episode, steps=[step.copied() for step in played.episode.steps]) for played in group]
    join = partial(Groups().join, "group")  # all before the first one pays

    async def pay(episode: Episode, member: GroupMember) -> Episode | RewardError:
        try:
            await episode.apply_rewards(rewards, row, member)
        except RewardError as error:
            return error
        finally:
            member.leave()
        return episode

    return await asyncio.gather(*[pay(episode, join(str(number))) for number, episode in enumerate(copies)])


def _rehearsal(played: _Played, agents: AgentProcess) -> Rehearsal:
    episode, session, failure = played.episode, played.session, played.failure
    if failure is None:
        try:
            merged = agents.turnkey.rollout.layout == "merged"
            played.rows = RowBuilder(0, False, (), merged, None).played(episodes.in_rows(episode, played.order))
        except Exception as error:
            failure = str(error)
    trained = episodes.trained(session) if session.turns else []
    records = {id(turn): step.record for turn, step in zip(trained, episode.steps, strict=False)}
    numbers = {id(turn): number for number, turn in enumerate(session.turns)}
    with_policy = {id(turn) for turn in episodes.without_side_calls(session)}
    turns: list[RehearsedTurn] = []
    last: dict[str, Turn] = {}
    for turn in session.turns:
        before = turn.before or last.get(turn.role)
        turns.append(_turn(turn, numbers, records, id(turn) not in with_policy, before))
        last[turn.role] = turn
    latest: dict[str, int] = {}
    for turn in trained if records else ():
        number, after = numbers[id(turn)], records[id(turn)].get("after")
        follows = latest.get(turn.role) if after is None else numbers[id(trained[after])] if after >= 0 else None
        turns[number], latest[turn.role] = replace(turns[number], follows=follows), number
    return Rehearsal(
        turns=turns,
        rows=len(played.rows),
        overruled=dict(Counter(name for turn in session.turns for name in turn.request.overruled)),
        refused=session.counts.get("refused", 0),
        last_refusal=session.refused,
        failure=None if failure is None else without_secret(failure, session.secret),
        leaves=getattr(agents.runner, "leaves", None),
        success=None if failure is not None else episode.success,
        extra=played.outcome.extra,
        other_models=dict(Counter(call["model"] for call in session.other_calls)),
        warnings=[*_warnings(played, turns)],
        unrewarded=_unrewarded(played, turns),
    )


def _unrewarded(played: _Played, turns: Sequence[RehearsedTurn]) -> list[int]:
    rewards = {**played.session.turn_rewards, **played.outcome.turn_rewards}
    named = {reply_id(name) if isinstance(name, str) else name for name in rewards}
    ids = [turn.reply.id for turn in played.session.turns]
    return [n for n, turn in enumerate(turns) if named and turn.trained and not {n, ids[n]} & named]


def _warnings(played: _Played, turns: Sequence[RehearsedTurn]) -> Iterator[str]:
    """What would cost an episode credit or rows in training."""
    session = played.session
    for label, why in played.unpaid.items():
        yield f"rewards and credit are without the component {label}: {why}"
    if calls_of(session.secret) > played.requests:
        yield "requests came after its end: a client was kept for a later episode; create it inside the function"
    if any(turn.renamed for turn in session.turns):
        yield "calls came back under other ids: send those of the reply, or equal calls cannot be told apart"
    if session.next_state is not None:
        yield "a state was posted after the last request: it belongs to no turn"
    broke = {turn.broke for turn in turns if turn.broke} | {row.extra_fields[BREAK] for row in played.rows}
    for reason in sorted(broke & WHY.keys()):
        yield f"new row, {reason}: {WHY[reason]}"


def _with_credit(
    config: DictConfig, agents: AgentProcess, played: Sequence[_Played], rehearsals: Sequence[Rehearsal]
) -> list[Rehearsal]:
    """The episodes with the credit that each turn would get if they were a training group."""
    spec, turnkey = estimator_of(config), agents.turnkey
    places = [(i, row) for i, episode in enumerate(played) for row in episode.rows]
    if spec is None or not places:
        return [*rehearsals]
    params, modify = credit_params(config, turnkey), credit_modify(config, turnkey)
    names = [f"episode_{i}" for i in range(len(played))]
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # a warning for torch's developers
    masks = [torch.tensor(row.response_mask) for _, row in places]
    read = partial(
        read_rows,
        [f"{names[i]}_{j}" for j, (i, _) in enumerate(places)],
        [{}] * len(places),
        [row.extra_fields for _, row in places],
        torch.nested.nested_tensor(masks, layout=torch.jagged),
        before=spec.names_before(modify),
    )
    rows = read()
    in_training = {"value", *from_trainer(turnkey.prm.kind, critic=True)}
    in_training |= {f"extra.{entry['column']}" for entry in reward_entries(config, turnkey) if entry.get("column")}
    columns = [name for name in spec.columns(params, modify) if name in in_training and name not in rows.steps.given]
    if columns:  # zeros take their place, to see whether the method takes such episodes at all
        zeros = {column.removeprefix("extra."): lambda _, row: np.zeros(len(row)) for column in columns}
        values = torch.nested.nested_tensor([torch.zeros(len(mask)) for mask in masks], layout=torch.jagged)
        rows = read(values=values, supply=zeros)
    tokens = tokens_of({}, rows.turns, 0, any(modification.by_token for modification in modify))
    try:
        credit = compute_credit(spec.name, rows.steps, modify=modify, tokens=tokens, **asdict(params))
    except ConfigError as error:
        caused_by_zeros = any("extra." in column and column in str(error) for column in columns)
        if not caused_by_zeros:
            return [replace(episode, method_error=str(error)) for episode in rehearsals]
    if columns:
        why = f"no credit: {spec.name} needs {', '.join(columns)}, which only training has"
        return [replace(episode, warnings=[*episode.warnings, why]) for episode in rehearsals]
    by_step = {
        (rows.steps.ids["trajectory"][code], int(step)): float(value)
        for code, step, value in zip(rows.steps.trajectory, rows.steps.step, credit.advantage, strict=True)
    }
    for name, rehearsal in zip(names, rehearsals, strict=True):
        turns = rehearsal.turns
        for step, number in enumerate([n for n, turn in enumerate(turns) if turn.trained]):
            turns[number] = replace(turns[number], credit=by_step[name, step])
    return [*rehearsals]


def _turn(
    turn: Turn,
    numbers: Mapping[int, int],
    records: Mapping[int, Mapping[str, Any]],
    side_call: bool,
    before: Turn | None,
) -> RehearsedTurn:
    """``before``: the turn whose conversation it would be expected to continue."""
    record, past = records.get(id(turn)), before and before.node
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
        composed_reward=None if record is None else record.get("composed_reward"),
        images=[picture for message in turn.match.new for picture in message.pictures],
        differs=difference(past.messages, turn.request.messages) if turn.prompt.broke and past else None,
    )
