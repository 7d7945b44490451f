"""Estimators by name: one function, one frozen params dataclass and one decorator make a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from verl_turnkey.advantage.batch import OPTIONAL_COLUMNS, Credit, StepBatch
from verl_turnkey.advantage.metrics import describe, describe_groups
from verl_turnkey.advantage.params import ConfigError, did_you_mean, parse, require_frozen

Estimator = TypeVar("Estimator", bound=Callable[..., Credit])

#: How a rollout comes to have a column, for the error that says it is missing.
HOW_TO_SET = {
    "anchor": 'the environment must set info["state_key"] (a key of the full state the action is taken in), or your '
    'own agent loop the record field "anchor"',
    "action": 'the agent loop must set the record field "action" (a key of the parsed action)',
    "success": 'the agent loop must set the record field "success"',
    "terminated": 'the agent loop must set the record field "terminated"',
    "truncated": 'the agent loop must set the record field "truncated"',
    "valid": 'the agent loop must set the record field "valid"',
    "value": "the method needs a critic: set critic.enable=True",
}


def how_to_set(column: str) -> str:
    """How a rollout comes to have ``column``, to end an error with."""
    if not column.startswith("extra."):
        return HOW_TO_SET.get(column, f"pass it to StepBatch ({column})")
    key = column.removeprefix("extra.")
    return (
        f'the environment must set info["extra"]["{key}"], or your own agent loop "{key}" in the record field "extra", '
        f"on every step; or a component of turnkey.rewards gives it (column: {key})"
    )


@dataclass(frozen=True)
class EstimatorSpec:
    """A registered estimator.

    ``params``: its frozen dataclass. ``needs``: the StepBatch columns it cannot do without, ``extra.<name>`` for an
    extra one. ``gives``: the columns it returns in ``Credit.extra``, for policy losses that need them. ``paper`` and
    ``summary``: where it comes from and what it does, one line each. ``fn(batch, params)`` returns a Credit. A
    ``stateful`` one remembers something from batch to batch: ``fn(batch, params, state)`` gets the ``Credit.state`` of
    the batch before, empty at the start.
    Params whose values decide on further columns have a property ``also_needs``.
    """

    name: str
    params: type
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    paper: str
    summary: str
    fn: Callable[..., Credit]
    stateful: bool = False

    def columns(self, params: Any) -> tuple[str, ...]:
        """The columns that it cannot do without under ``params``."""
        return (*self.needs, *getattr(params, "also_needs", ()))


_ESTIMATORS: dict[str, EstimatorSpec] = {}


def register_estimator(
    name: str,
    *,
    params: type,
    needs: tuple[str, ...] = (),
    gives: tuple[str, ...] = (),
    stateful: bool = False,
    paper: str = "",
    summary: str = "",
) -> Callable[[Estimator], Estimator]:
    """Decorate ``fn(batch: StepBatch, params) -> Credit`` to make it the estimator ``name``.

    With ``stateful`` it is ``fn(batch, params, state)``: see :class:`EstimatorSpec`.

    Raises:
        ValueError: the name is taken, ``params`` is not a frozen dataclass, or ``needs`` names an unknown column.
    """
    if name in _ESTIMATORS:
        holder = _ESTIMATORS[name].fn
        raise ValueError(
            f"estimator {name!r} is already registered by {holder.__module__}.{holder.__qualname__}; choose another "
            f"name"
        )
    require_frozen(f"estimator {name!r}", params)
    for column in needs:
        if column not in OPTIONAL_COLUMNS and not column.startswith("extra."):
            raise ValueError(
                f"estimator {name!r}: needs names {column!r}, expected one of {', '.join(OPTIONAL_COLUMNS)} or "
                f"extra.<name>{did_you_mean(column, OPTIONAL_COLUMNS)}"
            )

    def register(fn: Estimator) -> Estimator:
        _ESTIMATORS[name] = EstimatorSpec(name, params, tuple(needs), tuple(gives), paper, summary, fn, stateful)
        return fn

    return register


def estimators() -> dict[str, EstimatorSpec]:
    """All registered estimators by name, sorted."""
    return dict(sorted(_ESTIMATORS.items()))


def compute_credit(name: str, batch: StepBatch, *, state: Mapping[str, float] | None = None, **params: Any) -> Credit:
    """Credit of every step of ``batch`` by the estimator ``name``; ``params`` are the fields of its dataclass.

    ``state`` is the ``Credit.state`` of the batch before, for an estimator that is stateful; None at the start.

    Raises:
        ConfigError: unknown estimator or parameter (with the closest match), a value of the wrong type or range, or a
            column the estimator needs and the batch was built without.
        ValueError: the estimator returned something that is not one finite number per step.
    """
    if name not in _ESTIMATORS:
        raise ConfigError(
            f"unknown estimator {name!r}{did_you_mean(name, _ESTIMATORS) or ';'} known: {', '.join(estimators())}"
        )
    if not isinstance(batch, StepBatch):
        raise ConfigError(
            f"compute_credit: expected a StepBatch, got a {type(batch).__name__}: pass its columns by name, as in "
            "StepBatch(group=..., trajectory=..., step=..., reward=...)"
        )
    spec = _ESTIMATORS[name]
    parsed = parse(spec.params, params, where=name)
    for column in spec.columns(parsed):
        if column not in batch.given:
            raise ConfigError(
                f"estimator {name!r} needs the column {column!r}, which this batch does not have: {how_to_set(column)}"
            )
    credit = spec.fn(batch, parsed, dict(state or {})) if spec.stateful else spec.fn(batch, parsed)
    if not isinstance(credit, Credit):
        raise ValueError(f"estimator {name!r}: expected it to return a Credit, got {type(credit).__name__}")
    if set(credit.extra) != set(spec.gives):
        raise ValueError(f"estimator {name!r}: expected Credit.extra to hold {spec.gives}, got {sorted(credit.extra)}")
    for column, array in (("advantage", credit.advantage), ("returns", credit.returns), *credit.extra.items()):
        if array is None:
            continue
        expected = f"estimator {name!r}: expected {column} to be {len(batch)} finite numbers, one per step"
        if np.shape(array) != (len(batch),):
            raise ValueError(f"{expected}, got shape {np.shape(array)}")
        if bad := np.count_nonzero(~np.isfinite(array)):
            raise ValueError(f"{expected}, got {bad} that are not finite")
    if not all(isinstance(key, str) and np.isfinite(value) for key, value in credit.state.items()):
        raise ValueError(
            f"estimator {name!r}: expected Credit.state to hold finite numbers by name, got {credit.state}"
        )
    anchors = describe_groups("anchor", *batch.anchor_groups) if "anchor" in batch.given else {}
    return replace(credit, metrics={**anchors, **credit.metrics, **describe("advantage", credit.advantage)})
