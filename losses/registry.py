"""Policy losses by name: one function, one frozen params dataclass and one decorator make a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl_turnkey.advantage.params import ConfigError, did_you_mean, parse, require_frozen


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees: tensors (B, L), float32 or float64, zero off the mask; ``mask`` is bool.

    ``extra`` holds the further inputs that the loss names in ``needs``, as they were passed.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLoss:
    """What a loss returns: ``loss`` (B, L), to be averaged with the weights ``weight`` (B, L), zero off the mask.

    ``weight`` None: the mask, so a mean over tokens. ``metrics`` are numbers. ``bias`` (B, L), averaged likewise, has a
    gradient of its own, the clipping bias, by whose norm the gradient of the loss is divided (:mod:`.st_ppo`); it needs
    an actor that takes a second backward pass, and without one has no effect. ``per_row``: the tokens of a row have one
    value, to be averaged over rows.
    """

    loss: Tensor
    weight: Tensor | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    bias: Tensor | None = None
    per_row: bool = False


@dataclass(frozen=True)
class LossSpec:
    """A registered loss: its params dataclass, the inputs it needs beside the usual four, and where it comes from.

    ``accepts``: inputs that it can do without, as in its own mean over a whole batch.
    """

    name: str
    params: type
    needs: dict[str, str]
    accepts: tuple[str, ...]
    paper: str
    summary: str
    fn: Callable[[LossInputs, Any], TokenLoss]


Loss = TypeVar("Loss", bound=Callable[[LossInputs, Any], TokenLoss])
_LOSSES: dict[str, LossSpec] = {}


def register_loss(
    name: str,
    *,
    params: type,
    needs: dict[str, str] | None = None,
    accepts: tuple[str, ...] = (),
    paper: str = "",
    summary: str = "",
) -> Callable[[Loss], Loss]:
    """Decorate ``fn(inputs: LossInputs, params) -> TokenLoss`` to make it the policy loss ``name``.

    ``needs`` maps each further input to what provides it, for the error that says it is missing; ``accepts`` names
    those that may be missing.

    Raises:
        ValueError: the name is taken, or ``params`` is not a frozen dataclass.
    """
    if name in _LOSSES:
        holder = _LOSSES[name].fn
        raise ValueError(f"loss {name!r} is already registered by {holder.__module__}.{holder.__qualname__}")
    require_frozen(f"loss {name!r}", params)

    def register(fn: Loss) -> Loss:
        _LOSSES[name] = LossSpec(name, params, dict(needs or {}), tuple(accepts), paper, summary, fn)
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
        params: fields of the loss's dataclass, and the further inputs that it needs.

    Returns:
        A scalar, the mean over the model's tokens (or what the loss averages over; 0 when there are none), and metrics.

    Raises:
        ConfigError: unknown loss or parameter (with the closest match), a value of the wrong type or range, or an input
            that the loss needs and was not given.
        ValueError: shapes that differ.
    """
    spec = loss_spec(name)
    extra = {key: params.pop(key) for key in (*spec.needs, *spec.accepts) if key in params}
    term = token_loss(
        spec,
        parse(spec.params, params, where=name),
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
        extra=extra,
    )
    weight = response_mask.bool().to(term.loss.dtype) if term.weight is None else term.weight
    if term.per_row:
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
    total = (term.loss * weight).sum() / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)
    return total, term.metrics


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
    given = {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages}
    for key, tensor in given.items():
        if tensor.shape != response_mask.shape:
            raise ValueError(
                f"{spec.name}: expected {key} of shape {tuple(response_mask.shape)} as response_mask, "
                f"got {tuple(tensor.shape)}"
            )
    for key, provider in spec.needs.items():
        if key not in extra:
            raise ConfigError(f"loss {spec.name!r} needs {key!r}, which it was not given: {provider}")
    mask = response_mask.bool()
    dtype = torch.float64 if log_prob.dtype == torch.float64 else torch.float32

    # Whatever stands off the mask, nan included, touches neither loss nor gradient.
    def clean(tensor: Tensor) -> Tensor:
        return torch.where(mask, tensor.to(dtype), 0.0)

    inputs = LossInputs(clean(log_prob), clean(old_log_prob).detach(), clean(advantages).detach(), mask, extra)
    return spec.fn(inputs, params)
