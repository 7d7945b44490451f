"""Contrastive rewards (arXiv:2403.07708): the reward minus that of baseline episodes, played once before."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_turnkey.advantage.params import ConfigError, check
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.rewards.components import RewardError, Steps, Values, at_the_end, register_reward


@register_reward("contrastive")
@dataclass(frozen=True)
class Contrastive:
    """Minus the mean reward of stored baseline episodes of the task, on the last step.

    With the components that give the reward r the sum is r' = r - mean_j r_j, where r_j are the rewards of episodes
    that another policy, such as the initial one, played of the same task. They stand in a field of the data row, or in
    a JSON file from a field of the data row to a number or a list of numbers.

    Source: arXiv:2403.07708; the number of baseline samples is not known. A method that compares inside the group of a
    task takes the baseline out again.
    """

    field: str = "extra_info.baseline_rewards"
    """field of the data row that holds a number or a list of them; not read when there is a file"""
    file: str | None = None
    """JSON file: an object with a number, or a list of them, per task"""
    key: str = "turnkey_task"
    """of the file: field of the data row that names the task in it; a dot goes into a field"""
    missing: float | None = None
    """baseline of a task that has none; null: its episode fails"""

    def __post_init__(self) -> None:
        check(self.missing is None or math.isfinite(self.missing), "missing", "a finite number", self.missing)
        if self.file is not None:
            check(len(self._stored) > 0, "file", "a JSON object with at least one task", self.file)

    @cached_property
    def _stored(self) -> Mapping[str, Any]:
        path = Path(str(self.file)).expanduser()
        try:
            stored = json.loads(read_text(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"file: {self.file} cannot be read ({type(error).__name__}: {error})") from error
        check(isinstance(stored, dict), "file", "a JSON object from tasks to rewards", type(stored).__name__)
        return stored

    def __call__(self, steps: Steps) -> Values:
        row = steps[-1].row
        if self.file is None:
            where, stored = f"the field {self.field} of the data row", _at(row, self.field)
        else:
            name = _at(row, self.key)
            where, stored = f"{self.file}, task {str(name)[:200]}", self._stored.get(str(name))
        stored = self.missing if stored is None else stored
        values: Any = getattr(stored, "tolist", lambda: stored)()
        values = list(values) if isinstance(values, list | tuple) else [values]
        good = [isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values]
        if not values or not all(good):
            hint = "; the option missing is the baseline of tasks without one" if stored is None else ""
            raise RewardError(f"{where}: expected a number or a list of numbers, got {stored!r}{hint}")
        return at_the_end(steps, -math.fsum(values) / len(values))


def _at(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
