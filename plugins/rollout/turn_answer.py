"""What a turn of the model leads to: a step of the environment, and the results of the turn's calls.

Tools that are not the environment's, verl's own and those of MCP servers, are called here. Opponents, who play the
roles of an episode that the policy does not, also move here. To the policy their turns belong to the environment: its
state after a turn is the next one in which it moves. They are in none of its rows, so neither trained nor compared; the
log has them beside the turn that they followed.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import Answer, plain_text
from verl_turnkey.envs.errors import JudgeError
from verl_turnkey.envs.http import Endpoint, chat_endpoint
from verl_turnkey.envs.mcp_servers.tools import EpisodeTools, Servers
from verl_turnkey.envs.prompting.actions import Call, ParsedAction
from verl_turnkey.envs.prompting.prompts import history_text
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.tools import calls_text, read_tools, tool_names
from verl_turnkey.plugins.config.agent import SELF, OpponentConfig
from verl_turnkey.plugins.rollout.action_reader import ActionReader
from verl_turnkey.plugins.rollout.branching import Trajectory
from verl_turnkey.plugins.rollout.episode import OtherTurn
from verl_turnkey.plugins.rollout.prompts import ChatPrompts, PromptSettings, guarded


class VerlTools:
    """verl's own tools (``multi_turn.function_tool_path``, ``tool_config_path``). One that raises gives an error.

    Args:
        tools: as verl's agent-loop worker has loaded them.
        tools_kwargs: of the data row: per name of a tool, its ``create_kwargs``.
        timeout: seconds that a call may take.
    """

    def __init__(self, tools: Sequence[Any], tools_kwargs: Mapping[str, Any] | None, timeout: float) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._kwargs, self._timeout = tools_kwargs or {}, timeout
        self._episode = SimpleNamespace(tools_kwargs=self._kwargs, extra_fields={})
        schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
        self.schemas = read_tools(schemas)

    def has(self, call: Call) -> bool:
        return call.name in self._tools

    async def result(self, call: Call) -> dict[str, Any]:
        """What the call gives, as ``{"content", "is_error"}``."""
        try:
            content = await asyncio.wait_for(self._run(call), self._timeout)
        except (asyncio.TimeoutError, TimeoutError):  # two classes before Python 3.11
            return _error(f"Error: {call.name} took more than {self._timeout:g} seconds")
        except Exception as error:  # a tool of the user's may raise anything
            return _error(f"Error: {call.name} raised {type(error).__name__}: {str(error)[:300]}")
        return {"content": content, "is_error": False}

    async def _run(self, call: Call) -> str:
        from verl.tools.function_tool import FunctionTool, normalize_function_tool_return

        tool, arguments = self._tools[call.name], dict(call.arguments)
        if isinstance(tool, FunctionTool):
            response, _, _ = normalize_function_tool_return(await tool.call(arguments))
            return response.text or ""
        kwargs = self._kwargs.get(call.name) or {}
        instance, _ = await tool.create(create_kwargs=kwargs.get("create_kwargs") or {})
        try:
            response, _, _ = await tool.execute(instance, arguments, agent_data=self._episode)
        finally:
            await tool.release(instance)
        return response.text or ""


class WorkerTools:
    """The tools of one episode that are not its environment's.

    Args:
        verls: verl's own.
        servers: MCP servers; None: there are none.
    """

    def __init__(self, verls: VerlTools, servers: Servers | None = None) -> None:
        self._verls, self._servers = verls, servers
        self._mcp: EpisodeTools | None = None

    async def open(self, environment: list[dict[str, Any]], task: Task) -> None:
        """Open the episode's sessions with servers; ``environment``: the environment's tools.

        Raises:
            EnvironmentFailure: a server does not start.
        """
        if self._servers is not None:
            self._mcp = await self._servers.episode(task, tool_names([*environment, *self._verls.schemas]))

    def with_others(self, environment: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tools of the ``environment`` and all others of the episode.

        Raises:
            EnvironmentFailure: a name has two tools.
        """
        others = [*self._verls.schemas, *(self._mcp.schemas if self._mcp is not None else ())]
        if clash := {*tool_names(environment)} & {*tool_names(others)}:
            where = "verl's configuration" if clash & {*tool_names(self._verls.schemas)} else "an MCP server"
            raise EnvironmentFailure("tools", f"both the environment and {where} have a tool {min(clash)!r}")
        return [*environment, *others]

    def has(self, call: Call) -> bool:
        return self._verls.has(call) or (self._mcp is not None and self._mcp.has(call.name))

    async def result(self, call: Call) -> dict[str, Any]:
        """What the call gives, as ``{"content", "is_error"}``.

        Raises:
            EnvironmentFailure: an MCP server is gone, hangs, or writes too much.
        """
        if self._verls.has(call) or self._mcp is None:
            return await self._verls.result(call)
        return await self._mcp.result(call.name, call.arguments)

    def add_state(self, answer: Answer) -> None:
        """Make what the episode's own sessions have seen part of the key of the environment's state."""
        if self._mcp is not None and self._mcp.state:
            answer.add_state(self._mcp.state)

    async def close(self) -> None:
        """End the episode's own sessions."""
        if self._mcp is not None:
            await self._mcp.close()


