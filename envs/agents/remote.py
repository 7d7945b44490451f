"""Asks a service to run an agent, on this machine or another: ``POST URL``, answered when the episode is over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, Outcome, cut, without_secret
from verl_turnkey.envs.agents.calls import KEY
from verl_turnkey.envs.agents.results import read_result
from verl_turnkey.envs.daemon_threads import DaemonThreads
from verl_turnkey.envs.http import ServerError, check_url, post_json

LATE = 60.0
"""seconds after which a thread gives up a service that answers too late"""


def is_url(run: str) -> bool:
    """Whether ``turnkey.agent.run`` is the address of a service."""
    return run.lower().startswith(("http://", "https://"))


class RemoteRunner:
    """Sends each episode to a service as ``{"task", "base_url", "key", "model"}``.

    The service runs the agent against ``base_url`` and answers when it has ended, with what a function may return: a
    number, ``{"reward", "success", "turns", "extra"}``, or null if the agent reports its reward itself.

    Args:
        url: of the service; a request that never reached it is sent again, any other is not.
        timeout: seconds that an episode may take; after them the gateway answers 404.

    Raises:
        EnvironmentKwargsError: ``url`` is not a URL.
    """

    def __init__(self, url: str, *, timeout: float, most_threads: int = 256) -> None:
        check_url(url, KEY)
        self.url, self._timeout = url, timeout
        self._threads = DaemonThreads(most_threads, "remote-agent")

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> Outcome:
        """As ``Runner.run``."""
        episode = {"task": dict(task), "base_url": agent.base_url, "key": agent.key, "model": agent.model}
        post = partial(post_json, self.url, episode, timeout=self._timeout + LATE, key=KEY)
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._threads, post)
            result = await asyncio.wait_for(answer, self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return Outcome(truncated=True, reason=f"the agent ran longer than turnkey.agent.timeout={self._timeout:g}")
        except ServerError as error:
            return Outcome(reason=cut(without_secret(str(error), agent.key)))
        return read_result(result, f"{KEY}={self.url}")

    async def close(self) -> None:
        """Nothing to end."""


def address_towards(url: str, ipv6: bool = False) -> str:
    """The IP address of this machine from which it reaches the host of ``url``; nothing is sent.

    Raises:
        AgentFailure: the host has no address of that version of IP, or is not reachable.
    """
    parts, family = urlsplit(url), socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        place = socket.getaddrinfo(parts.hostname, parts.port or 80, family, socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError as error:
        raise AgentFailure(f"{KEY}={url} cannot be reached: {error}") from None
