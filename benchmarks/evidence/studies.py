"""The runs of each study: tasks, variants, learning rates and seeds, in the order in which they are trained.

The order is by rounds, so that the lines of the first runs can be compared early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from lines import Key, Line, load, validations
from reinforce import REINFORCE
from tasks import TASKS

from verl_turnkey.plugins.view import stats

RATES = (6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3)
"""learning rates: each method tries the middle two, then further ones until its best is not at an end"""
MIDDLE = RATES[2:4]
CRITIC_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""learning rates of a critic, tried in the same way"""
CRITIC_MIDDLE = CRITIC_RATES[1:4]
CRITIC_RATE = 1e-3
"""the critic's while the policy's rate is chosen"""
VALUED = ("turn_gae",)
"""methods with a critic"""


@dataclass(frozen=True)
class Variant:
    """A method, and what else differs in its launch line."""

    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """of the method"""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """of rollouts; empty: episodes do not fork"""
    tasks: int = 8
    """in a step"""
    rollouts: int = 8
    """of each task"""
    critic_lr: float | None = None
    """learning rate of the critic, for those that have one"""

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
    """on verl, FSDP, vLLM and Ray; else in the plain loop"""
    validate_before: bool = True

    @property
    def key(self) -> Key:
        """Identifies a line in its study."""
        return self.task, self.name, self.lr, self.variant.critic_lr or 0.0, self.seed


@dataclass(frozen=True)
class Seeds:
    """Of a task: those that choose the learning rates, and others that are reported."""

    tuning: tuple[int, ...]
    reported: tuple[int, ...]
    """with n seeds, a difference with the same sign in all has p = 2 / 2^n"""


# --- do methods pay off? ----------------------------------------------------------------------------------------------

STRATEGIES = ("vine", "vine_segments", "tree", "entropy_branch")
"""of forking rollouts, each with its own method and with fewer rollouts, so that a step costs about as many tokens as
without forks; only ``vine`` costs half as much again"""
FIRST, SECOND = ("grpo_steps", "gigpo"), ("rloo_steps", "hgpo")
THIRD = (REINFORCE, "turn_gae", "graph")
LAST = ("salt", "proxmo", "dual_level")
METHODS = FIRST + SECOND + THIRD + LAST
"""without those of the strategies"""
BASELINES = ("grpo_steps", "rloo_steps", REINFORCE, "turn_gae")
BY_STEPS = ("gigpo", "hgpo", "graph", "salt", "proxmo", "dual_level")
"""methods that compare steps, compared with each of the baselines"""
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
    """The variant of a name on a task; forks are at the same fractions of an episode on all tasks."""
    fifth = TASKS[task].max_turns // 5
    vine = {"name": "vine", "rollouts": 2, "every": fifth}
    tree = {"name": "tree", "first": fifth, "every": fifth, "depth": 2}
    entropy_branch = {"name": "entropy_branch", "trajectories": 8}
    forked = {
        "vine": Variant("progress", {"alpha": 0}, vine, tasks=4, rollouts=3),
        "vine_segments": Variant("progress", {"alpha": 0, "segments": True, "whiten": "turns"}, vine, 4, rollouts=2),
        "tree": Variant("tree", {}, tree, rollouts=3),
        "entropy_branch": Variant("tree", {"rule": "arpo"}, entropy_branch, rollouts=4),
    }
    return forked.get(name) or Variant(name, critic_lr=CRITIC_RATE if name in VALUED else None)


def method(task: str, name: str, lr: float, seed: int, critic_lr: float | None = None) -> Planned:
    """One run of a variant in the plain loop."""
    of = variant(name, task)
    of = replace(of, critic_lr=critic_lr) if critic_lr else of
    return Planned(task, name, of, lr, seed, TASKS[task].steps, METHOD_VALIDATE_EVERY, on_stack=False)


def methods(lines: Sequence[Line]) -> Iterator[Planned]:
    """Every variant with several learning rates on the tuning seeds, then with the best one on the reported seeds."""
    for task, names in ROUNDS:
        seeds = SEEDS[task]
        for seed, lr, name in product(seeds.tuning, MIDDLE, names):
            yield method(task, name, lr, seed)
        for name, seed in product(names, seeds.tuning):
            if lr := next_rate(lines, task, name):
                yield method(task, name, lr, seed)
        for seed, name in product(seeds.reported, names):
            if lr := best_rate(lines, task, name):
                yield method(task, name, lr, seed)


@dataclass(frozen=True)
class Grid:
    """Learning rates of one kind, and which of them are tried first."""

    what: str
    """key of a line"""
    rates: tuple[float, ...]
    middle: tuple[float, ...]


POLICY, CRITIC = Grid("lr", RATES, MIDDLE), Grid("critic_lr", CRITIC_RATES, CRITIC_MIDDLE)


def tuned(lines: Sequence[Line], task: str, name: str, grid: Grid = POLICY) -> dict[float, float]:
    """The learning rates tried on all tuning seeds, with the mean area under their validation curves."""
    areas: dict[float, list[float]] = {}
    for line in lines:
        if (line["task"], line["variant"]) == (task, name) and line["seed"] in SEEDS[task].tuning:
            areas.setdefault(line[grid.what], []).append(height(line))
    seeds = len(SEEDS[task].tuning)
    return {lr: float(np.mean(of_rate)) for lr, of_rate in sorted(areas.items()) if len(of_rate) == seeds}


