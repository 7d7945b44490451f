"""VERL's shaping: where the effective rank of a response's hidden states is above its running mean, credit rises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Bools, Floats, mean
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.modifying import Estimate, Tokens, register_modifier
from verl_turnkey.advantage.params import NotNegative, Ranged, check

NAMES = ("rank", "rank_velocity", "rank_acceleration")
"""the columns, and the keys of the running means"""
DEVIATION = 5.0
"""bound of a deviation from the running mean, in units of the mean"""
EPS = 1e-8


@dataclass(frozen=True)
class RankShapingParams(Ranged):
    gain: NotNegative = 2.0  # how sharply the acceleration decides between rank and velocity
    weight: NotNegative = 1.0  # of the shaping term
    kappa: float = 2.0  # the term is at most |A| / kappa
    rate: float = 0.3  # share of a batch's mean in the running means
    tokens: Literal["all", "last"] = "all"  # which tokens of a turn it raises; last: as released
    stride: int = 40  # tokens between two prefixes whose rank is measured
    window: int = 512  # velocity and acceleration are over this many last tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 < self.kappa < np.inf, "kappa", "a positive number", self.kappa)
        check(0 < self.rate <= 1, "rate", "a number above 0, at most 1", self.rate)
        check(self.stride > 0, "stride", "a positive integer", self.stride)
        check(self.window > self.stride, "window", "more tokens than the stride", self.window)

    @property
    def by_token(self) -> bool:
        return self.tokens == "last"


def deviation(values: Floats, running: float) -> Floats:
    """Distance from the running mean in units of its size, at most 5 either way."""
    return np.clip((values - running) / (abs(running) + EPS), -DEVIATION, DEVIATION)


def measured(batch: StepBatch) -> tuple[list[Floats], Bools]:
    """The three columns (S,), and the steps that they are known of: a step without tokens has no hidden states."""
    columns = [step_column(batch, "rank_shaping", name, gaps=True) for name in NAMES]
    has_tokens = batch.tokens > 0 if "tokens" in batch.given else np.ones(len(batch), dtype=bool)
    return columns, has_tokens & ~np.isnan(columns).any(axis=0)


def shaping(batch: StepBatch, params: RankShapingParams, state: Mapping[str, float]) -> Floats:
    """Phi of each step (S,); 0 while there are no running means, and of a step without numbers."""
    if not all(name in state for name in NAMES):
        return np.zeros(len(batch))
    columns, has_rank = measured(batch)
    er, erv, era = (
        deviation(np.where(has_rank, column, state[name]), state[name])
        for name, column in zip(NAMES, columns, strict=True)
    )
    b = 1 / (1 + np.exp(np.clip(-params.gain * era, -500, 500)))
    return params.weight * (b * np.tanh(er) + (1 - b) * np.tanh(erv))


def bonus(advantage: Floats, phi: Floats, params: RankShapingParams) -> Floats:
    """The addend of each advantage: Phi where it is positive, capped at |A| / kappa."""
    return np.minimum(np.maximum(0.0, phi), np.abs(advantage) / params.kappa)


def last_tokens(
    advantage: Floats, tokens: Tokens, batch: StepBatch, params: RankShapingParams, state: Mapping[str, float]
) -> Floats:
    """Raise the last token of each step alone."""
    last = np.zeros(len(batch), dtype=np.int64)
    last[tokens.step] = np.arange(len(tokens.step))  # of equal places the last assignment stays
    place = last[np.unique(tokens.step)]
    result = advantage.copy()
    result[place] += bonus(advantage[place], shaping(batch, params, state)[tokens.step[place]], params)
    return result


@register_modifier(
    "rank_shaping",
    params=RankShapingParams,
    needs=tuple(f"extra.{name}" for name in NAMES),
    stateful=True,
    of_tokens=last_tokens,
    paper="VERL, arXiv:2509.23808",
    summary="raises credit where the hidden states of a response span more dimensions than those of earlier batches",
)
def rank_shaping(batch: StepBatch, params: RankShapingParams, estimate: Estimate, state: Mapping[str, float]) -> Credit:
    """Credit raised by the effective rank of hidden states (ER), its velocity (ERV) and its acceleration (ERA).

    ::

        dev(x) = clip((x - mu) / (|mu| + 1e-8), -5, 5)          mu: running mean of x
        b      = sigmoid(gain dev(ERA))
        Phi    = weight (b tanh dev(ER) + (1 - b) tanh dev(ERV))
        A'     = A + min(max(0, Phi), |A| / kappa)
        mu    <- (1 - rate) mu + rate (mean over the batch)     after use; a step without tokens does not count

    The columns are measured in the old policy's forward pass, over the row that holds the step:
    ``plugins/actor/hidden_rank.py`` has their formulas. Steps of one row share them. The first batch is not shaped; its
    means are the first running means.

    Source: arXiv:2509.23808 and its released code. The code raises the last token of a response alone
    (``tokens=last``), and its running means start from 0: at first every positive number counts as far above them.
    """
    credit = estimate(batch)
    phi = shaping(batch, params, state)
    columns, has_rank = measured(batch)
    means = {name: mean(column[has_rank]) for name, column in zip(NAMES, columns, strict=True)}
    running = {name: mu + params.rate * (means[name] - mu) for name in NAMES for mu in (state.get(name, means[name]),)}
    running = running if has_rank.any() else state
    added = bonus(credit.advantage, phi, params)
    metrics = {f"{name}/mean": means[name] for name in NAMES}
    metrics |= {"phi/mean": mean(phi[has_rank]), "raised": mean((added > 0)[has_rank])}
    advantage = credit.advantage if params.by_token else credit.advantage + added
    return replace(credit, advantage=advantage, metrics=metrics, levels={"phi": phi}, state=running)
