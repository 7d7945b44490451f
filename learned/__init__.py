"""Objectives of a scorer that is trained beside the policy: what its numbers for the steps of a batch should be.

>>> from verl_turnkey.advantage import StepBatch
>>> from verl_turnkey.learned import ObjectiveParams, gradient
>>> two = StepBatch(group=[0, 0], trajectory=["won", "lost"], step=[0, 0], reward=[1.0, 0.0])
>>> gradient("preference", [0.0, 0.0], two, ObjectiveParams(beta=1.0)).coefficients
tensor([-0.5000,  0.5000], dtype=torch.float64)
"""

from verl_turnkey.learned import outcome_ce, preference, sum_to_outcome  # noqa: F401  importing one registers it
from verl_turnkey.learned.registry import (
    Gradient,
    ObjectiveParams,
    ObjectiveSpec,
    gradient,
    objective_spec,
    objectives,
    register_objective,
)
from verl_turnkey.learned.trajectories import Trajectories

__all__ = [
    "Gradient",
    "ObjectiveParams",
    "ObjectiveSpec",
    "Trajectories",
    "gradient",
    "objective_spec",
    "objectives",
    "register_objective",
]
