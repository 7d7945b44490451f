"""HiPER's credit on tokens: a turn's action, its subgoal and its decision to switch have advantages of their own."""

from __future__ import annotations

import numpy as np

from verl_turnkey.advantage import ConfigError, Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints

STREAMS = {"switch": "switch_advantages", "subgoal": "subgoal_advantages", "action": None}
"""decision -> the column of ``Credit.extra`` with its advantages; None: ``Credit.advantage``"""


def stream_advantages(credit: Credit, batch: StepBatch, step: Ints) -> Floats | None:
    """Advantages of the tokens, (T,), of which ``step`` (T,) is the row of ``batch`` in written order.

    A token of no decision, such as a thought, has 0; one that two share has the later decision's. None: the credit has
    one stream alone, or the rollout did not say which tokens are whose (``turnkey.rollout.action_format=hiper`` does).

    Raises:
        ConfigError: a modifier of tokens has changed the credit already.
    """
    columns = [f"{word}_{stream}" for word in ("from", "to") for stream in STREAMS]
    if not all(f"extra.{name}" in batch.given for name in columns) or "subgoal_advantages" not in credit.extra:
        return None
    if credit.tokens is not None:
        raise ConfigError(
            "hae gives the tokens of each decision of a turn their own advantages, and turnkey.credit.modify changes "
            "those of single tokens: drop its modifiers of tokens"
        )
    order = np.argsort(step, kind="stable")
    place = np.empty(len(step), dtype=np.int64)
    place[order] = np.arange(len(step)) - np.searchsorted(step[order], step[order])
    result = np.zeros(len(step))
    for stream, name in STREAMS.items():
        own = credit.advantage if name is None else credit.extra[name]
        first, behind = (np.nan_to_num(batch.extra[f"{word}_{stream}"])[step] for word in ("from", "to"))
        result = np.where((first <= place) & (place < behind), own[step], result)
    return result
