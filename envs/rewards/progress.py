"""Rewards from an estimate of success: how much a step raised it (VSRM, ProgRM), also for a prover (PAV)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.errors import RewardError
from verl_turnkey.envs.rewards.components import Steps, Values, number, register_reward


def differences(estimates: Sequence[float]) -> list[float]:
    """``n + 1`` estimates, before the first step and after each, give ``n`` rewards: after minus before.

    ProgRM (arXiv:2505.18121): the estimates are a model's progress in [0, 1]; whether it starts from 0 is not said in
    the sources read, so the first estimate is the caller's.
    """
    return [after - before for before, after in pairwise(estimates)]


def vsrm(estimates: Sequence[float], *, decay: float = 0.7, lookahead: int = 4, tolerance: float = 1e-5) -> list[float]:
    """VSRM's step rewards (arXiv:2508.10293 and its code): as :func:`differences`, but a step without one looks ahead.

    Where a step changes the estimate by less than ``tolerance``, it gets the first change within the next ``lookahead``
    steps, times ``decay`` to the power of its distance; 0 when there is none.

    The paper's estimates are the accuracy of short answers sampled after cutting the reasoning at ``n + 1`` places.
    Here they are any success estimate. Its outcome reward on the last token is a component of its own, ``outcome``.
    """
    changes = differences(estimates)
    rewards = []
    for k in range(len(changes)):
        ahead = enumerate(changes[k : k + lookahead + 1])
        distance, change = next(((m, d) for m, d in ahead if abs(d) >= tolerance), (0, 0.0))
        rewards.append(change * decay**distance)
    return rewards


def recipe_progress(done: Sequence[Hashable], recipe: Sequence[Hashable]) -> list[float]:
    """Progress before the first step and after each: the share of the recipe's key steps that were done in order.

    Done in order means: length of the longest common subsequence of the steps so far and ``recipe``. ProgRM labels its
    training data in this way; how it finds recipes (clusters of successful trajectories) and where it puts thresholds
    is not known, so the recipe is the caller's.
    """
    if not recipe:
        raise ValueError("expected a recipe of at least one key step")
    common, progress = [0] * (len(recipe) + 1), [0.0]
    for action in done:
        diagonal = 0
        for j, key_step in enumerate(recipe, 1):
            above = common[j]
            common[j] = diagonal + 1 if action == key_step else max(above, common[j - 1])
            diagonal = above
        progress.append(common[-1] / len(recipe))
    return progress


@register_reward("progress")
@dataclass(frozen=True)
class Progress:
    """How much each step raised an estimate of success that the environment gives (ProgRM, VSRM)."""

    key: str = "progress"
    """where the estimate stands in the environment's ``info["extra"]``"""
    kind: Literal["difference", "vsrm"] = "difference"
    """after minus before, or VSRM's form, where a step without a change gets a share of the next one"""
    decay: float = 0.7
    """of vsrm: share that is left per step of distance"""
    lookahead: int = 4
    """of vsrm: steps to look ahead"""

    def __post_init__(self) -> None:
        check(0 <= self.decay <= 1, "decay", "a number from 0 to 1", self.decay)
        check(self.lookahead >= 0, "lookahead", "zero or more", self.lookahead)

    def __call__(self, steps: Steps) -> Values:
        estimates = [number(step.extra, self.key, f"step {t}") for t, step in enumerate(steps)]
        estimates.append(number(steps[-1].next_extra, self.key, "after the last step"))
        if self.kind == "difference":
            return differences(estimates)
        return vsrm(estimates, decay=self.decay, lookahead=self.lookahead)


def best_of_k(probability: float, k: int) -> float:
    """Probability that at least one of ``k`` tries succeeds."""
    return 1 - (1 - probability) ** k


@register_reward("pav")
@dataclass(frozen=True)
class PAV:
    """PAV's effective reward of a step: Q(after) + alpha (Q_mu(after) - Q_mu(before)), Q_mu of a prover.

    Source: arXiv:2410.08146, where Q is the probability of success in the end. ``prover="best_of_k"``: Q_mu = 1 -
    (1 - Q)^k. ``prover="given"``: the environment gives Q_mu as ``extra[prover_key]``. Our reading: turns as steps;
    after a terminated episode's last step Q and Q_mu are 1 if it is solved and else 0, whatever the environment says.
    """

    key: str = "progress"
    """where the policy's probability of success stands in the environment's ``info["extra"]``"""
    prover: Literal["best_of_k", "given"] = "best_of_k"
    """whose progress counts"""
    prover_key: str = "prover_value"
    """of given: where the prover's probability stands"""
    k: int = 4
    """of best_of_k: number of tries"""
    alpha: float = 3.0
    """weight of the prover's progress: 5 and 3 in the paper for 2B and 9B models"""
    own: bool = True
    """false: alpha times the prover's progress alone, for use beside the component outcome"""

    def __post_init__(self) -> None:
        check(self.k >= 1, "k", "an integer >= 1", self.k)
        check(0 <= self.alpha < float("inf"), "alpha", "a finite number >= 0", self.alpha)

    def __call__(self, steps: Steps) -> Values:
        estimates = self._estimates(steps, self.key)
        prover = self._estimates(steps, self.prover_key) if self.prover == "given" else estimates
        if self.prover == "best_of_k":
            prover = [best_of_k(value, self.k) for value in estimates]
        gains = differences(prover)
        return [self.own * after + self.alpha * gain for after, gain in zip(estimates[1:], gains, strict=True)]

    @staticmethod
    def _estimates(steps: Steps, key: str) -> list[float]:
        """One more than steps: before the first step and after each."""
        end = steps[-1]
        estimates = [number(step.extra, key, f"step {t}") for t, step in enumerate(steps)]
        estimates.append(float(end.success) if end.terminated else number(end.next_extra, key, "after the last step"))
        for t, value in enumerate(estimates):
            if not 0 <= value <= 1:
                raise RewardError(f"info['extra'][{key!r}] of state {t}: expected a probability, got {value:g}")
        return estimates
