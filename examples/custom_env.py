"""An environment of your own: gymnasium's contract with text in and text out, registered under an id of your own.

Write tasks with ``turnkey tasks data/ --env example/GuessNumber-v0 --module examples/custom_env.py`` and train on them
with ``turnkey.modules=[examples/custom_env.py]``.
"""

from __future__ import annotations

from typing import Any

import gymnasium


class GuessNumber(gymnasium.Env[str, str]):
    """Find a number between 1 and ``highest``; after each guess the answer is "higher" or "lower"."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(10)

    def __init__(self, highest: int = 20, max_steps: int = 6) -> None:
        self.highest, self.max_steps = highest, max_steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)  # one seed, one number: the episodes of a group face the same task
        self.number = int(self.np_random.integers(1, self.highest + 1))
        self.low, self.high, self.steps = 1, self.highest, 0
        return "Guess.", {**self._info(), "task": f"Find the number between 1 and {self.highest}."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        truncated = self.steps >= self.max_steps
        if not action.strip().isdecimal():
            return "That is no number.", 0.0, False, truncated, {**self._info(), "invalid": True}
        guess = int(action)
        if guess == self.number:
            return "Found.", 1.0, True, False, {**self._info(), "won": True}
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return ("Higher." if guess < self.number else "Lower."), 0.0, False, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        # What is known, not the text of the answer: the state by which steps of different episodes are compared.
        return {"state_key": f"{self.number} {self.low} {self.high}", "won": False, "invalid": False}


gymnasium.register("example/GuessNumber-v0", entry_point=f"{__name__}:GuessNumber")
