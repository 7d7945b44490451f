"""Every policy loss: reference values, gradients, and inputs that no loss may choke on."""

import json
import math
from pathlib import Path

import pytest
import torch

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses import losses, policy_loss
from verl_turnkey.losses.turns import turn_ids

ORACLE = Path(__file__).parents[2] / "data" / "oracle"
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
#: Losses whose gradient is by design not that of their value: it is compared with the formula instead.
STOPPED = {"dgpo", "a3po", "turn_ratio/token"}
VARIANTS = {
    **{name: (name, {}) for name in losses()},
    "turn_ratio/product": ("turn_ratio", {"ratio": "product"}),
    "turn_ratio/turns": ("turn_ratio", {"aggregate": "turns", "dual_clip": 3.0}),
    "turn_ratio/token": ("turn_ratio", {"gradient": "token"}),
}


def cases(name):
    return [pytest.param(c, id=c["id"]) for c in json.loads((ORACLE / f"{name}.json").read_text())["cases"]]


def inputs(seed=0, spread=0.3, dtype=torch.float64, mask=MASK):
    """A batch of random numbers, and everything that some loss needs besides."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    old = -normal(*mask.shape).abs()
    return {
        "log_prob": old + spread * normal(*mask.shape),
        "old_log_prob": old,
        "advantages": normal(*mask.shape),
        "response_mask": mask,
        "staleness": torch.tensor([1.0, 2.0, 8.0, 0.0])[: len(mask)],
        "tool_advantages": normal(*mask.shape) * torch.tensor([[1.0], [0.0], [1.0], [1.0]])[: len(mask)],
        "rewards": normal(len(mask)),
        "group_log_ratio": normal(len(mask)),
        "group_reward": normal(len(mask)),
    }


def compute(variant, given, **params):
    name, fixed = VARIANTS[variant]
    usual = ("log_prob", "old_log_prob", "advantages", "response_mask", *losses()[name].needs)
    return policy_loss(name, **{key: given[key] for key in usual}, **fixed, **params)


def gradient(variant, given, **params):
    log_prob = given["log_prob"].clone().requires_grad_()
    loss, _ = compute(variant, {**given, "log_prob": log_prob}, **params)
    return torch.autograd.grad(loss, log_prob)[0]


@pytest.mark.parametrize("case", cases("turn_ratio_reconstructed"))
def test_turn_ratio_equals_the_reference(case):
    given = {key: torch.tensor(value, dtype=torch.float64) for key, value in case["inputs"].items()}
    expected = case["expected"]
    assert turn_ids(given["response_mask"]).tolist() == expected["turn_ids"]
    clip = {"clip_low": case["params"]["clip_eps"], "clip_high": case["params"]["clip_eps"]}
    loss, metrics = policy_loss("turn_ratio", **given, **clip)
    assert -loss.item() == pytest.approx(expected["objective_geometric_token_mean"], abs=1e-12)
    assert metrics["pg_clipfrac"] == pytest.approx(expected["clipfrac_geometric"], abs=1e-6)
    loss, _ = policy_loss("turn_ratio", **given, **clip, ratio="product", aggregate="turns")
    assert -loss.item() == pytest.approx(expected["objective_product_turn_mean"], abs=1e-12)


@pytest.mark.parametrize("how", ["turn", "token"])
@pytest.mark.parametrize("case", cases("verl_builtin_gspo_rloo"))
def test_one_turn_per_row_is_verls_gspo(case, how):
    names = ("log_prob", "old_log_prob", "advantages", "response_mask")
    given = {name: torch.tensor(case["inputs"][name]) for name in names}
    given["log_prob"].requires_grad_()
    clip = {"clip_low": case["params"]["clip"], "clip_high": case["params"]["clip"]}
    loss, _ = policy_loss("turn_ratio", **given, **clip, gradient=how)
    expected = case["expected"]["gspo_token-mean"]
    assert loss.item() == pytest.approx(expected["loss"], abs=2e-6)
    torch.testing.assert_close(
        torch.autograd.grad(loss, given["log_prob"])[0], torch.tensor(expected["grad_log_prob"]), atol=2e-6, rtol=0
    )


def test_the_two_gradients_are_equal_for_an_advantage_per_turn():
    given = inputs()
    given["advantages"] = turn_ids(MASK).double() * 0.7 - 0.4
    for ratio in ("geometric", "product"):
        for aggregate in ("tokens", "turns"):
            options = {"ratio": ratio, "aggregate": aggregate}
            by_turn, by_token = (gradient("turn_ratio", given, gradient=how, **options) for how in ("turn", "token"))
            torch.testing.assert_close(by_turn, by_token)
            assert by_turn.abs().sum() > 0


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - STOPPED))
@pytest.mark.parametrize("seed", range(3))
def test_gradient_by_finite_differences(variant, seed):
    given = inputs(seed)
    found = gradient(variant, given)
    for place in MASK.nonzero().tolist():
        values = []
        for step in (1e-6, -1e-6):
            moved = given["log_prob"].clone()
            moved[tuple(place)] += step
            values.append(compute(variant, {**given, "log_prob": moved})[0].item())
        assert found[tuple(place)].item() == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-6), place


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_nothing_off_the_mask_touches_loss_or_gradient(variant):
    given = inputs()
    dirty = {**given, **{k: given[k].clone() for k in ("log_prob", "old_log_prob", "advantages")}}
    for key in ("log_prob", "old_log_prob", "advantages"):
        dirty[key][MASK == 0] = math.nan
    assert compute(variant, dirty)[0].item() == compute(variant, given)[0].item()
    found = gradient(variant, dirty)
    assert (found[MASK == 0] == 0).all()
    assert (found[MASK == 1] != 0).any()


@pytest.mark.parametrize(
    "variant", sorted(set(VARIANTS) - {"rebel", "psft", "hdpo", "turn_ratio/turns", "segment_mask"})
)
def test_at_ratio_one_it_is_the_policy_gradient(variant):
    given = inputs(spread=0.0)
    if variant.startswith(("turn_ratio", "st_ppo")):  # one advantage per turn
        given["advantages"] = turn_ids(MASK).double() * 0.7 - 0.4
    tokens_of_turn = torch.tensor([[2, 2, 0, 1, 0], [0, 3, 3, 3, 0], [1, 0, 1, 0, 1], [0] * 5])
    slope = tokens_of_turn if variant == "turn_ratio/product" else 1
    expected = -given["advantages"] * MASK * slope / MASK.sum()
    torch.testing.assert_close(gradient(variant, given), expected)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("gap", [50.0, -50.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extreme_ratios_stay_finite(variant, gap, dtype):
    given = inputs(dtype=dtype)
    given["log_prob"] = given["old_log_prob"] + gap
    loss, metrics = compute(variant, given)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient(variant, given)).all()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_batch_without_tokens_gives_nothing(variant):
    given = inputs(mask=torch.zeros(4, 5))
    assert compute(variant, given)[0].item() == 0
    assert not gradient(variant, given).any()


def one_token(log_ratio, advantage):
    return {
        "log_prob": torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True),
        "old_log_prob": torch.zeros(1, 1),
        "advantages": torch.tensor([[advantage]]),
        "response_mask": torch.ones(1, 1),
    }


def weight_of(name, log_ratio, advantage, **params):
    """Factor of -A grad log pi."""
    given = one_token(log_ratio, advantage)
    loss, _ = policy_loss(name, **given, **params)
    return (torch.autograd.grad(loss, given["log_prob"])[0] / -advantage).item()


def test_dgpo_keeps_a_decaying_gradient():
    assert weight_of("dgpo", math.log(0.4), -1.0) == pytest.approx(0.2)
    assert weight_of("dgpo", math.log(2.0), 1.0) == pytest.approx(1.5492, abs=1e-4)
    assert weight_of("dgpo", math.log(2.0), -1.0) == pytest.approx(2.0)  # the right direction is never touched
    assert weight_of("dgpo", math.log(0.4), -1.0, n=2.0) == pytest.approx(0.4**3 / 0.8**2)


@pytest.mark.parametrize(("edge", "advantage"), [(0.8, -1.0), (1.2, 1.0)])
def test_dgpo_is_continuous_at_its_edges(edge, advantage):
    below, above = math.log(edge) - 1e-9, math.log(edge) + 1e-9
    assert weight_of("dgpo", below, advantage) == pytest.approx(weight_of("dgpo", above, advantage), rel=1e-6)
    values = [policy_loss("dgpo", **one_token(log_ratio, advantage))[0].item() for log_ratio in (below, above)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize(("staleness", "a"), [(0, 0.0), (1, 0.0), (2, 0.5), (8, 0.875)])
def test_a3po_interpolates_by_staleness(staleness, a):
    log_ratio = 0.1
    given = one_token(log_ratio, 1.0)
    loss, _ = policy_loss("a3po", **given, staleness=torch.tensor([staleness]))
    assert loss.item() == pytest.approx(-math.exp(a * log_ratio) * math.exp((1 - a) * log_ratio))
    _, metrics = policy_loss("a3po", **one_token(1.0, 1.0), staleness=torch.tensor([staleness]))
    assert metrics["ratio/max"] == pytest.approx(math.exp(1 - a))
    assert metrics["pg_clipfrac"] == float(math.exp(1 - a) > 1.2)


def test_hdpo_averages_its_second_term_over_rows_with_a_signal():
    given = inputs(spread=0.0)
    given["advantages"] = torch.zeros(4, 5)
    given["tool_advantages"] = torch.ones(4, 5) * torch.tensor([[2.0], [0.0], [0.0], [0.0]])
    assert compute("hdpo", given)[0].item() == pytest.approx(-0.15 * 2.0)


def test_rebel_is_the_mean_over_pairs_of_a_group():
    mask = torch.ones(3, 2)
    given = inputs(mask=mask)
    log_ratio = (given["log_prob"] - given["old_log_prob"]).sum(1)
    given["group_log_ratio"] = log_ratio.mean().expand(3)
    given["group_reward"] = given["rewards"].mean().expand(3)
    gaps = log_ratio - 0.5 * given["rewards"]
    pairs = (gaps[:, None] - gaps[None, :]) ** 2
    assert compute("rebel", given, eta=0.5)[0].item() == pytest.approx(pairs.mean().item())


def test_segment_mask_leaves_sure_tokens_out():
    given = inputs(spread=0.0)
    given["old_log_prob"] = torch.where(MASK.cumsum(1) == 1, math.log(0.95), math.log(0.5)).double()
    given["log_prob"] = given["old_log_prob"].clone()
    found = gradient("segment_mask", given)
    sure = (MASK == 1) & (given["old_log_prob"] > math.log(0.9))
    assert (found[sure] == 0).all()
    trained = (MASK == 1) & ~sure
    torch.testing.assert_close(found[trained], -given["advantages"][trained] / trained.sum())


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    given = one_token(3.0, -1.0)
    assert policy_loss("turn_ratio", **given)[0].item() == pytest.approx(math.exp(3.0))
    assert policy_loss("turn_ratio", **given, dual_clip=3.0)[0].item() == pytest.approx(3.0)


def test_errors_name_what_to_change():
    given = inputs()
    usual = {key: given[key] for key in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    with pytest.raises(ConfigError, match=r"unknown loss 'turn_ration'; did you mean 'turn_ratio'"):
        policy_loss("turn_ration", **usual)
    with pytest.raises(ConfigError, match=r"turn_ratio.clip_lo: unknown key; did you mean 'clip_low'"):
        policy_loss("turn_ratio", **usual, clip_lo=0.1)
    with pytest.raises(ConfigError, match=r"clip_low: expected a number in \[0, 1\), got 1.5"):
        policy_loss("turn_ratio", **usual, clip_low=1.5)
    with pytest.raises(ConfigError, match=r"needs 'staleness'.*asynchronous trainers"):
        policy_loss("a3po", **usual)
    with pytest.raises(ValueError, match=r"expected advantages of shape \(4, 5\)"):
        policy_loss("turn_ratio", **{**usual, "advantages": torch.zeros(4, 4)})
