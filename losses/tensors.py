"""A policy loss's entry, its inputs and its result, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_turnkey.advantage.params import ConfigError

GROUP_LOG_RATIO = "group_log_ratio"
"""further input of losses that compare the rows of a group with each other"""
#: Further inputs of losses with a second prompt, which the queue holds under these names, and what provides them.
TEACHER = {
    "teacher_log_prob": "a teacher's prompt: set turnkey.teacher.source; else (B, L), log-probabilities of the tokens "
    "under it",
    "has_teacher": "a teacher's prompt: set turnkey.teacher.source; else (B,), whether the row has a text for it",
}


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss: tensors (B, L), float32 or float64, zero where the bool ``mask`` is False.

    ``weight`` (B, L) holds the loss's own weights, scaled so that the mean over tokens of ``weight * loss`` is the
    weighted mean; it is 1 for a loss without weights. ``extra`` holds the further inputs, (B, L), or (B,) where the
    loss is ``per_row``.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    weight: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLoss:
    """Result of a loss: ``loss`` (B, L), finite, to be averaged over tokens, and metrics, which are numbers.

    The gradient of ``bias`` (B, L), averaged likewise, is the clipping bias, by whose norm an actor with a second
    backward pass divides the gradient of the loss (:mod:`.st_ppo`). Without a second pass it has no effect.

    ``ratio`` (B, L) are the importance ratios that the loss computed with, and ``clipped`` (B, L), bool, says which of
    them it clipped; both are for the log alone, and None where the loss does not say.
    """

    loss: Tensor
    metrics: dict[str, Any] = field(default_factory=dict)
    bias: Tensor | None = None
    ratio: Tensor | None = None
    clipped: Tensor | None = None


@dataclass(frozen=True)
class LossSpec:
    """A registered loss: its params dataclass, its inputs beside the usual four, and its source.

    The arguments of :func:`~verl_turnkey.losses.register_loss`; ``inputs`` are the names that it needs or accepts.
    """

    name: str
    params: type
    needs: dict[str, str]
    accepts: tuple[str, ...]
    weight: Callable[[LossInputs, Any], Tensor | None] | None
    per_row: bool
    paper: str
    summary: str
    fn: Callable[[LossInputs, Any], TokenLoss]

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.needs, *self.accepts)

    @property
    def compares_groups(self) -> bool:
        """Whether it needs its groups' log-ratios before each optimizer step; mini-batches then have whole groups."""
        return GROUP_LOG_RATIO in self.needs


def clean_inputs(
    spec: LossSpec,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    extra: dict[str, Tensor],
) -> LossInputs:
    """The inputs of a loss, checked, detached from everything but the current policy, and zero off the mask."""
    tensors = {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages}
    for key, tensor in {**tensors, "response_mask": response_mask, **extra}.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{spec.name}: expected {key} to be a torch tensor, got {type(tensor).__name__}; torch.as_tensor makes "
                "one"
            )
    shape = tuple(response_mask.shape)
    if response_mask.is_nested or len(shape) != 2:
        kind = "a jagged tensor" if response_mask.is_nested else shape
        raise ValueError(f"{spec.name}: expected response_mask of shape (B, L), padded, got {kind}")
    for key, tensor in tensors.items():
        if tensor.shape != response_mask.shape:
            raise ValueError(
                f"{spec.name}: expected {key} of shape {shape} as response_mask, got {tuple(tensor.shape)}"
            )
    for key, provider in spec.needs.items():
        if key not in extra:
            raise ConfigError(f"loss {spec.name!r} needs {key!r}, which it was not given: {provider}")
    allowed = (shape[:1],) if spec.per_row else (shape, shape[:1])
    for key, tensor in extra.items():
        if tuple(tensor.shape) not in allowed:
            raise ValueError(
                f"{spec.name}: expected {key} of shape {' or '.join(map(str, allowed))}, got {tuple(tensor.shape)}"
            )
    mask = response_mask.bool()
    dtype = torch.float64 if log_prob.dtype == torch.float64 else torch.float32

    # Values off the mask, nan included, affect neither loss nor gradient.
    def clean(tensor: Tensor) -> Tensor:
        return torch.where(mask, tensor.to(dtype), 0.0)

    def further(tensor: Tensor) -> Tensor:
        if spec.per_row:
            return torch.where(mask.any(1), tensor.detach().to(dtype), 0.0)
        return clean(tensor.detach() if tensor.dim() == 2 else tensor.detach()[:, None])

    return LossInputs(
        clean(log_prob),
        clean(old_log_prob).detach(),
        clean(advantages).detach(),
        mask,
        mask.to(dtype),
        {key: further(tensor) for key, tensor in extra.items()},
    )


def check_shape(spec: LossSpec, inputs: LossInputs, what: str, tensor: Any) -> None:
    """One number per token: any other shape would be broadcast silently."""
    if not isinstance(tensor, Tensor) or tensor.shape != inputs.mask.shape:
        got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"loss {spec.name!r}: expected {what} of shape {tuple(inputs.mask.shape)}, one number per token before any "
            f"mean, got {got}"
        )


def check_term(spec: LossSpec, inputs: LossInputs, term: Any) -> None:
    """The checks that need not wait for the device."""
    if not isinstance(term, TokenLoss):
        raise ValueError(f"loss {spec.name!r}: expected it to return a TokenLoss, got {type(term).__name__}")
    check_shape(spec, inputs, "TokenLoss.loss", term.loss)
    for name in ("bias", "ratio", "clipped"):
        if getattr(term, name) is not None:
            check_shape(spec, inputs, f"TokenLoss.{name}", getattr(term, name))
    if inputs.log_prob.requires_grad and not term.loss.requires_grad and inputs.mask.any():
        raise ValueError(
            f"loss {spec.name!r}: expected TokenLoss.loss with a gradient, got a constant: compute it from "
            "inputs.log_prob without detach(), item() or torch.no_grad()"
        )


def check_finite(spec: LossSpec, inputs: LossInputs, term: TokenLoss) -> None:
    """Numbers that are not finite are an error of the loss only if its inputs are finite."""
    tensors = (inputs.log_prob, inputs.old_log_prob, inputs.advantages)
    if not term.loss.isfinite().all() and all(tensor.isfinite().all() for tensor in tensors):
        raise ValueError(
            f"loss {spec.name!r}: expected TokenLoss.loss with finite numbers, off the mask too, where its inputs are "
            f"0; got {(~term.loss.isfinite()).sum()} not finite in shape {tuple(term.loss.shape)}"
        )
