"""Calls a user's function for one episode, in any process; what it returns or raises becomes an ``Outcome``."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from verl_turnkey.envs.agents.base import REASON_CHARS, AgentHandle, Outcome, SyncAgentHandle, without_secret
from verl_turnkey.envs.agents.results import read_result

logger = logging.getLogger(__name__)
KEY = "turnkey.agent.run"
"""the configuration key that names the function, for errors"""


async def call(
    function: Callable[..., Any], task: Mapping[str, Any], agent: AgentHandle, threads: Executor | None = None
) -> Outcome:
    """Call ``function(task, agent)``. One that is not ``async`` runs in ``threads``; None: here, and it blocks.

    Raises:
        AgentFailure: what it returned cannot be read.
    """
    try:
        if _is_async(function):
            value = await function(task, agent)
        elif threads is None:
            value = function(task, SyncAgentHandle(agent))
        else:
            context, handle = contextvars.copy_context(), SyncAgentHandle(agent)
            value = await asyncio.get_running_loop().run_in_executor(
                threads, lambda: context.run(_without_exit, function, task, handle)
            )
    except (Exception, SystemExit) as error:
        logger.debug("the agent's function raised", exc_info=True)
        source = inspect.getsourcefile(inspect.unwrap(function)) or ""
        return Outcome(reason=_reason(error, source, agent.key))
    return read_result(value, f"{KEY}={name_of(function)}")


def name_of(function: Callable[..., Any]) -> str:
    """``module:name``, as a user writes it."""
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _without_exit(function: Callable[..., Any], task: Mapping[str, Any], agent: SyncAgentHandle) -> Any:
    try:
        return function(task, agent)
    except SystemExit as error:  # a future would hand it to the event loop, which would stop
        raise RuntimeError(f"SystemExit: {error.code}") from error


def _reason(error: BaseException, source: str, secret: str) -> str:
    """Class and message of an exception without ``secret``, cut if long, and the line of ``source`` where it arose."""
    what = without_secret(traceback.format_exception_only(type(error), error)[-1].strip(), secret)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == source), frames[-1])
    place = f" ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
    return what[: REASON_CHARS - len(place)] + place
