"""Objectives of a scorer that is trained beside the policy: what its numbers for the steps of a batch should be.

A scorer is a second model, which gives one number ``q`` per step. An objective ``F`` maps the numbers of a whole batch
to a loss: one function and one decorator make it. Only its derivative by ``q`` reaches the model, as the coefficients
of a loss that is linear in the model's outputs: pairs and groups may lie on any ranks and in any micro-batches
(:func:`gradient`).

>>> from verl_turnkey.advantage import StepBatch
>>> from verl_turnkey.losses.objectives import ObjectiveParams, gradient
>>> two = StepBatch(group=[0, 0], trajectory=["won", "lost"], step=[0, 0], reward=[1.0, 0.0])
>>> gradient("preference", [0.0, 0.0], two, ObjectiveParams(beta=1.0)).coefficients
tensor([-0.5000,  0.5000], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from verl_turnkey.advantage import StepBatch
from verl_turnkey.advantage.params import ConfigError, Range, Ranged, did_you_mean, require_new

Kind = Literal["implicit", "head"]
"""of a scorer; implicit: a language model, ``q`` is the sum of its log-ratios; head: a scalar of a token classifier"""


@dataclass(frozen=True)
class ObjectiveParams(Ranged):
    """What objectives read, each its own part; the defaults are iStar's."""

    beta: Annotated[float, Range(lambda x: x > 0, "a number > 0")] = 0.05
    """factor of q"""
    over: Literal["sum", "mean"] = "sum"
    """what a trajectory's value is over its steps"""
    weigh: Literal["pair", "group"] = "pair"
    """unit of equal weight in the loss"""
    positive: Literal["success"] | float = "success"
    """which trajectories are good: those with a success flag, or without any flags a score above 0; or a number: a
    score above it"""


Objective = Callable[[Tensor, StepBatch, ObjectiveParams], tuple[Tensor, dict[str, float]] | None]
Decorated = TypeVar("Decorated", bound=Objective)


@dataclass(frozen=True)
class ObjectiveSpec:
    """A registered objective.

    ``kinds``: the scorers that it is for. ``reads``: the fields of :class:`ObjectiveParams` that it uses. ``paper`` and
    ``summary``: where it comes from and what it does, one line each. ``fn(q, table, params)``, with ``q`` (S,) float64
    and the steps that it is of, returns a scalar to be minimised and metrics, or None if the batch has nothing to learn
    from.
    """

    name: str
    kinds: tuple[Kind, ...]
    reads: tuple[str, ...]
    paper: str
    summary: str
    fn: Objective


@dataclass(frozen=True)
class Gradient:
    """``loss`` of a batch, and its derivative by each step's q, (S,) float64."""

    loss: float
    coefficients: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)


_OBJECTIVES: dict[str, ObjectiveSpec] = {}


def register_objective(
    name: str,
    *,
    kinds: tuple[Kind, ...] = ("implicit", "head"),
    reads: tuple[str, ...] = (),
    paper: str = "",
    summary: str = "",
) -> Callable[[Decorated], Decorated]:
    """Decorate ``fn(q: Tensor, table: StepBatch, params: ObjectiveParams)`` to make it the objective ``name``.

    Raises:
        ValueError: the name is taken, or ``reads`` names no field of :class:`ObjectiveParams`.
    """
    require_new(f"objective {name!r}", _OBJECTIVES.get(name))
    readable = ObjectiveParams.__dataclass_fields__
    if unknown := [entry for entry in reads if entry not in readable]:
        raise ValueError(f"objective {name!r}: reads: expected fields among {', '.join(readable)}, got {unknown[0]!r}")

    def register(fn: Decorated) -> Decorated:
        _OBJECTIVES[name] = ObjectiveSpec(name, tuple(kinds), tuple(reads), paper, summary, fn)
        return fn

    return register


def objectives() -> dict[str, ObjectiveSpec]:
    """All registered objectives by name, sorted."""
    return dict(sorted(_OBJECTIVES.items()))


def objective_spec(name: str) -> ObjectiveSpec:
    """The objective ``name``.

    Raises:
        ConfigError: there is none; names the closest.
    """
    if name not in _OBJECTIVES:
        raise ConfigError(
            f"unknown objective {name!r}{did_you_mean(name, _OBJECTIVES) or ';'} known: {', '.join(objectives())}, or "
            "module:function"
        )
    return _OBJECTIVES[name]


def gradient(objective: str | Objective, q: Any, table: StepBatch, params: ObjectiveParams) -> Gradient | None:
    """The objective of a batch and its derivative by ``q``, in float64; None if there is nothing to learn from.

    Args:
        objective: a name, or a function like a registered one.
        q: (S,) numbers, the model's for each step of ``table``.

    Raises:
        ConfigError: there is no such objective.
        ValueError: ``q`` has another length or is not finite; the objective returned anything but a finite scalar that
            depends on ``q``, or a derivative that is not finite.
    """
    fn = objective_spec(objective).fn if isinstance(objective, str) else objective
    numbers = torch.as_tensor(q, dtype=torch.float64).detach().clone()
    if numbers.shape != (len(table),) or not bool(torch.isfinite(numbers).all()):
        raise ValueError(f"q: expected {len(table)} finite numbers, one per step, got {numbers}")
    if not len(numbers):
        return None
    numbers.requires_grad_(True)
    result = fn(numbers, table, params)
    if result is None:
        return None
    name = objective if isinstance(objective, str) else f"{fn.__module__}.{fn.__qualname__}"
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad or not bool(torch.isfinite(loss)):
        raise ValueError(f"objective {name}: expected a finite scalar that depends on q, got {loss!r}")
    (coefficients,) = torch.autograd.grad(loss, numbers)
    if not bool(torch.isfinite(coefficients).all()):
        raise ValueError(f"objective {name}: expected a finite derivative by q, got {coefficients}")
    return Gradient(loss.item(), coefficients, metrics)


