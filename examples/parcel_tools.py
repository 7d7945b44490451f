"""The parcel desk of docs/own-environment.md as an environment of tools."""

import random
from typing import Any, ClassVar, Literal

import gymnasium

from verl_turnkey.envs import StepResult, ToolEnv, ToolError, tool
from verl_turnkey.envs.base import digest
from verl_turnkey.envs.tools import call_text


class ParcelTools(ToolEnv):
    """Bring one parcel where its owner wants it."""

    metadata: ClassVar[dict[str, Any]] = {**ToolEnv.metadata, "thread_safe": True, "memory_mb": 1, "deepcopy": True}

    def begin(self, seed: int) -> tuple[StepResult, str]:
        rng = random.Random(seed)
        self.at = {f"P{n}": rng.choice(("Berlin", "Lyon")) for n in (1, 2, 3)}
        self.parcel, self.goal = rng.choice(("P1", "P2", "P3")), rng.choice(("Porto", "Turin"))
        return self.result("Hello."), f"Bring parcel {self.parcel} to {self.goal}."

    @tool
    def track(self, parcel: str) -> str:
        """Tell in which depot a parcel is."""
        if parcel not in self.at:
            raise ToolError(f"there is no parcel {parcel}")
        return self.at[parcel]

    @tool
    def forward(self, parcel: str, depot: Literal["Berlin", "Lyon", "Porto", "Turin"]) -> None:
        """Send a parcel to another depot."""
        self.track(parcel)
        self.at[parcel] = depot
        self.ended = self.at[self.parcel] == self.goal

    def result(self, observation: str) -> StepResult:
        key = digest(sorted(self.at.items()), self.parcel, self.goal)
        return StepResult(observation, key, reward=float(self.ended), terminated=self.ended, success=self.ended)

    def oracle(self) -> list[str]:
        return [call_text("track", parcel=self.parcel), call_text("forward", parcel=self.parcel, depot=self.goal)]


gymnasium.register("my/ParcelTools-v0", entry_point=ParcelTools)
