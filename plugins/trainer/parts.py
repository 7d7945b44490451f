"""The parts that features add to the trainer, in the order in which their hooks run.

A new part is one file and one entry of :data:`PARTS`. It defines those of these hooks that it needs::

    joined(pools)                   verl's workers of each resource pool, with further ones
    during(batch)                   context of verl's pass for the old log-probabilities
    before_forward(method, batch)   before each call of a worker group's method
    after_old_log_probs(batch)      right after that pass, with the same weights; returns metrics
    before_advantage(batch)         once all columns of verl are there; returns metrics
    after_advantage(batch)          once the advantages are in the queue; returns metrics
    save(folder), load(folder)      what lasts, in the folder of a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from verl_turnkey.plugins.actor.hidden_rank import RankPass
from verl_turnkey.plugins.teacher.column import Teacher
from verl_turnkey.plugins.trainer.mutual_information import MutualInformation
from verl_turnkey.plugins.trainer.process_reward import ProcessReward

#: Attribute of the trainer -> the part, made for the trainer.
PARTS: dict[str, Callable[[Any], Any]] = {
    "rank_pass": lambda trainer: RankPass(trainer.advantage_step.modify),
    "teacher": lambda trainer: Teacher(trainer, trainer.turnkey),
    "information": lambda trainer: MutualInformation(trainer, trainer.turnkey.mutual_information),
    "process_reward": lambda trainer: ProcessReward(trainer, trainer.turnkey),
}


def hooks(parts: Iterable[Any], name: str) -> list[Callable[..., Any]]:
    """The hook ``name`` of each part that has it."""
    return [getattr(part, name) for part in parts if hasattr(part, name)]