@dataclass(frozen=True)
class Trajectories:
    """T trajectories: ``value`` (T,) with a gradient, ``group`` (T,) int64, ``outcome`` (T,) and ``positive`` (T,)."""

    value: Tensor
    group: Tensor
    outcome: Tensor
    positive: Tensor

    @classmethod
    def of(cls, q: Tensor, table: StepBatch, params: ObjectiveParams) -> Trajectories:
        """``value`` is beta times the sum, or mean, of ``q`` (S,) over the steps of each trajectory."""
        number = table.n_trajectories
        of_step = torch.tensor(table.trajectory)
        value = params.beta * q.new_zeros(number).index_add(0, of_step, q)
        if params.over == "mean":
            value = value / torch.bincount(of_step, minlength=number)
        first = torch.tensor(table.first_rows)
        outcome = torch.tensor(table.score, dtype=torch.float64)[first]
        if params.positive == "success" and "success" in table.given:
            solved = torch.tensor(table.success).long()
            positive = torch.zeros(number, dtype=torch.int64).index_add(0, of_step, solved) > 0
        else:
            positive = outcome > (0 if params.positive == "success" else params.positive)
        return cls(value, torch.tensor(table.group)[first], outcome, positive)


@register_objective(
    "preference",
    reads=("beta", "over", "weigh", "positive"),
    paper="iStar / OPRL, arXiv:2509.19199",
    summary="prefers each successful trajectory of a group over each unsuccessful one",
)
def preference(q: Tensor, table: StepBatch, params: ObjectiveParams) -> tuple[Tensor, dict[str, float]] | None:
    """Trajectory DPO on one number per step.

    ::

        Q(i) = beta sum_k q(i,k)                                q: sum of log pi_phi - log pi_old over a turn's tokens
        F    = - mean over pairs of log sigmoid(Q(w) - Q(l))    w: success, l: none, of the same group

    ``over="mean"`` takes the mean over k. With ``weigh="group"`` the mean is over the pairs of a group, then over the
    groups that have any; else groups weigh by their number of pairs. The derivatives by a group's Q sum to 0.

    Metrics: ``pairs``, and ``pair_accuracy``, the share of pairs with Q(w) > Q(l). None without a pair.

    Source: arXiv:2509.19199. The released code (Qwen-Character/CharacterRL-iStar at 1de87a22) has the mean over the
    steps, pairs only rows of one data-parallel rank, and detaches Q: its update has no gradient.
    """
    of = Trajectories.of(q, table, params)
    pair = (of.group[:, None] == of.group) & of.positive[:, None] & ~of.positive
    good, bad = pair.nonzero(as_tuple=True)
    if not len(good):
        return None
    gap = of.value[good] - of.value[bad]
    weight = torch.full_like(gap, 1 / len(gap))
    if params.weigh == "group":
        pairs_of_group = torch.bincount(of.group[good])
        weight = 1 / ((pairs_of_group > 0).sum() * pairs_of_group[of.group[good]]).to(gap)
    metrics = {"pairs": float(len(gap)), "pair_accuracy": (gap > 0).double().mean().item()}
    return -(weight * logsigmoid(gap)).sum(), metrics


@register_objective(
    "outcome_ce",
    reads=("beta", "over", "positive"),
    paper="PRIME, arXiv:2502.01456",
    summary="predicts each trajectory's success from the sum over its steps",
)
def outcome_ce(q: Tensor, table: StepBatch, params: ObjectiveParams) -> tuple[Tensor, dict[str, float]] | None:
    """``F = mean over trajectories of CE(sigmoid(Q(i)), success(i))``, ``Q(i) = beta sum_k q(i,k)``.

    ``over="mean"`` takes the mean over k. Metric: ``accuracy``, the share of trajectories with Q > 0 exactly where they
    succeed. Source: arXiv:2502.01456, whose responses have one turn; iStar's released baseline ``ce`` takes each row
    for a trajectory.
    """
    of = Trajectories.of(q, table, params)
    right = ((of.value > 0) == of.positive).double().mean().item()
    return binary_cross_entropy_with_logits(of.value, of.positive.to(of.value)), {"accuracy": right}


@register_objective(
    "sum_to_outcome",
    kinds=("head",),
    paper="SPA-RL, arXiv:2505.20732",
    summary="regresses the sum of a trajectory's step scores on its outcome",
)
def sum_to_outcome(q: Tensor, table: StepBatch, params: ObjectiveParams) -> tuple[Tensor, dict[str, float]] | None:
    """``F = mean over trajectories of (sum_k q(i,k) - R(i))^2``; R: the trajectory's score.

    Metric: ``error``, the mean absolute difference. Source: arXiv:2505.20732, where q is a linear map of the last
    hidden state of each turn.
    """
    of = Trajectories.of(q, table, ObjectiveParams(beta=1.0))
    error = of.value - of.outcome
    return (error**2).mean(), {"error": error.detach().abs().mean().item()}