Result = dict[str, Any]


async def answer_turn(trajectory: Trajectory, parsed: ParsedAction, tools: WorkerTools | None = None) -> Answer:
    """The environment's answer. Without an action for it the environment is not called, and its state stays.

    ``info["results"]`` has one result per call of the turn, in order, and ``info["note"]`` what the observation does
    not say of them.

    Args:
        tools: those of the episode that are not the environment's.

    Raises:
        EnvironmentFailure: the environment broke down, or its results are not those of the calls.
    """
    seen = trajectory.seen
    run = [call for call in parsed.calls if call.error is None]
    elsewhere = [call for call in run if tools is not None and tools.has(call)]
    to_environment = [call for call in run if call not in elsewhere]
    if parsed.action is None and not parsed.calls and not parsed.feedback:
        past = {"note", "results"} & seen.info.keys()
        return Answer(seen.observation, {k: v for k, v in seen.info.items() if k not in past} if past else seen.info)
    results = [] if tools is None else [await tools.result(call) for call in elsewhere]
    if parsed.action is None or (elsewhere and not to_environment):
        seen.info.setdefault("extra", {})  # one object for both: the action was not applied
        answer = Answer(seen.observation, {**seen.info, "invalid": False})  # results and note: see below
    else:
        action = calls_text([(call.name, call.arguments) for call in to_environment]) if elsewhere else parsed.action
        answer = await trajectory.step(action)
    if tools is not None:
        tools.add_state(answer)
    returned = answer.info.pop("results", None)
    notes = [f"{call.name}: {result['content']}" for call, result in zip(elsewhere, results, strict=True)]
    if parsed.calls:
        # What the next player sees does not answer this one's call.
        view = answer.observation if trajectory.keeps_mover(answer) else ""
        of_environment = iter(_results(len(to_environment), answer, returned, view))
        of_others = iter(results)
        answer.info["results"] = [
            _error(f"Error: {call.error}")
            if call.error is not None
            else next(of_others if call in elsewhere else of_environment)
            for call in parsed.calls
        ]
        notes += [f"Error: {call.error}" for call in parsed.calls if call.error is not None]
        if parsed.feedback:
            last = answer.info["results"][-1]
            answer.info["results"][-1] = {**last, "content": f"{last['content']}\n{parsed.feedback}"}
    elif parsed.feedback and tools is not None:
        answer.info["results"] = [_error(parsed.feedback)]
    if parsed.feedback:
        notes.append(parsed.feedback)
    if notes:
        answer.info["note"] = "\n".join(notes)
    return answer


def _results(calls: int, answer: Answer, returned: list[Result] | None, view: str) -> list[Result]:
    """The environment's results, one per call that it got; ``view``: that of a single call without one."""
    if returned is None and calls == 1:
        returned = [{"content": view, "is_error": answer.invalid}]
    returned = (returned or []) if calls else []
    if len(returned) != calls:
        raise EnvironmentFailure(
            "step", f"a step with {calls} calls must give info['results'] with one result per call, not {len(returned)}"
        )
    return returned


def _error(text: str) -> Result:
    return {"content": text, "is_error": True}


MOST_INVALID = 5
"""turns in a row without a valid action, after which an opponent has failed"""
PRIVATE = ("note", "results")
"""keys of ``info`` that only the role sees whose turn they are about"""


def seat_of(roles: Sequence[str], seed: int) -> str:
    """The role of the policy: all rollouts of a task have one, and consecutive seeds take turns."""
    return roles[seed % len(roles)]


def endpoint_of(opponent: str | OpponentConfig) -> str | Endpoint[str]:
    """The opponent of the configuration, ready to be asked."""
    return opponent if isinstance(opponent, str) else chat_endpoint(opponent, "the opponent")


