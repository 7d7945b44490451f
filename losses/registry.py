"""Policy losses by name: one function, one frozen params dataclass and one decorator make a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.advantage.params import ConfigError, did_you_mean, parse, require_frozen, require_new, require_takes

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


#: Input of every loss with weights when the tensors are a part of a batch: the batch's tokens per unit of weight.
WEIGHT_SHARE = "weight_share"


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
        ValueError: the name is taken, ``params`` is not a frozen dataclass, ``needs`` not a dict, ``accepts`` not a
            tuple of names, or ``fn`` takes other arguments.
    """
    require_new(f"loss {name!r}", _LOSSES.get(name))
    require_frozen(f"loss {name!r}", params)
    if not isinstance(needs, Mapping | None):
        raise ValueError(
            f"loss {name!r}: expected needs to be a dict, each further input with what provides it, such as "
            f'{{"prior": "an estimator that gives prior"}}, got {needs!r}'
        )
    if isinstance(accepts, str):
        raise ValueError(f"loss {name!r}: expected accepts to be a tuple of names such as ({accepts!r},), got a str")

    def register(fn: Loss) -> Loss:
        require_takes(f"loss {name!r}", fn, "inputs", "params")
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
        hint = known_as(name) or did_you_mean(name, _LOSSES)
        raise ConfigError(f"unknown loss {name!r}{hint or ';'} known: {', '.join(losses())}")
    return _LOSSES[name]


def scales_gradient(params: Any) -> bool:
    """Whether a loss with these params scales its gradient: they then have a method ``gradient_scale(norm)``.

    Its :class:`TokenLoss` then has a ``bias``; the method gets the norm of the bias's gradient.
    """
    return callable(getattr(params, "gradient_scale", None))


def policy_loss(
    name: str, *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **params: Any
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
        TypeError: something else than a torch tensor.
        ValueError: shapes that differ, or jagged tensors; a loss that returned anything but a :class:`TokenLoss` with
            one finite number per token, or one without a gradient.
    """
    spec = loss_spec(name)
    extra = {key: params.pop(key) for key in spec.inputs if key in params}
    parsed = parse(spec.params, params, where=name)
    term = token_loss(spec, parsed, log_prob, old_log_prob, advantages, response_mask, extra)
    mask = response_mask.bool().to(term.loss.dtype)
    share = mask / mask.sum(1, keepdim=True).clamp(min=1) if spec.per_row else mask
    return (term.loss * share).sum() / share.sum().clamp(min=torch.finfo(share.dtype).tiny), term.metrics


def token_loss(
    spec: LossSpec,
    params: Any,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    extra: dict[str, Tensor],
    finite: bool = True,
) -> TokenLoss:
    """The loss before it is averaged; checks and cleans the inputs, and checks the result.

    ``finite=False`` leaves out the check that must wait for the device.
    """
    inputs = clean_inputs(spec, log_prob, old_log_prob, advantages, response_mask, extra)
    weight = _weight(spec, params, inputs)
    if weight is not None:
        share = inputs.extra[WEIGHT_SHARE] if WEIGHT_SHARE in inputs.extra else _share(inputs.mask, weight)
        inputs = replace(inputs, weight=weight * share)
    term = spec.fn(inputs, params)
    check_term(spec, inputs, term)
    if scales_gradient(params) and term.bias is None:
        raise ValueError(
            f"loss {spec.name!r}: expected TokenLoss.bias, because its parameters scale the gradient by it"
        )
    if finite:
        check_finite(spec, inputs, term)
    return term


def weight_share(
    spec: LossSpec,
    params: Any,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    extra: dict[str, Tensor],
) -> Tensor | None:
    """The value of :data:`WEIGHT_SHARE` for each row of this batch (a scalar); None when the loss has no weights."""
    inputs = clean_inputs(spec, old_log_prob, old_log_prob, advantages, response_mask, extra)
    weight = _weight(spec, params, inputs)
    return None if weight is None else _share(inputs.mask, weight)


def weighs(spec: LossSpec, params: Any) -> bool:
    """Whether the loss has weights of its own with these params, found by calling it on two tokens."""
    if spec.weight is None:
        return False
    two = torch.zeros(1, 2)
    return weight_share(spec, params, two, two, two == 0, {key: torch.zeros(1) for key in spec.inputs}) is not None


def _weight(spec: LossSpec, params: Any, inputs: LossInputs) -> Tensor | None:
    weight = spec.weight(inputs, params) if spec.weight else None
    if weight is None:
        return None
    check_shape(spec, inputs, "weights", weight)
    return weight.to(inputs.weight.dtype)


def _share(mask: Tensor, weight: Tensor) -> Tensor:
    total = weight.sum(dtype=torch.float64)
    return torch.where(total > 0, mask.sum() / total, 0.0)
