"""An environment of your own: text in, text out, registered with gymnasium under an id of your own.

``TextEnv`` keeps the books (step limit, the end of an episode, the keys of ``info``); any ``gymnasium.Env[str, str]``
will do as well. ``turnkey env-check examples/custom_env.py`` plays it; ``turnkey tasks data/ --env
examples/custom_env.py`` writes tasks, to train on with ``turnkey.modules=[examples/custom_env.py]``.
"""

from __future__ import annotations

import gymnasium
import numpy as np

from verl_turnkey.envs import StepResult, TextEnv


class GuessNumber(TextEnv):
    """Find a number between 1 and ``highest``; after each guess the answer is "higher" or "lower"."""

    metadata = {"render_modes": [], "thread_safe": True, "memory_mb": 1}  # noqa: RUF012 - gymnasium's own attribute

    def __init__(self, highest: int = 20, max_steps: int = 6) -> None:
        super().__init__(max_steps)
        self.highest = highest

    def begin(self, seed: int) -> tuple[StepResult, str]:
        # One seed, one number: the episodes of a group face the same task.
        self.number = int(np.random.default_rng(seed).integers(1, self.highest + 1))
        self.low, self.high = 1, self.highest
        return self.result("Guess."), f"Find the number between 1 and {self.highest}."

    def act(self, action: str) -> StepResult:
        # A model may write thousands of digits, and int() raises ValueError for more than 4300.
        if not action.strip().isdecimal() or len(action) > 100:
            return self.refused()
        guess = int(action)
        if guess == self.number:
            return self.result("Found.", reward=1.0, terminated=True, success=True)
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return self.result("Higher." if guess < self.number else "Lower.")

    def result(self, text: str, **more: float | bool) -> StepResult:
        # Steps of different episodes are compared if their keys are equal. The key has the state (here the number) and
        # what the agent has learned (the bounds), but neither text nor step number.
        return StepResult(text, state_key=f"{self.number} {self.low} {self.high}", **more)


gymnasium.register("example/GuessNumber-v0", entry_point=f"{__name__}:GuessNumber")
