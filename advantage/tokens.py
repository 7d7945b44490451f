"""Credit of single tokens: the tokens of a batch of steps, and the modifiers that change their advantages.

Estimators and modifiers of steps give one number per step, which all its tokens share. What a second prompt says of a
response (:class:`Tokens`) differs from token to token, so its modifiers come last, on one advantage per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints
from verl_turnkey.advantage.metrics import describe
from verl_turnkey.advantage.params import ConfigError


@dataclass(frozen=True)
class Tokens:
    """The model's tokens of a batch, in the order of its rows; those of a step are in the order they were written.

    ``step`` (T,) int64: the row of the :class:`StepBatch` that a token belongs to. ``gap`` (T,) float64: its
    log-probability under the teacher's prompt minus that under the student's, both by the old weights; 0 where the row
    has no text for a teacher, or there is no teacher. ``training_step``: of the trainer, from 1.

    Raises:
        ValueError: columns of different lengths, or a gap that is not finite.
    """

    step: Ints
    gap: Floats
    training_step: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", np.asarray(self.step, np.int64))
        object.__setattr__(self, "gap", np.asarray(self.gap, np.float64))
        if self.step.ndim != 1 or self.step.shape != self.gap.shape:
            raise ValueError(f"Tokens: expected step and gap of shape (T,), got {self.step.shape} and {self.gap.shape}")
        if bad := np.count_nonzero(~np.isfinite(self.gap)):
            raise ValueError(f"Tokens: expected finite gaps, got {bad} that are not: 0 stands for a row without a text")

    def sums(self, values: Floats, steps: int) -> Floats:
        """Sum of ``values`` (T,) over the tokens of each of ``steps`` steps; 0 for a step without tokens."""
        return np.bincount(self.step, weights=values, minlength=steps).astype(np.float64)  # integers without a token

    def means(self, values: Floats, steps: int) -> Floats:
        """Mean of ``values`` (T,) over the tokens of each of ``steps`` steps; 0 for a step without tokens."""
        return self.sums(values, steps) / np.maximum(np.bincount(self.step, minlength=steps), 1)


#: From the advantage of each token (T,), the tokens, their steps, the parameters, and the state of a stateful modifier
#: to the new advantages (T,).
TokenRule = Callable[..., Floats]


def with_tokens(
    credit: Credit,
    modify: Sequence[Any],
    batch: StepBatch,
    tokens: Tokens | None,
    penalties: Floats,
    state_of: Callable[[str], Mapping[str, float]],
) -> Credit:
    """``credit``, which has no ``penalties`` (S,) in it, with an advantage for each token, which has.

    ``modify``: the modifications of tokens, in order. Advantage and parts of a step follow the mean of its tokens.
    ``state_of``: from the name of a stateful one to its state before this batch.

    Raises:
        ConfigError: there are no ``tokens``.
        ValueError: a modifier did not return one finite number per token.
    """
    if tokens is None:
        raise ConfigError(
            f"modifier {modify[0].spec.name!r} changes the credit of single tokens: pass tokens=Tokens(step=..., "
            "gap=...), the step and the teacher's gap of each"
        )
    advantage, of_step = credit.advantage[tokens.step], credit.advantage
    parts, metrics = dict(credit.parts), dict(credit.metrics)
    for modification in modify:
        spec, before = modification.spec, advantage
        own = (state_of(spec.name),) if spec.stateful else ()
        advantage = np.asarray(spec.of_tokens(before, tokens, batch, modification.params, *own), np.float64)
        _check(spec.name, advantage, len(before))
        moved = tokens.means(advantage - before, len(batch))
        of_step, parts[spec.name] = of_step + moved, parts[spec.name] + moved
        metrics |= describe(f"{spec.name}/tokens", advantage - before)
    return replace(credit, advantage=of_step, parts=parts, metrics=metrics, tokens=advantage + penalties[tokens.step])


def _check(name: str, advantage: Floats, number: int) -> None:
    expected = f"modifier {name!r}: expected {number} finite numbers, one per token"
    if advantage.shape != (number,):
        raise ValueError(f"{expected}, got shape {advantage.shape}")
    if bad := np.count_nonzero(~np.isfinite(advantage)):
        raise ValueError(f"{expected}, got {bad} that are not finite")
