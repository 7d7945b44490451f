"""The tasks of the evidence: what is played, how a prompt is made, and how long a run takes.

Each can be played by a model of a fraction of a million parameters, so that a training step takes seconds on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
if str(QUICKSTART) not in sys.path:
    sys.path.insert(0, str(QUICKSTART))

from training import LEVEL, task_overrides  # noqa: E402

from verl_turnkey.envs.tasks import split_seeds  # noqa: E402


@dataclass(frozen=True)
class Task:
    """One kind of game and the sizes that suit it."""

    name: str
    env: str
    """recipe of the environment: ``turnkey train ENV``"""
    env_id: str
    kwargs: Mapping[str, Any]
    """of the environment, in every task of the files"""
    template: str
    history: int
    """past turns in a prompt"""
    max_turns: int
    prompt_tokens: int
    """room for the longest prompt"""
    response_tokens: int
    """room for the longest action and the end of the turn"""
    steps: int
    """training steps of a run"""
    train_tasks: int = 1024
    further: tuple[str, ...] = field(default=())
    """of the launch line, beside those that every task has"""

    def overrides(self) -> tuple[str, ...]:
        """What of the launch line depends on the task: ``Job(task=...)`` of the quickstart's ``training.py``."""
        usual = task_overrides(
            template=self.template,
            history=self.history,
            max_turns=self.max_turns,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
        )
        return (*usual, *self.further)

    def seeds(self, n_val: int, seed: int) -> tuple[list[int], list[int]]:
        """Environment seeds for training and validation, without repeats, as ``turnkey tasks`` draws them."""
        return split_seeds(self.train_tasks, n_val, seed)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="doorkey",
            env="babyai",
            env_id="turnkey/MiniGrid-v0",
            kwargs={"level": LEVEL, "max_steps": 20},
            template="minigrid",
            history=1,
            max_turns=20,
            prompt_tokens=80,
            response_tokens=4,
            steps=20,
        ),
    )
}
