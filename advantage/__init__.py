"""Turn- and step-level credit over one table of steps.

>>> from verl_turnkey.advantage import StepBatch, compute_credit
>>> batch = StepBatch(group=["a", "a"], trajectory=["a0", "a1"], step=[0, 0], reward=[0.0, 1.0], anchor=["s", "s"])
>>> compute_credit("gigpo", batch, norm="mean").advantage
array([-1.,  1.])
"""

import verl_turnkey.advantage.methods
import verl_turnkey.advantage.modifiers  # noqa: F401  importing the two packages registers what is in them
from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.glossary import describe_part
from verl_turnkey.advantage.modifying import (
    Modification,
    ModifierSpec,
    Tokens,
    modifiers,
    parse_modify,
    register_modifier,
    register_token_modifier,
)
from verl_turnkey.advantage.params import ConfigError, parse
from verl_turnkey.advantage.record import RECORD_VERSION, RecordError, make_record, make_step, validate_record
from verl_turnkey.advantage.registry import EstimatorSpec, ValueHead, compute_credit, estimators, register_estimator

__all__ = [
    "RECORD_VERSION",
    "ConfigError",
    "Credit",
    "EstimatorSpec",
    "Modification",
    "ModifierSpec",
    "RecordError",
    "StepBatch",
    "Tokens",
    "ValueHead",
    "compute_credit",
    "describe_part",
    "estimators",
    "make_record",
    "make_step",
    "modifiers",
    "parse",
    "parse_modify",
    "register_estimator",
    "register_modifier",
    "register_token_modifier",
    "validate_record",
]
