"""Policy losses by name: one function, one frozen params dataclass and one decorator make a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl_turnkey.advantage.params import ConfigError, did_you_mean, parse, require_frozen

#: Accepted by every loss with weights, where the tensors are a part of a batch: the batch's tokens per unit of weight.
WEIGHT_SHARE = "weight_share"


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees: tensors (B, L), float32 or float64, zero off the mask; ``mask`` is bool.

    ``weight`` (B, L) times a loss is, in the mean over tokens, the mean with the loss's own weights; without such
    weights it is 1. ``extra`` holds the further inputs, (B, L), or (B,) where the loss is ``per_row``.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    weight: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLoss:
    """What a loss returns: ``loss`` (B, L), to be averaged over tokens, and metrics, which are numbers.

    ``bias`` (B, L), averaged likewise, has a gradient of its own, the clipping bias, by whose norm the gradient of the
    loss is divided (:mod:`.st_ppo`): by an actor that takes a second backward pass; without one it has no effect.
    """

    loss: Tensor
    metrics: dict[str, Any] = field(default_factory=dict)
    bias: Tensor | None = None


@dataclass(frozen=True)
class LossSpec:
    """A registered loss: its params dataclass, its inputs beside the usual four, and where it comes from.

    The arguments of :func:`register_loss`; ``inputs`` are the names that it needs or accepts.
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


Loss = TypeVar("Loss", bound=Callable[[LossInputs, Any], TokenLoss])
_LOSSES: dict[str, LossSpec] = {}


def register_loss(
    name: str,
    *,
    params: type,
    needs: dict[str, str] | None = None,
    accepts: tuple[str, ...] = (),
    weight: Callable[[LossInputs, Any], Tensor | None] | None = None,
    per_row: bool = False,
    paper: str = "",
    summary: str = "",
) -> Callable[[Loss], Loss]:
    """Decorate ``fn(inputs: LossInputs, params) -> TokenLoss`` to make it the policy loss ``name``.

    Args:
        needs: each further input, and what provides it, for the error that says it is missing.
        accepts: those that may be missing.
        weight: ``weight(inputs, params)`` -> (B, L), zero off the mask, or None for an ordinary mean: the weights of
            a mean over tokens, from everything but the current policy. The loss multiplies by ``inputs.weight``.
        per_row: the tokens of a row have one value, to be averaged over rows, and the further inputs are (B,).

    Raises:
        ValueError: the name is taken, or ``params`` is not a frozen dataclass.
    """
    if name in _LOSSES:
        holder = _LOSSES[name].fn
        raise ValueError(f"loss {name!r} is already registered by {holder.__module__}.{holder.__qualname__}")
    require_frozen(f"loss {name!r}", params)

    def register(fn: Loss) -> Loss:
        more = (WEIGHT_SHARE,) if weight else ()
        _LOSSES[name] = LossSpec(
            name, params, dict(needs or {}), (*accepts, *more), weight, per_row, paper, summary, fn
        )
        return fn

    return register


def losses() -> dict[str, LossSpec]:
    """All registered losses by name, sorted."""
    return dict(sorted(_LOSSES.items()))


def loss_spec(name: str) -> LossSpec:
    """The loss ``name``.

    Raises:
        ConfigError: there is none; names the closest.
    """
    if name not in _LOSSES:
        raise ConfigError(f"unknown loss {name!r}{did_you_mean(name, _LOSSES) or ';'} known: {', '.join(losses())}")
    return _LOSSES[name]


def scales_gradient(params: Any) -> bool:
    """Whether a loss with these params divides its gradient: they have a method ``gradient_scale(norm)``.

    Its :class:`TokenLoss` then has a ``bias``, whose gradient's norm is what the method is given.
    """
    return callable(getattr(params, "gradient_scale", None))


def policy_loss(
    name: str,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    **params: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """The policy loss ``name`` of a batch, to be minimised, and its metrics.

    Args:
        log_prob, old_log_prob: (B, L) log-probabilities of the tokens, now and when the batch was taken. Half precision
            is computed in float32.
        advantages: (B, L).
        response_mask: (B, L), one on the model's own tokens; everything else may hold any numbers.
        params: fields of the loss's dataclass, and the further inputs that it needs: (B, L), or (B,) for one number
            that all tokens of a row share.

    Returns:
        A scalar, the mean over the model's tokens (or what the loss averages over; 0 when there are none), and metrics.

    Raises:
        ConfigError: unknown loss or parameter (with the closest match), a value of the wrong type or range, or an input
            that the loss needs and was not given.
        ValueError: shapes that differ, or jagged tensors.
    """
    spec = loss_spec(name)
    extra = {key: params.pop(key) for key in spec.inputs if key in params}
    term = token_loss(
        spec,
        parse(spec.params, params, where=name),
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
        extra=extra,
    )
    mask = response_mask.bool().to(term.loss.dtype)
    share = mask / mask.sum(1, keepdim=True).clamp(min=1) if spec.per_row else mask
    return (term.loss * share).sum() / share.sum().clamp(min=torch.finfo(share.dtype).tiny), term.metrics


def token_loss(
    spec: LossSpec,
    params: Any,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    extra: dict[str, Tensor],
) -> TokenLoss:
    """The loss before it is averaged; checks and cleans the inputs."""
    inputs = _inputs(spec, log_prob, old_log_prob, advantages, response_mask, extra)
    weight = _weight(spec, params, inputs)
    if weight is not None:
        share = inputs.extra[WEIGHT_SHARE] if WEIGHT_SHARE in inputs.extra else _share(inputs.mask, weight)
        inputs = replace(inputs, weight=weight * share)
    return spec.fn(inputs, params)


def weight_share(
    spec: LossSpec, params: Any, *, old_log_prob: Tensor, response_mask: Tensor, extra: dict[str, Tensor]
) -> Tensor | None:
    """What :data:`WEIGHT_SHARE` is on each row of this batch (a scalar); None when the loss has no weights."""
    inputs = _inputs(spec, old_log_prob, old_log_prob, torch.zeros_like(old_log_prob), response_mask, extra)
    weight = _weight(spec, params, inputs)
    return None if weight is None else _share(inputs.mask, weight)


def weighs(spec: LossSpec, params: Any) -> bool:
    """Whether the loss has weights of its own with these params: asked of the loss itself, on two tokens."""
    two = torch.zeros(1, 2)
    extra = {key: torch.zeros(1) for key in spec.inputs}
    return weight_share(spec, params, old_log_prob=two, response_mask=two == 0, extra=extra) is not None


def _weight(spec: LossSpec, params: Any, inputs: LossInputs) -> Tensor | None:
    weight = spec.weight(inputs, params) if spec.weight else None
    return None if weight is None else weight.to(inputs.weight.dtype)


def _share(mask: Tensor, weight: Tensor) -> Tensor:
    total = weight.sum(dtype=torch.float64)
    return torch.where(total > 0, mask.sum() / total, 0.0)


def _inputs(
    spec: LossSpec,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    extra: dict[str, Tensor],
) -> LossInputs:
    shape = tuple(response_mask.shape)
    if response_mask.is_nested or len(shape) != 2:
        kind = "a jagged tensor" if response_mask.is_nested else shape
        raise ValueError(f"{spec.name}: expected response_mask of shape (B, L), padded, got {kind}")
    for key, tensor in {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages}.items():
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

    # Whatever stands off the mask, nan included, touches neither loss nor gradient.
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
