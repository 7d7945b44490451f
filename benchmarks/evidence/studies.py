"""What is trained for which question: tasks, variants, learning rates and seeds, in the order in which they are run.

The order is by rounds, so that the lines of a part of the runs can be compared already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from lines import Line, validations
from tasks import TASKS

from verl_turnkey.plugins.seeing import stats

RATES = (6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3)
"""learning rates: each method gets the two in the middle, and those beyond the best until this is not at an end"""
MIDDLE = RATES[2:4]
REINFORCE = "reinforce++ baseline"
"""of the loop itself"""


@dataclass(frozen=True)
class Variant:
    """A method, and what else its launch line has."""

    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """of the method"""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """of the rollouts; empty: episodes do not fork"""
    tasks: int = 8
    """in a step"""
    rollouts: int = 8
    """of each task"""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the launch line."""
        if not self.strategy:
            return ()
        strategy = ", ".join(f"{key}: {value}" for key, value in self.strategy.items())
        return (
            f"turnkey.rollout.strategy={{{strategy}}}",
            f"data.train_batch_size={self.tasks}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.tasks // 2}",
            f"actor_rollout_ref.rollout.n={self.rollouts}",
            *(f"turnkey.credit.{key}={value}" for key, value in self.params.items()),
        )


@dataclass(frozen=True)
class Planned:
    """One run."""

    task: str
    name: str
    """of the variant"""
    variant: Variant = field(repr=False)
    lr: float
    seed: int
    steps: int
    validate_every: int
    on_stack: bool = True
    """on verl, FSDP, vLLM and Ray; else by the plain loop"""
    validate_before: bool = True

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What tells the lines of a study apart."""
        return self.task, self.name, self.lr, self.seed


@dataclass(frozen=True)
class Seeds:
    """Of a task: those that choose the learning rates, and others that are reported."""

    tuning: tuple[int, ...]
    reported: tuple[int, ...]
    """of n, a difference that has one sign in all of them has a p of 2 / 2^n"""


# --- do methods pay? --------------------------------------------------------------------------------------------------

STRATEGIES = ("vine", "vine_segments", "tree", "entropy_branch")
"""of rollouts that fork, each with the method that is made for it, and with fewer rollouts: as many as make a step cost
about as many tokens, but for ``vine``, whose steps cost half as much again"""
FIRST, SECOND = ("grpo_steps", "gigpo"), ("rloo_steps", "hgpo")
THIRD = (REINFORCE, "turn_gae", "graph")
LAST = ("salt", "proxmo", "dual_level")
METHODS = FIRST + SECOND + THIRD + LAST
"""without those of strategies"""
ROUNDS = (
    ("doorkey", FIRST + SECOND),
    ("rooms", FIRST + SECOND),
    ("doorkey", THIRD),
    ("rooms", THIRD),
    ("doorkey", STRATEGIES),
    ("doorkey", LAST),
    ("kitchen", FIRST),
    ("rooms", STRATEGIES),
    ("kitchen", SECOND),
    ("kitchen", THIRD),
    ("rooms", LAST),
    ("kitchen", LAST),
)
"""tasks and names of variants; those of a round are tuned and reported before the next one begins"""
SEEDS = {
    "doorkey": Seeds((100, 101, 102), tuple(range(8))),
    "rooms": Seeds((100, 101), tuple(range(6))),  # whose runs take five times as long
    "kitchen": Seeds((100, 101), tuple(range(6))),
}
METHOD_VALIDATE_EVERY = 4


def variant(name: str, task: str) -> Variant:
    """What a name stands for on a task: forks are at the same parts of an episode on all of them."""
    fifth = TASKS[task].max_turns // 5
    vine = {"name": "vine", "rollouts": 2, "every": fifth}
    tree = {"name": "tree", "first": fifth, "every": fifth, "depth": 2}
    entropy_branch = {"name": "entropy_branch", "trajectories": 8}
    made = {
        "vine": Variant("progress", {"alpha": 0}, vine, tasks=4, rollouts=3),
        "vine_segments": Variant("progress", {"alpha": 0, "segments": True, "whiten": "turns"}, vine, 4, rollouts=2),
        "tree": Variant("tree", {}, tree, rollouts=3),
        "entropy_branch": Variant("tree", {"rule": "arpo"}, entropy_branch, rollouts=4),
    }
    return made.get(name) or Variant(name)


def methods(lines: Sequence[Line]) -> Iterator[Planned]:
    """Every variant with several learning rates on seeds that are not reported, then the others with the best one."""

    def planned(task: str, name: str, lr: float, seed: int) -> Planned:
        steps = TASKS[task].steps
        return Planned(task, name, variant(name, task), lr, seed, steps, METHOD_VALIDATE_EVERY, on_stack=False)

    for task, names in ROUNDS:
        seeds = SEEDS[task]
        for seed, lr, name in product(seeds.tuning, MIDDLE, names):
            yield planned(task, name, lr, seed)
        for name, seed in product(names, seeds.tuning):
            if lr := next_rate(lines, task, name):
                yield planned(task, name, lr, seed)
        for seed, name in product(seeds.reported, names):
            if lr := best_rate(lines, task, name):
                yield planned(task, name, lr, seed)


def tuned(lines: Sequence[Line], task: str, name: str) -> dict[float, float]:
    """The learning rates tried on all tuning seeds, with the mean area under their validation curves."""
    areas: dict[float, list[float]] = {}
    for line in lines:
        if (line["task"], line["variant"]) == (task, name) and line["seed"] in SEEDS[task].tuning:
            areas.setdefault(line["lr"], []).append(height(line))
    return {lr: float(np.mean(found)) for lr, found in sorted(areas.items()) if len(found) == len(SEEDS[task].tuning)}


def next_rate(lines: Sequence[Line], task: str, name: str) -> float | None:
    """The rate to be tried beyond the best one; None: there is none, or the ones before are not all tried."""
    areas = tuned(lines, task, name)
    if not set(MIDDLE) <= areas.keys():
        return None
    best = RATES.index(max(areas, key=areas.__getitem__))
    beyond = [RATES[place] for place in (best - 1, best + 1) if 0 <= place < len(RATES)]
    return next((lr for lr in beyond if lr not in areas), None)


def best_rate(lines: Sequence[Line], task: str, name: str) -> float | None:
    """The rate with the largest mean area; None: not all are tried that must be."""
    areas = tuned(lines, task, name)
    if not set(MIDDLE) <= areas.keys() or next_rate(lines, task, name):
        return None
    return max(areas, key=areas.__getitem__)


def height(line: Line) -> float:
    """Area under the validation curve, divided by its length."""
    steps, success = validations(line)
    return stats.area(steps, success, steps[0], steps[-1])


# --- do both ways to train agree? -------------------------------------------------------------------------------------

IN_LOOP = ", plain loop"
INDEPENDENT = "independent"
"""``gigpo`` on episodes that do not fork"""
ON_STACK = ("vine", "tree", "entropy_branch")
BRANCHING = tuple(name + way for name in (INDEPENDENT, *ON_STACK) for way in ("", IN_LOOP))
BRANCHING_TASK, BRANCHING_SEEDS = "doorkey", (0, 1, 2)
BRANCHING_RATE, BRANCHING_STEPS, BRANCHING_VALIDATE_EVERY = 5e-4, 8, 4


def branching(lines: Sequence[Line]) -> Iterator[Planned]:
    """Every variant on the whole stack and by the plain loop, one seed after the other."""
    for seed, name in product(BRANCHING_SEEDS, BRANCHING):
        kind = name.removesuffix(IN_LOOP)
        planned = variant("gigpo" if kind == INDEPENDENT else kind, BRANCHING_TASK)
        sizes = (BRANCHING_RATE, seed, BRANCHING_STEPS, BRANCHING_VALIDATE_EVERY)
        yield Planned(BRANCHING_TASK, name, planned, *sizes, on_stack=kind == name, validate_before=False)


STUDIES: dict[str, Callable[[Sequence[Line]], Iterator[Planned]]] = {"methods": methods, "branching": branching}
