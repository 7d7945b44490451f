"""How a model that cannot write plays a text adventure, and what pays it: both loaded by name, as users' own are."""

from __future__ import annotations

from collections.abc import Sequence

from verl_turnkey.envs.rewards import RewardStep
from verl_turnkey.plugins.teacher import TeacherRow


def choose(text: str, admissible: Sequence[str] | None) -> str | None:
    """An action for any text, the same for the same: so that what is written makes a difference."""
    return admissible[sum(text.encode()) % len(admissible)] if admissible else None


def going(steps: Sequence[RewardStep]) -> list[float]:
    """Pays for going somewhere: in a household a random walk does it in more than half of its steps, and not in all."""
    return [float(step.valid and (step.action or "").startswith("go to ")) for step in steps]


def forward(steps: Sequence[RewardStep]) -> list[float]:
    """Pays for every step ahead, so that no two episodes come to quite the same."""
    return [float(step.action == "go forward") for step in steps]


def doubt(steps: Sequence[RewardStep]) -> list[float]:
    """In the place of the entropy of a turn: a number from its text."""
    return [sum(step.text.encode()) % 7 / 7 for step in steps]


def ahead(first: Sequence[RewardStep], second: Sequence[RewardStep]) -> tuple[float, float]:
    """Of two episodes the one with more steps ahead is better, else the one whose last text is greater."""
    score, other = ((sum(forward(steps)), steps[-1].text) for steps in (first, second))
    return float(score > other), float(other > score)


def plan(row: TeacherRow) -> str | None:
    """A teacher's text, for every other rollout of a task."""
    return "go forward" if int(row.episode.name.rpartition("_")[2]) % 2 else None
