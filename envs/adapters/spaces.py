"""Any environment of gymnasium in words: its spaces as text, and the model's text as a value of its action space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gymnasium import spaces

from verl_turnkey.envs.adapters._spaces import Names, check_space, how_to_write, names_of, read, rendered
from verl_turnkey.envs.base import StepResult, TextEnv, check, digest
from verl_turnkey.envs.registry import make
from verl_turnkey.envs.user_modules import load_function

MOST_ACTIONS = 100
"""actions of a Discrete space that count as admissible, and that prompts list"""


class SpacesText(TextEnv):
    """An environment with ordinary spaces: Dict, Tuple, Discrete, MultiDiscrete, MultiBinary, Box, Text.

    Args:
        env: its gymnasium id, as in ``gymnasium.make``.
        env_kwargs: its arguments.
        task: what to do, in words; how to write an action is added.
        actions: names of the values of a Discrete action space, or of a vector's components; by part for a Dict.
        names: the same for the observation.
        digits: decimals of numbers in observations.
        observation: ``module:function`` from the observation to text, instead.
        solved: return from which an episode counts as solved; None: ``info["success"]`` or ``info["is_success"]``, or
            where there is neither, an end with a positive reward.
        max_steps: steps after which an episode is truncated; None: the environment's own limit.

    ``state_key`` is ``info["state_key"]`` or, without it, a hash of the observation's text. Where ``info`` has an
    ``action_mask``, it says which actions are admissible.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "thread_safe": False, "memory_mb": 200}

    def __init__(
        self,
        env: str,
        env_kwargs: Mapping[str, Any] | None = None,
        task: str = "",
        actions: Names = (),
        names: Names = (),
        digits: int = 3,
        observation: str | None = None,
        solved: float | None = None,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(max_steps)
        check(isinstance(digits, int) and 0 <= digits <= 15, "digits", "an integer from 0 to 15", digits)
        self.world: Any = make(env, env_kwargs)
        self._task, self._actions, self._names, self._digits, self._solved = task, actions, names, digits, solved
        self._show = None if observation is None else load_function(observation, "observation")
        check_space(self.world.action_space, actions, "action space", "another action space: wrap the environment")
        if self._show is None:
            space = self.world.observation_space
            check_space(space, names, "observation space", "observation to a function of yours that makes text of it")
        self._return = 0.0

    def begin(self, seed: int) -> tuple[StepResult, str]:
        observation, info = self.world.reset(seed=seed)
        self._return = 0.0
        task = self._task or str(info.get("task", ""))
        how = f"An action is {how_to_write(self.world.action_space, self._actions)}."
        return self._result(observation, info), f"{task}\n{how}" if task else how

    def act(self, action: str) -> StepResult:
        try:
            value = read(self.world.action_space, action, self._actions)
        except (ValueError, OverflowError):  # JSONDecodeError is one
            return self.refused()
        observation, reward, terminated, truncated, info = self.world.step(value)
        self._return += float(reward)
        return self._result(observation, info, float(reward), bool(terminated), bool(truncated))

    def close(self) -> None:
        self.world.close()

    def _result(
        self,
        observation: Any,
        info: Mapping[str, Any],
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
    ) -> StepResult:
        text = self._text(observation)
        key = info.get("state_key")
        return StepResult(
            text,
            digest(text) if key is None else key,
            self._admissible(info),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            success=self._success(info, reward, terminated),
            invalid=bool(info.get("invalid")),
            extra=info.get("extra") or {},
        )

    def _text(self, observation: Any) -> str:
        if self._show is None:
            return rendered(self.world.observation_space, observation, self._names, self._digits)
        return str(self._show(observation))

    def _admissible(self, info: Mapping[str, Any]) -> list[str] | None:
        space = self.world.action_space
        if not isinstance(space, spaces.Discrete) or space.n > MOST_ACTIONS:
            return None
        names = names_of(self._actions, "") or [str(space.start + n) for n in range(space.n)]
        mask = info.get("action_mask")
        allowed = [name for n, name in enumerate(names) if mask is None or mask[n]]
        return allowed or list(names)  # a mask of nothing, as at the end

    def _success(self, info: Mapping[str, Any], reward: float, terminated: bool) -> bool:
        if self._solved is not None:
            return self._return >= self._solved
        for key in ("success", "is_success"):
            if key in info:
                return bool(info[key])
        return terminated and reward > 0
