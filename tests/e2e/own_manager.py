"""An agent-loop manager of a user's own: what verl's contract asks for, and no way to the workers behind it."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils.ray_utils import auto_await


class Manager:
    """Passes prompts on to a manager that nobody else sees."""

    __slots__ = ("_hidden",)

    @classmethod
    @auto_await
    async def create(cls, *args: Any, **kwargs: Any) -> Manager:
        manager = cls()
        manager._hidden = await AgentLoopManagerTQ.create(*args, **kwargs)
        return manager

    def generate_sequences(self, prompts: Any) -> Any:
        return self._hidden.generate_sequences(prompts)
