"""tau2-bench as an environment of tools; see docs/envs/service.md."""

import json
from typing import Any, ClassVar

import gymnasium
from tau2.gym.gym_agent import AgentGymEnv  # pyright: ignore[reportMissingImports]

from verl_turnkey.envs import EnvironmentFailure, StepResult, TextEnv
from verl_turnkey.envs.base import digest
from verl_turnkey.envs.tools import read_turn


class Tau2(TextEnv):
    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "memory_mb": 800}

    def __init__(self, domain="retail", tasks=("0",), user="openai/customer", user_args=None, max_steps=40):
        super().__init__(max_steps)
        self.game_of = lambda task: AgentGymEnv(domain, task, user_llm=user, user_llm_args=user_args)
        self.tasks = tasks

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, "tools": self.tools}

    def begin(self, seed):
        self.game, self.dialogue = self.game_of(self.tasks[seed % len(self.tasks)]), []
        observation, info = self.game.reset()
        self.tools = [tool.openai_schema for tool in info["tools"]]
        return self.seen(observation, bool(observation)), info["policy"]

    def step(self, action):
        self.results = []
        *outcome, info = super().step(action)
        return *outcome, {**info, "results": self.results}

    def act(self, action):
        turn = read_turn(action) or action  # a list of calls, or what is said to the user
        for call in [turn] if isinstance(turn, str) else turn:
            text = call if isinstance(call, str) else json.dumps({"name": call.name, "arguments": call.arguments})
            observation, reward, over, _, info = self.game.step(text)
            self.dialogue += [text, observation]
            self.results.append({"content": observation, "is_error": observation.startswith("tool: Error")})
        invalid = all(result["is_error"] for result in self.results)
        observation = "\n".join(result["content"] for result in self.results)
        ran = not over or info["simulation_run"] != "{}"
        return self.seen(observation, ran, reward=reward, terminated=over, success=reward >= 1, invalid=invalid)

    def seen(self, observation, ran, **outcome):
        if not ran:  # the class logs what its user's model raises, and gives 0
            raise EnvironmentFailure("user", "the simulation broke down, see the log of tau2")
        return StepResult(observation, digest(observation, self.dialogue), **outcome)


gymnasium.register("my/Tau2-v0", entry_point=Tau2)