class Opponents:
    """Plays all roles of one episode but that of the policy.

    Args:
        opponent: ``random``, or the endpoint of a model.
        seat: the policy's role.
        settings: of the policy's prompts, from which those of a model are made.
        task: the episode's in words, for a role to which the environment gives none of its own.
        max_tokens: that a model may write per turn.
        max_turns: turns of others in a row after which the episode is truncated.
    """

    def __init__(
        self,
        opponent: str | Endpoint[str],
        seat: str,
        settings: PromptSettings,
        reader: ActionReader,
        tokenizer: Any,
        rng: random.Random,
        *,
        task: str,
        max_tokens: int,
        max_turns: int,
    ) -> None:
        self.seat = seat
        self._opponent, self._settings, self._reader, self._tokenizer = opponent, settings, reader, tokenizer
        self._rng, self._task, self._max_tokens, self._max_turns = rng, task, max_tokens, max_turns
        self._prompts: dict[str, ChatPrompts] = {}

    def fork(self) -> Opponents:
        """Those of a branch; the random state is shared, so that branches do not meet the same moves."""
        other = copy.copy(self)
        other._prompts = {role: prompts.fork() for role, prompts in self._prompts.items()}
        return other

    async def play(self, environment: Any, first: Answer) -> tuple[Answer, list[OtherTurn]]:
        """Play on from ``first`` until the policy moves or the episode is over.

        Returns:
            The state then, with the reward, flags of validity, notes and results of ``first`` and all that was paid by
            role; ``first`` itself if nobody else moves. And the turns.

        Raises:
            EnvironmentFailure: of kind ``opponent``: it does not answer, has no legal action, or finds no valid one.
        """
        seen, turns, invalid = first, list[OtherTurn](), 0
        info = {name: seen.info[name] for name in ("tools", *PRIVATE) if name in seen.info}
        paid: dict[str, dict[str, float]] = {}
        while not (seen.terminated or seen.truncated) and seen.role not in (None, self.seat):
            if len(turns) == self._max_turns:
                seen.truncated = True
                break
            before = Answer(seen.observation, {k: v for k, v in seen.info.items() if k not in PRIVATE})
            response, action, reason = await self._turn(before)
            if action is not None:
                _collect(paid, seen)
                seen = await environment.step(action)
                reason = reason or ("the environment refused the action" if seen.invalid else None)
                info |= {"tools": seen.info["tools"]} if "tools" in seen.info else {}
            by = self._opponent if isinstance(self._opponent, str) else self._opponent.config.model
            turns.append(OtherTurn(str(before.role), by, before.observation, response, action, reason))
            invalid = invalid + 1 if reason else 0
            if invalid == MOST_INVALID and not (seen.terminated or seen.truncated):
                lack = f"no valid action in {invalid} turns ({reason}); the last: {response[-200:]!r}"
                raise EnvironmentFailure("opponent", f"{by} as {before.role!r} found {lack}")
        if not turns:
            return first, []
        _collect(paid, seen)
        if results := info.get("results"):  # the last one answers the policy's call with what it sees now
            content = f"{results[-1]['content']}\n{seen.observation}".strip()
            info["results"] = [*results[:-1], {**results[-1], "content": content}]
        public = {name: value for name, value in seen.info.items() if name not in PRIVATE}
        return replace(seen, reward=first.reward, info={**public, **paid, **info, "invalid": first.invalid}), turns

    async def _turn(self, seen: Answer) -> tuple[str, str | None, str | None]:
        """Response, action and why that is invalid, of the role that moves in the state ``seen``."""
        if isinstance(self._opponent, str):
            if not seen.admissible:
                raise EnvironmentFailure("opponent", f"the environment lists no legal action for {seen.role!r}")
            action = self._rng.choice(seen.admissible)
            return action, action, None
        if seen.info.get("images"):
            raise EnvironmentFailure("opponent", "a model behind a URL gets text, and this state has images")
        if seen.role not in self._prompts:
            settings = replace(self._settings, role=seen.role)
            self._prompts[seen.role] = ChatPrompts(settings, seen.info["task"] or self._task)
        prompts, config = self._prompts[seen.role], self._opponent.config
        assert isinstance(config, OpponentConfig)
        messages = await guarded(prompts.next, seen)
        # The seed makes each question another one: equal ones would share an answer.
        question = {"messages": messages, "seed": self._rng.getrandbits(31), **config.limit(self._max_tokens)}
        try:
            text = plain_text(await self._opponent.ask(question))
        except JudgeError as error:
            raise EnvironmentFailure("opponent", str(error)) from None
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        parsed = await self._reader.read(ids, text, seen.admissible, ())
        prompts.answered(text, history_text(parsed, text, self._settings.options.keep_thinking))
        return text, parsed.action, parsed.reason


def opponents_of(
    opponent: str | Endpoint[str], roles: Sequence[str], seed: int, rollout: str, **rest: Any
) -> Opponents | None:
    """The opponents of an episode; None: the policy plays all roles.

    Args:
        roles: those that the environment declares.
        seed: of the task; decides which role the policy has.
        rollout: decides, with the seed, on random moves.
        rest: the other arguments of :class:`Opponents`.

    Raises:
        EnvironmentFailure: there are no roles to play.
    """
    if opponent == SELF:
        return None
    if len(roles) < 2:
        raise EnvironmentFailure("opponent", "turnkey.opponent needs an environment whose metadata declares its roles")
    seat, rng = seat_of(roles, seed), random.Random(f"{rollout}/{seed}")
    return Opponents(opponent, seat, rng=rng, **rest)


def _collect(paid: dict[str, dict[str, float]], answer: Answer) -> None:
    """Add to ``paid`` what ``answer`` pays by role."""
    for name in ("outcome", "rewards"):
        for role, number in answer.info.get(name, {}).items():
            paid.setdefault(name, {})[role] = paid.get(name, {}).get(role, 0.0) + number
