"""MiniGrid in a process that is killed at random, as an out-of-memory killer does; see long_run.py."""

from __future__ import annotations

import os
import random
import signal
from typing import Any, ClassVar

import gymnasium

from verl_turnkey.envs.adapters.minigrid import MiniGridText
from verl_turnkey.envs.base import StepResult

ID = "benchmarks/Fragile-v0"


class Fragile(MiniGridText):
    """A level whose process is killed with probability ``deaths`` in each step, drawn apart from the level's seed."""

    metadata: ClassVar[dict[str, Any]] = {**MiniGridText.metadata, "thread_safe": False, "memory_mb": 80}

    def __init__(self, deaths: float = 0.0, **level: Any) -> None:
        super().__init__(**level)
        self._deaths, self._fate = deaths, random.SystemRandom()

    def act(self, action: str) -> StepResult:
        if self._fate.random() < self._deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().act(action)


gymnasium.register(ID, entry_point=Fragile, disable_env_checker=True)
