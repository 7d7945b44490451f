"""Which phase a run is in, from what verl, vLLM and Ray print."""

from __future__ import annotations

import re

PHASES = (
    ("starting Ray", "ray init kwargs: "),
    ("starting verl's trainer", "Started a local Ray instance."),
    ("starting verl's trainer", "Connected to Ray cluster."),
    ("reading the tasks", "Using dataset class: "),
    ("loading the model", "colocated worker base class "),
    ("starting vLLM", "['serve',"),
    ("starting the agent loops", "LLMServerManager: ["),
    ("loading the checkpoint", "Found checkpoint: "),
    ("validating before training", "Creating file logger at "),
)
"""phase, text of the line that begins it; in the order of a start"""
PROGRESS = re.compile(r"Training Progress: .*\| (\d+)/(\d+) \[")
"""verl's bar: the steps that are done, and how many there are"""


class Phases:
    """Follows a start: a line that belongs to an earlier phase changes nothing, since other workers print it later."""

    def __init__(self) -> None:
        self.current = ""
        """empty: unknown"""
        self.validates = False
        """whether the run validates before the first step"""
        self._passed = 0

    def enter(self, text: str) -> str:
        """The phase of a start that the line ``text`` begins, or its first step; empty: the phase is as before.

        Later steps change :attr:`current` alone: they have lines of their own.
        """
        if progress := PROGRESS.search(text):
            started, self._passed = self._passed > len(PHASES), len(PHASES) + 1
            done, steps = map(int, progress.groups())
            self.current = f"step {done + 1}/{steps}" if done < steps else ""
            return "" if started else self.current
        for place, (phase, line) in enumerate(PHASES[self._passed :], self._passed + 1):
            if line in text and (self.validates or not phase.startswith("validating")):
                self._passed, before, self.current = place, self.current, phase
                return "" if phase == before else phase
        return ""
