"""MiniGrid and BabyAI as text or as pictures: what the agent sees, how far away it is, and what it carries.

As in BabyAI-Text (Carta et al. 2023, "Grounding large language models in interactive environments with online
reinforcement learning"), the text describes the partial, egocentric view that MiniGrid gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

import gymnasium
import minigrid
from minigrid.core.actions import Actions
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, OBJECT_TO_IDX
from minigrid.minigrid_env import MiniGridEnv

from verl_turnkey.envs.base import StepResult, TextEnv, check, check_name, digest, is_count, words
from verl_turnkey.envs.errors import UnknownEnvironmentError

ACTIONS = {
    "turn left": Actions.left,
    "turn right": Actions.right,
    "go forward": Actions.forward,
    "pick up": Actions.pickup,
    "drop": Actions.drop,
    "toggle": Actions.toggle,
}
# Levels in which the agent declares success with the action "done"; in the others it has no effect.
NEEDS_DONE = ("MiniGrid-GoToDoor", "MiniGrid-GoToObject")
REWARDS = ("success", "time_decay")
DOOR_STATES = ("open", "closed", "locked")
OPEN = 0
UNSEEN, EMPTY, WALL, FLOOR, DOOR, GOAL, LAVA = (
    OBJECT_TO_IDX[name] for name in ("unseen", "empty", "wall", "floor", "door", "goal", "lava")
)

gymnasium.register_envs(minigrid)


class MiniGridText(TextEnv):
    """A level of MiniGrid or BabyAI; actions are words.

    Args:
        level: any ``MiniGrid-...`` or ``BabyAI-...`` id of the package ``minigrid``.
        reward: ``success`` gives 1.0 for solving the task and 0.0 otherwise; ``time_decay`` gives MiniGrid's own
            reward, ``1 - 0.9 * steps / max_steps``.
        max_steps: steps after which the episode is truncated; ``None`` leaves the level's own limit.
        images: show the agent's view as a picture (RGB, the agent at the bottom facing up); the text then says only
            what the agent carries.
        tile: side of a cell in pictures, in pixels; with 8 the view of 7 x 7 cells has 56 x 56 pixels.

    ``state_key`` is a hash of the full state, not of the text: grid, pose, carried object, mission, progress. ``task``
    is the mission. An action that is none of the words leaves the state unchanged, counts as a step and sets
    ``invalid``. The seed determines the start.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "thread_safe": True, "memory_mb": 1}

    def __init__(
        self,
        level: str = "MiniGrid-DoorKey-5x5-v0",
        reward: str = "success",
        max_steps: int | None = None,
        images: bool = False,
        tile: int = 8,
    ) -> None:
        super().__init__(max_steps)
        check(isinstance(images, bool), "images", "true or false", images)
        check(is_count(tile) and tile <= 64, "tile", "an integer from 1 to 64", tile)
        self._tile = tile if images else 0
        levels = [name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-"))]
        check_name(level, levels, "minigrid has no level", "", UnknownEnvironmentError)
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        self._grid_env = cast("MiniGridEnv", gymnasium.make(level, disable_env_checker=True).unwrapped)
        self._success_only = reward == "success"
        self._actions = dict(ACTIONS, done=Actions.done) if level.startswith(NEEDS_DONE) else ACTIONS

    @property
    def grid_env(self) -> MiniGridEnv:
        """The MiniGrid environment underneath, for oracles."""
        return self._grid_env

    @property
    def turn_limit(self) -> int:
        return self._grid_env.max_steps

    def begin(self, seed: int) -> tuple[StepResult, str]:
        env = self._grid_env
        view, _ = env.reset(seed=seed)
        if self.max_steps is not None:  # after the reset: BabyAI levels compute their own limit in it
            env.max_steps = self.max_steps
        return StepResult(**self._seen(view), state_key=self._state_key(), admissible=list(self._actions)), env.mission

    def act(self, action: str) -> StepResult:
        env = self._grid_env
        move = self._actions.get(words(action))
        if move is None:
            env.step_count += 1
            return replace(self.refused(), truncated=env.step_count >= env.max_steps)
        view, reward, terminated, truncated, _ = env.step(move)
        success = bool(terminated and float(reward) > 0)
        return StepResult(
            **self._seen(view),
            state_key=self._state_key(),
            admissible=list(self._actions),
            reward=float(success) if self._success_only else float(reward),
            success=success,
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    def _seen(self, view: Any) -> dict[str, Any]:
        """Observation and images of a result."""
        if not self._tile:
            return {"observation": describe(view["image"], self._grid_env.carrying)}
        picture = self._grid_env.get_pov_render(self._tile)
        return {"observation": _carried(self._grid_env.carrying), "images": [picture]}

    def _state_key(self) -> str:
        env = self._grid_env
        x, y = env.agent_pos
        cells = [_encode(cell) for cell in env.grid.grid]
        return digest(cells, int(x), int(y), int(env.agent_dir), _encode(env.carrying), env.mission, _progress(env))


def _encode(thing: Any) -> Any:
    """Type, color and state of a cell, and of what a box holds (MiniGrid's own encoding leaves that out)."""
    if thing is None:
        return 0
    return (*thing.encode(), _encode(thing.contains)) if thing.contains else tuple(thing.encode())


def _progress(env: MiniGridEnv) -> list[str]:
    """Which parts of a compound BabyAI instruction are done, which the grid does not show."""
    flags: list[str] = []
    todo = [getattr(env, "instrs", None)]
    while todo:
        instruction = todo.pop()
        flags += [str(getattr(instruction, name)) for name in ("a_done", "b_done") if hasattr(instruction, name)]
        todo += [getattr(instruction, name) for name in ("instr_a", "instr_b") if hasattr(instruction, name)]
    return flags


def describe(image: Any, carrying: Any) -> str:
    """Words for MiniGrid's view: an array (width, height, 3), the agent at (width // 2, height - 1), facing y = 0.

    Walls are described by the number of free steps in three directions; things in sight follow, nearest first.
    """
    width, height = image.shape[:2]
    middle, last = width // 2, height - 1

    def free(dx: int, dy: int) -> int:
        steps, x, y = 0, middle + dx, last + dy
        while 0 <= x < width and 0 <= y < height:
            kind, _, state = image[x, y]
            if kind not in (EMPTY, FLOOR, GOAL) and (kind != DOOR or state != OPEN):
                break
            steps, x, y = steps + 1, x + dx, y + dy
        return steps

    seen = []
    for x in range(width):
        for y in range(height):
            if image[x, y, 0] not in (UNSEEN, EMPTY, WALL, FLOOR) and (x, y) != (middle, last):
                forward, right = last - y, x - middle
                seen.append((forward + abs(right), forward, right, _name(image[x, y])))
    things = "; ".join(f"{name} {_place(forward, right)}" for _, forward, right, name in sorted(seen))
    return (
        f"Free steps: {free(0, -1)} ahead, {free(-1, 0)} left, {free(1, 0)} right. "
        f"You see {things or 'nothing'}. {_carried(carrying)}"
    )


def _carried(thing: Any) -> str:
    return f"You carry {f'a {thing.color} {thing.type}' if thing else 'nothing'}."


def _name(cell: Any) -> str:
    kind, color, state = (int(value) for value in cell)
    if kind == LAVA:
        return "lava"
    name = f"{IDX_TO_COLOR[color]} {IDX_TO_OBJECT[kind]}"
    if kind == DOOR:
        name = f"{DOOR_STATES[state]} {name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _place(forward: int, right: int) -> str:
    if (forward, right) == (1, 0):
        return "directly ahead"
    parts = [(forward, "forward"), (right, "right") if right > 0 else (-right, "left")]
    return " and ".join(f"{n} step{'s' if n > 1 else ''} {direction}" for n, direction in parts if n)
