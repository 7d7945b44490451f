"""The tasks of the evidence: environments, prompts, and lengths of runs.

A model of a fraction of a million parameters can play each, so a training step takes seconds on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
for folder in (QUICKSTART, QUICKSTART.parent):
    if str(folder) not in sys.path:
        sys.path.insert(1, str(folder))  # behind this folder, whose warm_start.py is another

from training import LEVEL, task_overrides  # noqa: E402

from verl_turnkey.envs import tasks as envs_tasks  # noqa: E402
from verl_turnkey.envs.prompting.prompts import LINE  # noqa: E402


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
    val_tasks: int = 128
    task_seed: int | None = None
    """of the tasks, the same in every run, for games that take long to make; None: the run's seed"""
    model_seed: int | None = None
    """of the warm start, one for all runs, where it takes long; None: the run's seed"""
    line: str = LINE
    """of a past turn in the prompt"""
    further: tuple[str, ...] = field(default=())
    """overrides of the launch line, besides those of every task"""

    def overrides(self) -> tuple[str, ...]:
        """Overrides that depend on the task, for ``Job(task=...)`` of the quickstart's ``training.py``."""
        usual = task_overrides(
            template=self.template,
            history=self.history,
            max_turns=self.max_turns,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
        )
        line = () if self.line == LINE else (f"turnkey.rollout.history_line='{self.line}'",)
        return (*usual, *line, *self.further)

    def seeds(self, n_val: int, seed: int) -> tuple[list[int], list[int]]:
        """Distinct environment seeds for training and validation in a run with ``seed``."""
        return envs_tasks.split_seeds(self.train_tasks, n_val, seed if self.task_seed is None else self.task_seed)

    def write(self, folder: Path, n_val: int, seed: int) -> None:
        """Write ``train.parquet`` and ``val.parquet``, as ``turnkey tasks`` does for these seeds."""
        for split, seeds in zip(("train", "val"), self.seeds(n_val, seed), strict=True):
            tasks = [envs_tasks.Task(self.env_id, seed, self.kwargs) for seed in seeds]
            envs_tasks.write_parquet(folder / f"{split}.parquet", tasks, self.name, split)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        # 48 starts: three cells and four directions of the agent, two cells of the key, two of the door. 1,024 seeds
        # have all of them, and so do the 650 of the demonstrations; validation has other seeds and the same starts.
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
            steps=12,
        ),
        Task(
            name="rooms",
            env="babyai",
            env_id="turnkey/MiniGrid-v0",
            # Six rooms in a row: 26 to 43 actions on the shortest way. Each of 28,712 seeds had a start of its own.
            kwargs={"level": "MiniGrid-MultiRoom-N4-S5-v0", "max_steps": 60},
            template="minigrid",
            history=1,
            max_turns=60,
            prompt_tokens=128,
            response_tokens=4,
            steps=8,
            model_seed=0,
        ),
        Task(
            name="kitchen",
            env="textworld",
            env_id="turnkey/TextWorld-v0",
            # Out of the locked bedroom, find the food that is asked for, put it on the stove: 8 to 12 commands. The 64
            # training games have 61 starts; 2 of validation's first 24 have one of these, described in other words.
            kwargs={"challenge": "simple", "rewards": "sparse", "goal": "brief", "reward": "success", "max_steps": 25},
            template=str(HERE / "adventure.txt"),
            history=12,
            line="{action}.",
            max_turns=25,
            prompt_tokens=384,
            response_tokens=10,
            steps=12,
            train_tasks=64,
            val_tasks=48,  # half of a turn's time is the game's
            task_seed=0,
            model_seed=0,
            further=("turnkey.rollout.prompt=template",),
        ),
    )
}
