"""An environment that breaks on every other start, in the way its arguments say. It never pays anything."""

import itertools
import time
from collections import defaultdict

import gymnasium

FAULTS = ("reset", "step", "nan", "hang")
# Counted for each fault alone, so that it does not matter in which order episodes start: of an even number half break.
_starts = defaultdict(itertools.count)


def walk(text, admissible):
    """The action of every turn: those of an untrained model reach their limit of tokens, and such a turn has none."""
    return "walk"


class Broken(gymnasium.Env[str, str]):
    metadata = {"render_modes": [], "thread_safe": True, "memory_mb": 1}  # noqa: RUF012 - one process, one counter

    def __init__(self, fault="none"):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.breaks = self.fault in FAULTS and next(_starts[self.fault]) % 2 == 0
        self.steps = 0
        if self.breaks and self.fault == "reset":
            raise RuntimeError("no such room")
        return "You are in a room.", {"state_key": 0}

    def step(self, action):
        self.steps += 1
        broken = self.breaks and self.steps == 2
        if broken and self.fault == "step":
            raise RuntimeError("the floor gave way")
        if broken and self.fault == "hang":
            time.sleep(3600)
        reward = float("nan") if broken and self.fault == "nan" else 0.0
        done = self.steps == 3
        return f"You are in room {self.steps}.", reward, done, False, {"state_key": self.steps, "won": done}


gymnasium.register("test/Broken-v0", entry_point=Broken, disable_env_checker=True)
