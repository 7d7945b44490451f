"""GRPO under one modifier: ``a_grae``, ``copo``, ``dynamo_modulation``, ``shrinkage``, ``unlikeliness``.

The formulas are the modifiers' (``advantage/modifiers/``), which any other method can take as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Norm
from verl_turnkey.advantage.methods._episode_level import episode_level
from verl_turnkey.advantage.modifiers import a_grae, copo, dynamo_modulation, shrinkage, unlikeliness
from verl_turnkey.advantage.modifying import ModifierSpec, modifiers
from verl_turnkey.advantage.registry import register_estimator

#: What each does as a method, and by what GRPO's ``R - mean`` is divided before: the group's std, or nothing.
METHODS: dict[Any, tuple[str, Norm]] = {
    a_grae.a_grae: (
        "GRPO that weighs easy tasks first and hard ones later, and damps successes while rare",
        "mean_std",
    ),
    copo.copo: ("GRPO; where a group's answers agree, its mean outcome against other groups instead", "mean_std"),
    dynamo_modulation.dynamo_modulation: (
        "GRPO; certain winning steps weigh more, those that would move the entropy most less",
        "mean_std",
    ),
    shrinkage.shrinkage: ("outcomes against a baseline between the group's mean and the task's earlier one", "mean"),
    unlikeliness.unlikeliness: ("GRPO with smaller rewards for rollouts that the policy finds likely", "mean_std"),
}


def _method(spec: ModifierSpec, norm: Norm) -> Callable[..., Credit]:
    """The estimator: ``spec`` on ``(R - mean_g) / F_g``, each trajectory once; a group of one has 0."""

    def base(batch: StepBatch) -> Credit:
        episode = episode_level(batch, norm)
        return Credit(episode, parts={"episode_level": episode}, groups={"episode_level": batch.group})

    def estimator(batch: StepBatch, params: Any, *state: Mapping[str, float]) -> Credit:
        free = batch.replaced(penalty=np.zeros(len(batch)))
        credit = spec.fn(free, params, base, *state)
        metrics = {f"credit/{spec.name}/{key}": value for key, value in credit.metrics.items()}
        metrics["credit/groups"] = float(batch.n_groups)
        return Credit.of_parts(
            {**credit.parts, spec.name: credit.advantage - credit.parts["episode_level"]},
            batch.penalty,
            total=credit.advantage,
            metrics=metrics,
            state=credit.state,
            levels={f"{spec.name}/{key}": level for key, level in credit.levels.items()},
            groups=credit.groups,
        )

    estimator.__doc__ = spec.fn.__doc__
    estimator.__name__ = estimator.__qualname__ = spec.name
    return estimator


for _spec in [spec for spec in modifiers().values() if spec.fn in METHODS]:
    _summary, _norm = METHODS[_spec.fn]
    register_estimator(
        _spec.name,
        params=_spec.params,
        needs=_spec.needs,
        before=_spec.before,
        stateful=_spec.stateful,
        bounded_outcomes=_spec.bounded_outcomes,
        paper=_spec.paper,
        summary=_summary,
    )(_method(_spec, _norm))
