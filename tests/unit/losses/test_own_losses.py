"""Losses of a user's own, and the parameters of all."""

import dataclasses
import math
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from intervals import around

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses import TokenLoss, losses, policy_loss, register_loss, registry


# --- A loss of one's own: what it may return, what it is registered with, and what it is called with ------------------
@dataclass(frozen=True)
class Plain:
    scale: float = 1.0


@dataclass(frozen=True)
class Scaled:
    scale: float = 1.0

    def gradient_scale(self, norm):
        return 1.0


@contextmanager
def registered(fn, params=Plain, **more):
    try:
        register_loss("mine", params=params, **more)(fn)
        yield
    finally:
        registry._LOSSES.pop("mine", None)


def two_rows(**fixed):
    """Of 3 and 1 tokens: the mean over tokens of the two row means is not the mean over all tokens."""
    log_prob = torch.tensor([[-0.4, -0.4, -0.4], [-1.2, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    return {
        "log_prob": log_prob,
        "old_log_prob": log_prob.detach(),
        "advantages": torch.ones(2, 3),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        **fixed,
    }


@pytest.mark.parametrize(
    ("fn", "params", "message"),
    [
        (
            lambda i, p: TokenLoss((-i.log_prob).sum() / 4),
            Plain,
            r"TokenLoss.loss of shape \(2, 3\), .*, got shape \(\)",
        ),
        (lambda i, p: TokenLoss(-i.log_prob.mean(1, keepdim=True)), Plain, r".* got shape \(2, 1\)"),
        (lambda i, p: TokenLoss(-i.log_prob[0]), Plain, r".* got shape \(3,\)"),
        (lambda i, p: TokenLoss(0.5), Plain, ".* got float"),
        (lambda i, p: TokenLoss(-i.log_prob.detach()), Plain, "TokenLoss.loss with a gradient, got a constant"),
        (
            lambda i, p: TokenLoss(-(i.log_prob - 1e-9 * i.mask).log()),
            Plain,
            ".* finite numbers, off the mask too.* got 6 not",
        ),
        (lambda i, p: TokenLoss(-i.log_prob / i.mask), Plain, r".* got 2 not finite in shape \(2, 3\)"),
        (lambda i, p: -i.log_prob, Plain, "it to return a TokenLoss, got Tensor"),
        (lambda i, p: None, Plain, "it to return a TokenLoss, got NoneType"),
        (
            lambda i, p: TokenLoss(-i.log_prob, bias=i.log_prob.sum()),
            Plain,
            r"TokenLoss.bias of shape .* got shape \(\)",
        ),
        (lambda i, p: TokenLoss(-i.log_prob, ratio=i.log_prob[0]), Plain, r"TokenLoss.ratio of .* got shape \(3,\)"),
        (lambda i, p: TokenLoss(-i.log_prob, clipped=0.5), Plain, "TokenLoss.clipped of .* got float"),
        (lambda i, p: TokenLoss(-i.log_prob), Scaled, "TokenLoss.bias, because its parameters scale the gradient"),
    ],
)
def test_what_a_loss_returns_is_checked(fn, params, message):
    with registered(fn, params), pytest.raises(ValueError, match=rf"^loss 'mine': expected {message}"):
        policy_loss("mine", **two_rows())


def test_what_a_loss_may_return():
    """Nothing without a gradient to ask for; nothing to see on a batch without tokens; no blame for broken inputs."""
    with registered(lambda i, p: TokenLoss(-i.log_prob)):
        assert policy_loss("mine", **two_rows())[0].item() == pytest.approx(0.6)
        broken = torch.full((2, 3), math.nan, dtype=torch.float64, requires_grad=True)
        assert math.isnan(policy_loss("mine", **two_rows(log_prob=broken))[0].item())
    with registered(lambda i, p: TokenLoss(-i.log_prob.detach())):
        assert policy_loss("mine", **two_rows(log_prob=torch.zeros(2, 3)))[0].item() == 0
        assert policy_loss("mine", **two_rows(response_mask=torch.zeros(2, 3)))[0].item() == 0


def test_weights_are_one_per_token():
    """A weight per row would be spread over the tokens, and its share be wrong."""
    with (
        registered(lambda i, p: TokenLoss(-i.weight * i.log_prob), weight=lambda i, p: i.mask.sum(1)),
        pytest.raises(ValueError, match=r"loss 'mine': expected weights of shape \(2, 3\), .* got shape \(2,\)"),
    ):
        policy_loss("mine", **two_rows())


def test_wrong_registrations():
    for wrong in (("prior",), "prior", ["prior"]):
        with (
            pytest.raises(ValueError, match=r"loss 'mine': expected needs to be a dict, .*\{\"prior\": .*got .*prior"),
            registered(print, needs=wrong),
        ):
            pass
    with (
        pytest.raises(ValueError, match=r"accepts to be a tuple of names such as \('turn',\), got a str"),
        registered(print, accepts="turn"),
    ):
        pass
    melting = make_dataclass("Melting", [("scale", float, 1.0)])
    for params in (melting, Plain(), dict):
        with (
            pytest.raises(
                ValueError, match=r"loss 'mine': expected params to be a class with @dataclass\(frozen=True\)"
            ),
            registered(print, params),
        ):
            pass
    with (
        pytest.raises(ValueError, match=r"'mine': expected a function of \(inputs, params\), got one of \(inputs\)"),
        registered(lambda inputs: inputs),
    ):
        pass
    with (
        registered(print),
        pytest.raises(ValueError, match=r"'mine' is already registered by"),
    ):
        register_loss("mine", params=Plain)


@pytest.mark.parametrize("key", ["log_prob", "old_log_prob", "advantages", "response_mask", "staleness"])
@pytest.mark.parametrize("wrong", [np.ones((2, 3)), [[1.0] * 3] * 2, None])
def test_inputs_are_tensors(key, wrong):
    batch = two_rows(staleness=torch.zeros(2)) | {key: wrong}
    with pytest.raises(TypeError, match=f"a3po: expected {key} to be a torch tensor, got {type(wrong).__name__}"):
        policy_loss("a3po", **batch)


# --- The parameters of the losses: what each takes at its bounds, what it refuses, and what it is if nobody sets it.


BOUNDS = yaml.safe_load((Path(__file__).parents[2] / "data" / "ranges.yaml").read_text(encoding="utf-8"))["losses"]

#: Of the authors' papers and code, as each loss's docstring has it; those of clip_low and clip_high are 0.2.
DEFAULTS = {
    "a3po": {"weight_cap": 5.0, "current_version": "before_update"},
    "dgpo": {"n": 1.0, "m": 2.0},
    "hdpo": {"accuracy_w": 1.0, "tool_w": 0.15, "dual_clip": 3.0},
    "psft": {"clip_high": 0.28},
    "rebel": {"eta": 1.0},
    "sdar": {"coefficient": 0.01, "beta": 5.0, "pg_weight": 1.0, "dual_clip": 3.0},
    "sdpo_sampled": {"weight": 1.0, "is_clip": 2.0, "rows": "with_text", "dual_clip": 3.0},
    "skill_sd": {"lam": 0.001, "dual_clip": 3.0},
    "segment_mask": {"threshold": 0.9, "drop_zeros": False},
    "s_ppo": {"divide": "above_one"},
    "st_ppo": {"divide": "above_one"},
    "turn_ratio": {"ratio": "geometric", "aggregate": "tokens", "gradient": "turn", "dual_clip": None},
}
CASES = [(name, field.name) for name in DEFAULTS for field in dataclasses.fields(losses()[name].params)]


@pytest.mark.parametrize(("name", "key"), [case for case in CASES if case[1] in BOUNDS])
def test_a_number_reaches_its_bounds_and_no_further(name, key):
    inside, outside = around(BOUNDS[key])
    for value in inside:
        assert getattr(losses()[name].params(**{key: value}), key) == value
    for value in outside:
        with pytest.raises(ConfigError, match=f"{key}: expected .*, got {value!r}"):
            losses()[name].params(**{key: value})


@pytest.mark.parametrize(("name", "key"), CASES)
def test_the_default_is_the_one_on_record(name, key):
    usual = {"clip_low": 0.2, "clip_high": 0.2}
    assert getattr(losses()[name].params(), key) == {**usual, **DEFAULTS[name]}[key]
