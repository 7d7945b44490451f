"""What a turn of the model leads to: a step of the environment, and the results of the turn's calls.

Tools that are not the environment's, verl's own and those of MCP servers, are called here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.mcp_servers.tools import EpisodeTools, Servers
from verl_turnkey.envs.prompting.actions import Call, ParsedAction
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.tools import calls_text, read_tools, tool_names
from verl_turnkey.plugins.rollout.branching import Trajectory

# --- tools of the worker ----------------------------------------------------------------------------------------------


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


# --- the answer -------------------------------------------------------------------------------------------------------

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
