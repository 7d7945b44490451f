"""What is trained for which question: tasks, variants, learning rates and seeds, in the order in which they are run.

The order is by rounds, so that the lines of a part of the runs can be compared already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from lines import Line, validations

from verl_turnkey.plugins.seeing import stats

RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3)
"""learning rates: each method gets the two in the middle, and the one beyond the better of them"""
TUNING_SEED = 100
SEEDS = (0, 1, 2, 3, 4)
REINFORCE = "reinforce++"
"""of the loop itself: the estimators of this package start from steps, and verl has this one"""


@dataclass(frozen=True)
class Variant:
    """A method, and what else its launch line has."""

    method: str
    overrides: tuple[str, ...] = ()


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

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What tells the lines of a study apart."""
        return self.task, self.name, self.lr, self.seed


# --- do methods pay? --------------------------------------------------------------------------------------------------

ROUNDS = (
    ("grpo_steps", "gigpo", "rloo_steps", "hgpo"),
    (REINFORCE, "turn_gae", "graph"),
    ("salt", "proxmo", "dual_level"),
)
"""methods; those of a round are tuned and reported before the next one begins"""
METHODS = {name: Variant(name) for names in ROUNDS for name in names}
METHOD_TASKS = ("doorkey",)
METHOD_STEPS, METHOD_VALIDATE_EVERY = 12, 4


def methods(lines: Sequence[Line]) -> Iterator[Planned]:
    """Every method with each learning rate on a seed that is not reported, then five seeds with the best of them."""

    def planned(task: str, name: str, lr: float, seed: int) -> Planned:
        return Planned(task, name, METHODS[name], lr, seed, METHOD_STEPS, METHOD_VALIDATE_EVERY, on_stack=False)

    for names, task in product(ROUNDS, METHOD_TASKS):
        for lr, name in product(RATES[1:3], names):
            yield planned(task, name, lr, TUNING_SEED)
        for name in names:
            if lr := third_rate(tuned(lines, task, name)):
                yield planned(task, name, lr, TUNING_SEED)
        for seed, name in product(SEEDS, names):
            if lr := best_rate(lines, task, name):
                yield planned(task, name, lr, seed)


def tuned(lines: Sequence[Line], task: str, name: str) -> dict[float, float]:
    """The learning rates tried so far, with the areas under their validation curves."""
    return {
        line["lr"]: height(line)
        for line in lines
        if (line["task"], line["variant"], line["seed"]) == (task, name, TUNING_SEED)
    }


def third_rate(areas: Mapping[float, float]) -> float | None:
    """The rate beyond the better one of the middle; None: these are not both tried."""
    lowest, lower, higher, highest = RATES
    if not {lower, higher} <= areas.keys():
        return None
    return lowest if areas[lower] >= areas[higher] else highest


def best_rate(lines: Sequence[Line], task: str, name: str) -> float | None:
    """The rate with the largest area, of equal ones the smallest; None: not all three are tried."""
    areas = tuned(lines, task, name)
    return max(sorted(areas), key=areas.__getitem__) if third_rate(areas) in areas else None


def height(line: Line) -> float:
    """Area under the validation curve, divided by its length."""
    steps, success = validations(line)
    return stats.area(np.array(steps, float).tolist(), success, steps[0], steps[-1])


# --- do branches pay? -------------------------------------------------------------------------------------------------


def _branching(method: str, strategy: str, tasks: int, rollouts: int, *further: str) -> Variant:
    """``tasks`` in each step with so many ``rollouts`` of each that the step costs about as many tokens."""
    return Variant(
        method,
        (
            f"turnkey.rollout.strategy={strategy}",
            f"data.train_batch_size={tasks}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={tasks // 2}",
            f"actor_rollout_ref.rollout.n={rollouts}",
            *further,
        ),
    )


LOOP = "independent, plain loop"
BRANCHING = {
    "independent": _branching("gigpo", "independent", 8, 8),
    LOOP: Variant("gigpo"),  # as far as the two ways to train agree
    "vine": _branching("progress", "{name: vine, rollouts: 2, every: 4}", 4, 3, "turnkey.credit.alpha=0"),
    "tree": _branching("tree", "{name: tree, first: 4, every: 4, depth: 2}", 8, 3),
    "entropy_branch": _branching("tree", "{name: entropy_branch, trajectories: 8}", 8, 4, "turnkey.credit.rule=arpo"),
}
BRANCHING_TASKS = ("doorkey",)
BRANCHING_SEEDS = (0, 1, 2)
BRANCHING_RATE, BRANCHING_STEPS, BRANCHING_VALIDATE_EVERY = 5e-4, 8, 4


def branching(lines: Sequence[Line]) -> Iterator[Planned]:
    """Every variant on every task, one seed after the other."""
    for seed, task, name in product(BRANCHING_SEEDS, BRANCHING_TASKS, BRANCHING):
        sizes = (BRANCHING_RATE, seed, BRANCHING_STEPS, BRANCHING_VALIDATE_EVERY)
        yield Planned(task, name, BRANCHING[name], *sizes, on_stack=name != LOOP)


STUDIES: dict[str, Callable[[Sequence[Line]], Iterator[Planned]]] = {"methods": methods, "branching": branching}
