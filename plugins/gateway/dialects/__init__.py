"""The APIs that agents speak: pure functions between their JSON and :mod:`verl_turnkey.plugins.gateway.messages`."""

from __future__ import annotations

from verl_turnkey.plugins.gateway.dialects.chat import Chat
from verl_turnkey.plugins.gateway.dialects.messages import Messages
from verl_turnkey.plugins.gateway.dialects.responses import Responses
from verl_turnkey.plugins.gateway.messages import Dialect

DIALECTS: tuple[Dialect, ...] = (Chat(), Responses(), Messages())

__all__ = ["DIALECTS", "Chat", "Messages", "Responses"]
