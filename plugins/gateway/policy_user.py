"""Lets the policy play the simulated user (``user: {url: policy}``); its lines are not trained."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.users import asks_policy, with_policy
from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.gateway.process import codec_of, limits_of
from verl_turnkey.plugins.gateway.server import gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import Aborted, Limits, policy_turn
from verl_turnkey.plugins.rollout.agent_loop import EnvAgentLoop
from verl_turnkey.plugins.rollout.episode import Generated
from verl_turnkey.plugins.rollout.worker import WorkerProcess
from verl_turnkey.plugins.verl_api import builders

TURNS = 10_000
"""upper bound of answers; the limits of the environment end the episode first"""

_models: WeakKeyDictionary[WorkerProcess, tuple[Codec, Limits]] = WeakKeyDictionary()
"""for each process, made by its first episode: what does not depend on the episode"""
_free: list[str] = []
"""secrets of episodes that have ended; with them again, environments of equal arguments are reused"""


class PolicyUserLoop(EnvAgentLoop):
    """The agent loop ``turnkey_env``: plays, and answers as the user of tasks that name the policy."""

    async def _with_policy(self, task: Task, sampling_params: dict[str, Any], users: AsyncExitStack) -> Task:
        if not asks_policy(task.kwargs):
            return task
        url = self.user_url = await users.enter_async_context(address(self, sampling_params))
        return replace(task, kwargs=with_policy(task.kwargs, url, 0.8 * self.shared.turnkey.env.step_timeout))


async def _turn(loop: EnvAgentLoop, *call: Any) -> Generated:
    """The policy's turn. A server that drops it, as while weights change, is asked again until the episode ends."""
    while True:
        try:
            return await policy_turn(loop, *call)
        except Aborted:
            await asyncio.sleep(0.5)


@asynccontextmanager
async def address(loop: EnvAgentLoop, sampling: Mapping[str, Any]) -> AsyncIterator[str]:
    """The base URL at which the policy answers one episode's environment; it is sampled with ``sampling``."""
    tokenizer, agent = loop.tokenizer, loop.shared.turnkey.agent
    if loop.shared not in _models:
        codec = codec_of(loop.config, tokenizer, builders.builder_of_loop(loop))
        _models[loop.shared] = codec, replace(limits_of(loop.config), turns=TURNS)
    codec, limits = _models[loop.shared]
    session = Session(
        codec,
        partial(_turn, loop),
        sampling,
        limits,
        secret=_free.pop() if _free else secrets.token_urlsafe(18),
    )
    server = await gateway(agent.listen)
    server.add(session)
    try:
        yield server.url(session.secret, agent.listen)
    finally:
        server.remove(session)
        await session.close(agent.grace)
        _free.append(session.secret)