def next_rate(lines: Sequence[Line], task: str, name: str, grid: Grid = POLICY) -> float | None:
    """The next rate to try beyond the best one; None if there is none, or if the middle ones are not all tried."""
    areas = tuned(lines, task, name, grid)
    if not set(grid.middle) <= areas.keys():
        return None
    best = grid.rates.index(max(areas, key=areas.__getitem__))
    beyond = [grid.rates[place] for place in (best - 1, best + 1) if 0 <= place < len(grid.rates)]
    return next((lr for lr in beyond if lr not in areas), None)


def best_rate(lines: Sequence[Line], task: str, name: str, grid: Grid = POLICY) -> float | None:
    """The rate with the largest mean area; None while a required one is untried."""
    areas = tuned(lines, task, name, grid)
    if not set(grid.middle) <= areas.keys() or next_rate(lines, task, name, grid):
        return None
    return max(areas, key=areas.__getitem__)


def height(line: Line) -> float:
    """Area under the validation curve, divided by its length."""
    steps, success = validations(line)
    return stats.area(steps, success, steps[0], steps[-1])


# --- and with a tuned critic? -----------------------------------------------------------------------------------------

PPO = "turn_gae"
CRITIC_PEERS = ("grpo_steps", "gigpo", "graph")
"""methods that are trained again, from the same warm starts as the critic's runs"""
CRITIC_TASKS: tuple[str, ...] = ("doorkey",)
"""tasks of the study"""


def critic(lines: Sequence[Line]) -> Iterator[Planned]:
    """PPO with several rates of its critic, at its best rate of the policy; if another rate than that of ``methods`` is
    best, the reported seeds with it.

    Another CPU rounds differently, so its warm starts are other models: other methods are trained from them as well,
    with the rates that were chosen for them.
    """
    chosen = load("methods")
    for task in CRITIC_TASKS:
        seeds, lr = SEEDS[task], best_rate(chosen, task, PPO)
        if lr is None:
            continue
        for seed, of_critic in product(seeds.tuning, CRITIC_MIDDLE):
            yield method(task, PPO, lr, seed, of_critic)
        if further := next_rate(lines, task, PPO, CRITIC):
            for seed in seeds.tuning:
                yield method(task, PPO, lr, seed, further)
        best = best_rate(lines, task, PPO, CRITIC)
        if best and best != CRITIC_RATE:  # else the runs of ``methods`` have the best one
            for seed in seeds.reported:
                yield method(task, PPO, lr, seed, best)
                for name in CRITIC_PEERS:
                    if rate := best_rate(chosen, task, name):
                        yield method(task, name, rate, seed)


# --- and with this project's own credit? ------------------------------------------------------------------------------

OURS = "loo_td"
OURS_PEERS = ("grpo_steps", "gigpo", "graph")
"""methods that are trained again, from the same warm starts"""


def ours(lines: Sequence[Line]) -> Iterator[Planned]:
    """``loo_td``, tuned as the others of ``methods``, and peers at the rates that were chosen there, by task."""
    chosen = load("methods")
    for task, seeds in SEEDS.items():
        for seed, lr in product(seeds.tuning, MIDDLE):
            yield method(task, OURS, lr, seed)
        if lr := next_rate(lines, task, OURS):
            for seed in seeds.tuning:
                yield method(task, OURS, lr, seed)
        rates = {OURS: best_rate(lines, task, OURS), **{name: best_rate(chosen, task, name) for name in OURS_PEERS}}
        for seed, (name, rate) in product(seeds.reported, rates.items()):
            if rate:
                yield method(task, name, rate, seed)


# --- do stack and plain loop agree? -----------------------------------------------------------------------------------

IN_LOOP = ", plain loop"
INDEPENDENT = "independent"
"""``gigpo`` without forks"""
ON_STACK = ("vine", "tree", "entropy_branch")
BRANCHING = tuple(name + way for name in (INDEPENDENT, *ON_STACK) for way in ("", IN_LOOP))
BRANCHING_TASK, BRANCHING_SEEDS = "doorkey", (0, 1, 2)
BRANCHING_RATE, BRANCHING_STEPS, BRANCHING_VALIDATE_EVERY = 5e-4, 8, 4


def branching(lines: Sequence[Line]) -> Iterator[Planned]:
    """Every variant on the whole stack and in the plain loop, one seed after the other."""
    for seed, name in product(BRANCHING_SEEDS, BRANCHING):
        yield either_way(BRANCHING_TASK, name, BRANCHING_RATE, seed)


def either_way(task: str, name: str, lr: float, seed: int, critic_lr: float | None = None) -> Planned:
    """One run of a variant, on the stack or, if its name says so, in the plain loop."""
    kind = name.removesuffix(IN_LOOP)
    planned = variant("gigpo" if kind == INDEPENDENT else kind, task)
    sizes = (lr, seed, BRANCHING_STEPS, BRANCHING_VALIDATE_EVERY)
    return Planned(task, name, planned, *sizes, on_stack=kind == name, validate_before=False)


@dataclass(frozen=True)
class Study:
    """The planned runs, given the lines so far, and a single run by its key."""

    plan: Callable[[Sequence[Line]], Iterator[Planned]]
    run: Callable[..., Planned]
    names: tuple[str, ...]
    """of its variants"""


STUDIES: dict[str, Study] = {
    "methods": Study(methods, method, METHODS + STRATEGIES),
    "critic": Study(critic, method, (PPO, *CRITIC_PEERS)),
    "loo_td": Study(ours, method, (OURS, *OURS_PEERS)),
    "branching": Study(branching, either_way, BRANCHING),
}
