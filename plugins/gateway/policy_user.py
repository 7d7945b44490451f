"""Lets the policy play the simulated user (``user: {url: policy}``); its lines are not trained.

Imported by name from ``rollout/agent_loop.py``, which lies on a lower floor.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.gateway.process import codec_of, limits_of
from verl_turnkey.plugins.gateway.server import gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import Aborted, Limits, policy_turn
from verl_turnkey.plugins.rollout.episode import Generated
from verl_turnkey.plugins.verl_api import builders

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.agent_loop import EnvAgentLoop
    from verl_turnkey.plugins.rollout.worker import WorkerProcess

TURNS = 10_000
"""upper bound of answers; the limits of the environment end the episode first"""

_models: WeakKeyDictionary[WorkerProcess, tuple[Codec, Limits]] = WeakKeyDictionary()
"""for each process, made by its first episode: what does not depend on the episode"""
_free: list[str] = []
"""secrets of episodes that have ended; with them again, environments of equal arguments are reused"""


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
