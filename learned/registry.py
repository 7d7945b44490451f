"""Objectives of a trained scorer by name: one function and one decorator make an objective.

A scorer is a second model, which gives one number ``q`` per step. An objective ``F`` maps the numbers of a whole batch
to a loss. Only its derivative by ``q`` reaches the model, as the coefficients of a loss that is linear in the model's
outputs: pairs and groups may lie on any ranks and in any micro-batches (:func:`gradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from verl_turnkey.advantage import StepBatch
from verl_turnkey.advantage.params import ConfigError, check, did_you_mean

Kind = Literal["implicit", "head"]
"""of a scorer; implicit: a language model, ``q`` is the sum of its log-ratios; head: a scalar of a token classifier"""


@dataclass(frozen=True)
class ObjectiveParams:
    """What objectives read, each its own part; the defaults are iStar's."""

    beta: float = 0.05
    """factor of q"""
    over: Literal["sum", "mean"] = "sum"
    """what a trajectory's value is over its steps"""
    weigh: Literal["pair", "group"] = "pair"
    """unit of equal weight in the loss"""
    positive: Literal["success"] | float = "success"
    """which trajectories are good: those with a success flag, or without any flags a score above 0; or a number: a
    score above it"""

    def __post_init__(self) -> None:
        check(self.beta > 0, "beta", "a number > 0", self.beta)


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
    if name in _OBJECTIVES:
        holder = _OBJECTIVES[name].fn
        raise ValueError(f"objective {name!r} is already registered by {holder.__module__}.{holder.__qualname__}")
    known = ObjectiveParams.__dataclass_fields__
    if unknown := [entry for entry in reads if entry not in known]:
        raise ValueError(f"objective {name!r}: reads: expected fields among {', '.join(known)}, got {unknown[0]!r}")

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
