"""The model that is trained as somebody the agent talks to (``user: {url: policy}``): it answers, untrained.

Imported by name from ``rollout/agent_loop.py``, which lies on a lower floor.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_turnkey.plugins.gateway.codec import Codec
from verl_turnkey.plugins.gateway.process import codec_of, limits_of
from verl_turnkey.plugins.gateway.server import gateway
from verl_turnkey.plugins.gateway.session import Session
from verl_turnkey.plugins.gateway.turns import policy_turn
from verl_turnkey.plugins.verl_api import builders

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.agent_loop import EnvAgentLoop

TURNS = 10_000
"""most answers in an episode: its own limits end it long before"""

_codecs: dict[int, Codec] = {}
_free: list[str] = []
"""secrets of episodes that have ended; with them again, environments of equal arguments are reused"""


@asynccontextmanager
async def address(loop: EnvAgentLoop, sampling: Mapping[str, Any]) -> AsyncIterator[str]:
    """The base URL at which the policy answers one episode's environment; it is sampled with ``sampling``."""
    tokenizer, agent = loop.tokenizer, loop.shared.turnkey.agent
    if id(tokenizer) not in _codecs:
        _codecs[id(tokenizer)] = codec_of(loop.config, tokenizer, builders.builder_of_loop(loop))
    session = Session(
        _codecs[id(tokenizer)],
        partial(policy_turn, loop),
        sampling,
        replace(limits_of(loop.config), turns=TURNS),
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
