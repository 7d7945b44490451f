"""MiniGrid whose pictures show nothing: what an agent wins here, it wins without looking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import gymnasium
import numpy as np

from verl_turnkey.envs import StepResult
from verl_turnkey.envs.adapters.minigrid import MiniGridText

KWARGS = {"level": "BabyAI-GoToObjS6-v1", "max_steps": 8, "images": True, "tile": 8}
"""what the example plays: an object in a room of 4 x 4 cells; one in fourteen players who act at random finds it"""
Step = TypeVar("Step", bound=Any)


class GreyMiniGrid(MiniGridText):
    """The same levels, words and rewards, with every picture painted over in one grey."""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        result, task = super().begin(seed)
        return grey(result), task

    def act(self, action: str) -> StepResult:
        return grey(super().act(action))


def grey(step: Step) -> Step:
    """``step``, a result or a demonstration, with its images painted over."""
    return replace(step, images=tuple(np.full_like(image, 128) for image in step.images))


gymnasium.register("vision/GreyMiniGrid-v0", entry_point=f"{__name__}:GreyMiniGrid")
