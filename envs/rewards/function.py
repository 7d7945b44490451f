"""The component ``verl``: the reward function that ``reward.custom_reward_function`` names, with verl's signature."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.components import RewardError, Steps, Values, at_the_end, register_reward
from verl_turnkey.envs.user_modules import load_function


@register_reward("verl")
@dataclass(frozen=True)
class VerlFunction:
    """What verl's reward function returns for the episode, on the last step.

    It is called once per episode as verl's reward manager ``naive`` calls it for a row::

        function(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs)

    ``data_source``, ``reward_model.ground_truth`` and ``extra_info`` are those of the data row, ``solution_str`` is the
    text of the last turn. ``extra_info`` further holds ``num_turns`` (messages, two per turn),
    ``rollout_reward_scores`` (empty) and, of ours, ``turns``: a dict with observation, text, content, action, valid,
    reward and success for each. The result is a number, or a dict with the key ``score``.
    """

    path: str | None = None
    """of the file, or pkg://a.module; null: reward.custom_reward_function.path of verl's configuration"""
    function: str = "compute_score"
    """its name there"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """further arguments"""

    def __post_init__(self) -> None:
        check(bool(self.path), "path", "a file, here or as reward.custom_reward_function.path", self.path)
        load_function(self._target, "reward.custom_reward_function.path")  # a missing function is an error at the start

    @property
    def _target(self) -> str:
        path = str(self.path).removeprefix("file://")
        if path.startswith("pkg://"):
            path = path.removeprefix("pkg://").replace("/", ".")
        return f"{path}:{self.function}"

    async def __call__(self, steps: Steps) -> Values:
        row, function = steps[-1].row, load_function(self._target, "reward.custom_reward_function.path")
        names = ("observation", "text", "content", "action", "valid", "reward", "success", "won")
        arguments = {
            "data_source": row.get("data_source"),
            "solution_str": steps[-1].text,
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "extra_info": {
                **(row.get("extra_info") or {}),
                "num_turns": 2 * len(steps),
                "rollout_reward_scores": {},
                "turns": [{name: getattr(step, name) for name in names} for step in steps],
            },
            **self.kwargs,
        }
        if inspect.iscoroutinefunction(function):
            result = await function(**arguments)
        else:  # not in the event loop, which all rollouts of the process share
            result = await asyncio.to_thread(function, **arguments)
        score: Any = result.get("score") if isinstance(result, Mapping) else result
        score = score.item() if hasattr(score, "item") else score
        if not isinstance(score, int | float):  # True is 1 to verl, too
            raise RewardError(f"expected {self.function} to return a number or a dict with 'score', got {result!r}")
        return at_the_end(steps, float(score))
