"""An environment that breaks on demand, for the hosts to import through ``turnkey.modules``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np


class Awkward(gymnasium.Env[str, str]):
    """Does what the action or ``on_reset`` says. Does not tell its state, its actions or whether it was won."""

    def __init__(
        self,
        on_reset: str = "ok",
        observation: str = "a room",
        images: int = 0,
        says_more: bool = False,
        same_words: bool = False,
        roles: int = 1,
    ) -> None:
        self.on_reset, self.observation, self.images, self.says_more = on_reset, observation, images, says_more
        self.same_words, self.roles = same_words, roles

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if self.on_reset == "raise":
            raise RuntimeError("the reset is broken")
        if self.on_reset == "hang":
            time.sleep(60)
        if self.on_reset == "die":
            os._exit(5)
        if self.on_reset == "none":
            return self.observation, None
        self.heard: list[str] = []
        first = self.observation if self.same_words else f"{self.observation} {seed}"
        return first, {"task": "do as you are told", **self._seen(0), **self._more("")}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "raise":
            raise RuntimeError("the step is broken")
        if action == "hang":
            time.sleep(60)
        self.heard += [] if action == "stumble" else [action]
        reward = float("nan") if action == "nan" else 0.5 if action in ("win", "find", "time out") else 0.0
        observation = self.observation * (100 if action == "grow" else 1)
        info = {"invalid": action == "stumble", **self._seen(100), **self._more(action)}
        return observation, reward, action in ("win", "lose"), action == "time out", info

    def _more(self, action: str) -> dict[str, Any]:
        """Of the answer: a tool call for each word "call" of the action, and a potential that grows with it. Of the
        state: whose move it is, what it is worth, and the way there."""
        calls = ["call"] * action.split().count("call")
        state = {
            "role": "ab"[len(self.heard) % self.roles],
            "turn_value": len(self.heard),
            "parent": " ".join(self.heard),
        }
        return {"extra": {"tool_calls": calls, "potential": 0.5 * len(calls), **state}} if self.says_more else {}

    def _seen(self, brightness: int) -> dict[str, Any]:
        """Grey images, when there are any; one that is none for a negative number."""
        if self.images < 0:
            return {"images": ["a painting"]}
        return {"images": [np.full((20, 30, 3), brightness, np.uint8)] * self.images} if self.images else {}


if "contract/Awkward-v0" not in gymnasium.registry:
    gymnasium.register("contract/Awkward-v0", entry_point=Awkward)


class Gallery(gymnasium.Env[str, str]):
    """The words are the same in every state: only pictures tell where the moves "left" and "right" have led.

    Args:
        shows: number of pictures before each move, the last of which ends the episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"thread_safe": True, "deepcopy": True}

    def __init__(self, shows: Sequence[int] = (1, 1)) -> None:
        self.shows = shows

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.way = b""
        return "a room", {"task": "go", **self._seen()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "raise":
            raise RuntimeError("the step is broken")
        self.way += action[:1].encode()
        over, lefts = len(self.way) == len(self.shows), self.way.count(b"l")
        return "a room", 0.25 * lefts, over, False, {"success": over and lefts > 1, **self._seen()}

    def _seen(self) -> dict[str, Any]:
        count = self.shows[len(self.way)] if len(self.way) < len(self.shows) else 0
        draw = np.random.default_rng([1, *self.way])
        images = [draw.integers(0, 256, (16, 16 + 8 * n, 3), np.uint8) for n in range(count)]
        return {"images": images} if images else {}


class Tree(gymnasium.Env[str, str]):
    """Two moves lead to one of four leaves. The state is the way there."""

    metadata: ClassVar[dict[str, Any]] = {"thread_safe": True, "deepcopy": True}
    LEAVES: ClassVar[dict[str, float]] = {"LL": 0.0, "LR": 1.0, "RL": 2.0, "RR": 5.0}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.way, self.drawn = "", np.random.default_rng().random()
        return self._observation(), {"task": "climb", "state_key": f"way {self.way}", "admissible": ["L", "R", "break"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "break":
            raise RuntimeError("the branch broke")
        self.way += action
        reward = self.LEAVES.get(self.way, 0.25 * (action == "R"))
        info = {"state_key": f"way {self.way}", "admissible": ["L", "R", "break"]}
        return self._observation(), reward, len(self.way) == 2, False, info

    def _observation(self) -> str:
        return f"at <{self.way}>"


class ReplayedTree(Tree):
    """Cannot copy itself."""

    metadata: ClassVar[dict[str, Any]] = {}


class Unsteady(ReplayedTree):
    """Shows a random number that no seed decides on."""

    def _observation(self) -> str:
        return f"at <{self.way}> {self.drawn}"

    def reset(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        seen, info = super().reset(**kwargs)
        return seen, {**info, "state_key": seen}


class Crowded(gymnasium.Env[str, str]):
    """One step, which waits for another episode's; it tells how many were in it at the same time, in this process."""

    metadata: ClassVar[dict[str, Any]] = {"thread_safe": True}
    inside: ClassVar[list[Any]] = []
    most: ClassVar[int] = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "a crowd", {"task": "go in"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.inside.append(self)
        while len(self.inside) < 2 and Crowded.most < 2:
            time.sleep(0.01)
        Crowded.most = max(Crowded.most, len(self.inside))
        time.sleep(0.3)  # for all who may come in
        Crowded.most = max(Crowded.most, len(self.inside))
        self.inside.remove(self)
        return "outside", 0.0, True, False, {"extra": {"most": Crowded.most}}


for entry in (Gallery, Tree, ReplayedTree, Unsteady, Crowded):
    if (name := f"contract/{entry.__name__}-v0") not in gymnasium.registry:
        gymnasium.register(name, entry_point=entry)
