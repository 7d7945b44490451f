"""What makes two states or two actions equal where their keys hardly recur: signatures of actions, sets of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.columns import encode
from verl_turnkey.advantage.group_ops import Ints, previous_values
from verl_turnkey.advantage.methods._step_columns import key_column
from verl_turnkey.advantage.params import ConfigError


def action_codes(batch: StepBatch, column: bool, path: str | None) -> tuple[Ints, int]:
    """Code of each step's action (S,), and the number of codes that can recur: those of missing keys are beyond.

    ``column``: the key is ``extra["action_signature"]`` instead of ``batch.action``. ``path``: ``module:function`` from
    a key to its signature; None: the key itself.

    Raises:
        ConfigError: the function raised, or returned something that cannot be a key.
    """
    codes, ids = key_column(batch, "action_signature") if column else (batch.action, batch.ids["action"])
    if path is None:
        return codes, len(ids)
    function = function_of(path)
    try:
        signatures = [function(key) for key in ids]
        codes, ids = encode("signature", [signatures[c] if c < len(ids) else None for c in codes.tolist()], True)
    except Exception as error:  # of the user's function
        raise ConfigError(f"rtmc.signature={path}: {type(error).__name__}: {error}") from error
    return codes, len(ids)


def past_actions(batch: StepBatch, action: Ints, known: int) -> Ints:
    """Code (S,) of the set of actions below ``known`` that the trajectory took before each step."""
    codes: dict[frozenset[int], int] = {}
    result = np.zeros(len(batch), dtype=np.int64)
    taken = action.tolist()
    before = previous_values(np.arange(len(batch)), batch.runs, -1).tolist()
    past: dict[int, frozenset[int]] = {-1: frozenset()}  # up to a row, its own action included
    for row in batch.runs.order.tolist():
        so_far = past[before[row]]
        result[row] = codes.setdefault(so_far, len(codes))
        past[row] = so_far | {taken[row]} if taken[row] < known and taken[row] not in so_far else so_far
    return result


def function_of(path: str) -> Callable[[Any], Any]:
    """The function ``module:function``.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"signature: expected an importable module:function, got {path!r}: {error}") from None
