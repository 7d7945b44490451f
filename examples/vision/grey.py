"""MiniGrid whose pictures show nothing: what an agent wins here, it wins without looking."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np

from verl_turnkey.envs import StepResult
from verl_turnkey.envs.adapters.minigrid import MiniGridText

KWARGS = {"level": "BabyAI-GoToObjS6-v1", "max_steps": 8, "images": True, "tile": 8}
"""what the example plays: an object in a room of 4 x 4 cells; one in fourteen players who act at random finds it"""


class GreyMiniGrid(MiniGridText):
    """The same levels, words and rewards, with every picture painted over in one grey."""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        result, task = super().begin(seed)
        return _grey(result), task

    def act(self, action: str) -> StepResult:
        return _grey(super().act(action))


def _grey(result: StepResult) -> StepResult:
    return replace(result, images=[np.full_like(image, 128) for image in result.images])


gymnasium.register("vision/GreyMiniGrid-v0", entry_point=f"{__name__}:GreyMiniGrid")
