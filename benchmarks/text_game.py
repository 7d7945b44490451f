"""A game of a fixed number of turns, whatever the actions, with texts of a fixed length; see gpu_stack.py."""

from __future__ import annotations

import random

import gymnasium

from verl_turnkey.envs import StepResult, TextEnv


class TextGame(TextEnv):
    """Won or lost at random in the last turn; ``length``: half the characters of an observation."""

    metadata = {"render_modes": [], "thread_safe": True, "memory_mb": 1}  # noqa: RUF012 - gymnasium's own attribute

    def __init__(self, turns: int = 20, length: int = 60) -> None:
        super().__init__(turns)
        self._turns, self._length = turns, length

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self._draw, self._turn = random.Random(), 0
        return self._next(), "Say what you do."

    def act(self, action: str) -> StepResult:
        self._turn += 1
        over = self._turn >= self._turns
        won = over and self._draw.random() < 0.5
        return self._next(reward=float(won), terminated=over, success=won)

    def _next(self, **more: float | bool) -> StepResult:
        room = self._draw.randrange(8)
        text = f"You are in room {room}. ".ljust(2 * self._length, ".")
        return StepResult(text, state_key=f"{self._turn} {room}", **more)


gymnasium.register("benchmarks/TextGame-v0", entry_point=f"{__name__}:TextGame")
