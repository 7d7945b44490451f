"""Every policy loss: reference values, gradients, and inputs that no loss may choke on."""

import json
import math
from pathlib import Path

import pytest
import torch

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses import losses, policy_loss
from verl_turnkey.losses.registry import clean_inputs, token_loss, weight_share
from verl_turnkey.losses.turns import turn_ids

ORACLE = Path(__file__).parents[2] / "data" / "oracle"
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
TURN_CONSTANT = turn_ids(MASK).double() * 0.7 - 0.4
#: Losses whose gradient is by design not that of their value, and inputs for which it is nevertheless.
STOPPED = {
    "dgpo": {"spread": 0.05},
    "a3po": {"staleness": torch.ones(4)},
    "sdar": {"has_teacher": torch.zeros(4)},  # its own gradients: test_teacher_losses.py
    "sdpo_sampled": {"has_teacher": torch.zeros(4)},
    "sdpo_sampled/half": {"has_teacher": torch.zeros(4)},
    "turn_ratio/token": {"advantages": TURN_CONSTANT},
}
VARIANTS = {
    **{name: (name, {}) for name in losses()},
    "turn_ratio/product": ("turn_ratio", {"ratio": "product"}),
    "turn_ratio/turns": ("turn_ratio", {"aggregate": "turns", "dual_clip": 3.0}),
    "turn_ratio/token": ("turn_ratio", {"gradient": "token"}),
    "sdar/ungated": ("sdar", {"beta": 0.0, "coefficient": 0.5}),
    "sdpo_sampled/half": ("sdpo_sampled", {"weight": 0.5}),
    "segment_mask/half": ("segment_mask", {"threshold": 0.5}),
    "segment_mask/zeros": ("segment_mask", {"threshold": 1.0, "drop_zeros": True}),
}

OWN_WEIGHTS = {"segment_mask/half", "hdpo", "sdpo_sampled", "turn_ratio/turns"}
OTHER_GRADIENT = {"rebel", "psft", "hdpo", "turn_ratio/turns", "segment_mask", "segment_mask/half"}
"""that at ratio one is not the policy gradient alone"""
OF_TEACHER = {variant for variant, (name, _) in VARIANTS.items() if name in ("sdar", "sdpo_sampled", "skill_sd")}


def cases(name):
    return [pytest.param(c, id=c["id"]) for c in json.loads((ORACLE / f"{name}.json").read_text())["cases"]]


def inputs(seed=0, spread=0.3, dtype=torch.float64, mask=MASK, **fixed):
    """A batch of random numbers, and everything that some loss needs besides; ``fixed`` replaces some."""
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
        "teacher_log_prob": old + normal(*mask.shape),
        "has_teacher": torch.tensor([1.0, 0.0, 1.0, 1.0])[: len(mask)],
        **fixed,
    }


def compute(variant, tensors, **params):
    name, fixed = VARIANTS[variant]
    usual = ("log_prob", "old_log_prob", "advantages", "response_mask", *losses()[name].inputs)
    return policy_loss(name, **{key: tensors[key] for key in usual if key in tensors}, **fixed, **params)


def gradient(variant, tensors, **params):
    log_prob = tensors["log_prob"].clone().requires_grad_()
    loss, _ = compute(variant, {**tensors, "log_prob": log_prob}, **params)
    return torch.autograd.grad(loss, log_prob)[0]


@pytest.mark.parametrize("case", cases("turn_ratio_reconstructed"))
def test_turn_ratio_equals_the_reference(case):
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in case["inputs"].items()}
    expected = case["expected"]
    assert turn_ids(tensors["response_mask"]).tolist() == expected["turn_ids"]
    clip = {"clip_low": case["params"]["clip_eps"], "clip_high": case["params"]["clip_eps"]}
    loss, metrics = policy_loss("turn_ratio", **tensors, **clip)
    assert -loss.item() == pytest.approx(expected["objective_geometric_token_mean"], abs=1e-12)
    assert metrics["pg_clipfrac"] == pytest.approx(expected["clipfrac_geometric"], abs=1e-6)
    loss, _ = policy_loss("turn_ratio", **tensors, **clip, ratio="product", aggregate="turns")
    assert -loss.item() == pytest.approx(expected["objective_product_turn_mean"], abs=1e-12)


@pytest.mark.parametrize("how", ["turn", "token"])
@pytest.mark.parametrize("case", cases("verl_builtin_gspo_rloo"))
def test_one_turn_per_row_is_verls_gspo(case, how):
    names = ("log_prob", "old_log_prob", "advantages", "response_mask")
    tensors = {name: torch.tensor(case["inputs"][name]) for name in names}
    tensors["log_prob"].requires_grad_()
    clip = {"clip_low": case["params"]["clip"], "clip_high": case["params"]["clip"]}
    loss, _ = policy_loss("turn_ratio", **tensors, **clip, gradient=how)
    expected = case["expected"]["gspo_token-mean"]
    assert loss.item() == pytest.approx(expected["loss"], abs=2e-6)
    torch.testing.assert_close(
        torch.autograd.grad(loss, tensors["log_prob"])[0], torch.tensor(expected["grad_log_prob"]), atol=2e-6, rtol=0
    )


def test_the_two_gradients_are_equal_for_an_advantage_per_turn():
    tensors = inputs(advantages=TURN_CONSTANT)
    for ratio in ("geometric", "product"):
        for aggregate in ("tokens", "turns"):
            options = {"ratio": ratio, "aggregate": aggregate}
            by_turn, by_token = (gradient("turn_ratio", tensors, gradient=how, **options) for how in ("turn", "token"))
            torch.testing.assert_close(by_turn, by_token)
            assert by_turn.abs().sum() > 0


def test_with_the_gradient_of_tokens_each_moves_by_its_own_advantage():
    """Mixed advantages in one turn: -w_k A_t / N, where the other gradient has the turn's mean advantage."""
    mask = torch.ones(1, 3)
    log_ratio = torch.tensor([[0.1, -0.1, 0.06]], dtype=torch.float64)
    tensors = inputs(mask=mask, advantages=torch.tensor([[1.0, -2.0, 0.5]]), old_log_prob=-torch.ones_like(log_ratio))
    tensors["log_prob"] = tensors["old_log_prob"] + log_ratio
    expected = -math.exp(0.02) * tensors["advantages"] / 3
    torch.testing.assert_close(gradient("turn_ratio/token", tensors), expected.double())
    torch.testing.assert_close(gradient("turn_ratio", tensors), expected.double().mean().expand(1, 3))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("seed", range(3))
def test_gradient_by_finite_differences(variant, seed):
    tensors = inputs(seed, **STOPPED.get(variant, {}))
    slope = gradient(variant, tensors)
    for place in MASK.nonzero().tolist():
        values = []
        for step in (1e-6, -1e-6):
            moved = tensors["log_prob"].clone()
            moved[tuple(place)] += step
            values.append(compute(variant, {**tensors, "log_prob": moved})[0].item())
        assert slope[tuple(place)].item() == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-6), place


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_nothing_off_the_mask_touches_loss_or_gradient(variant):
    tensors = inputs(staleness=torch.tensor([[1.0], [2.0], [8.0], [0.0]]).repeat(1, 5), turn=turn_ids(MASK).float())
    dirty = {key: value.clone() for key, value in tensors.items()}
    for key in set(tensors) - {"response_mask"}:
        dirty[key][MASK == 0 if dirty[key].dim() == 2 else ~MASK.any(1)] = math.nan
    assert compute(variant, dirty)[0].item() == compute(variant, tensors)[0].item()
    slope = gradient(variant, dirty)
    assert (slope[MASK == 0] == 0).all()
    assert (slope[MASK == 1] != 0).any()


@pytest.mark.parametrize(
    "variant",
    sorted(set(VARIANTS) - OTHER_GRADIENT - OF_TEACHER),
)
def test_at_ratio_one_it_is_the_policy_gradient(variant):
    tensors = inputs(spread=0.0)
    if variant.startswith(("turn_ratio", "st_ppo")):  # one advantage per turn
        tensors["advantages"] = TURN_CONSTANT
    tokens_of_turn = torch.tensor([[2, 2, 0, 1, 0], [0, 3, 3, 3, 0], [1, 0, 1, 0, 1], [0] * 5])
    slope = tokens_of_turn if variant == "turn_ratio/product" else 1
    expected = -tensors["advantages"] * MASK * slope / MASK.sum()
    torch.testing.assert_close(gradient(variant, tensors), expected)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("gap", [50.0, -50.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extreme_ratios_stay_finite(variant, gap, dtype):
    tensors = inputs(dtype=dtype)
    tensors["log_prob"] = tensors["old_log_prob"] + gap
    loss, metrics = compute(variant, tensors)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient(variant, tensors)).all()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_batch_without_tokens_gives_nothing(variant):
    tensors = inputs(mask=torch.zeros(4, 5))
    loss, metrics = compute(variant, tensors)
    assert loss.item() == 0
    assert metrics.get("regression_error", 0.0) == 0
    assert not gradient(variant, tensors).any()


def one_token(log_ratio, advantage):
    return {
        "log_prob": torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True),
        "old_log_prob": torch.zeros(1, 1),
        "advantages": torch.tensor([[advantage]]),
        "response_mask": torch.ones(1, 1),
    }


def weight_of(name, log_ratio, advantage, **params):
    """Factor of -A grad log pi."""
    tensors = one_token(log_ratio, advantage)
    loss, _ = policy_loss(name, **tensors, **params)
    return (torch.autograd.grad(loss, tensors["log_prob"])[0] / -advantage).item()


def test_dgpo_keeps_a_decaying_gradient():
    assert weight_of("dgpo", math.log(0.4), -1.0) == pytest.approx(0.2)
    assert weight_of("dgpo", math.log(2.0), 1.0) == pytest.approx(1.5492, abs=1e-4)
    assert weight_of("dgpo", math.log(2.0), -1.0) == pytest.approx(2.0)  # the right direction is never touched
    assert weight_of("dgpo", math.log(0.4), -1.0, n=2.0) == pytest.approx(0.4**3 / 0.8**2)


def test_dgpo_is_finite_where_the_other_branch_would_overflow():
    """n = 5: above the range, what a bad token below it would get is e^(6 * 15)."""
    tensors = {
        "log_prob": torch.tensor([[15.0, 0.0]], requires_grad=True),
        "old_log_prob": torch.zeros(1, 2),
        "advantages": torch.tensor([[-1.0, 1.0]]),
        "response_mask": torch.ones(1, 2),
    }
    loss, _ = policy_loss("dgpo", **tensors, n=5.0)
    (slope,) = torch.autograd.grad(loss, tensors["log_prob"])
    torch.testing.assert_close(slope, torch.tensor([[math.exp(15.0) / 2, -0.5]]))


@pytest.mark.parametrize(
    ("version", "staleness", "a"),
    [
        *(("before_update", staleness, a) for staleness, a in ((0, 0.0), (1, 0.0), (2, 0.5), (8, 0.875))),
        *(("after_update", staleness, a) for staleness, a in ((0, 0.0), (1, 0.5), (2, 2 / 3), (7, 0.875))),
    ],
)
def test_a3po_interpolates_by_staleness(version, staleness, a):
    """k versions behind: (k - 1) / k in AReaL's code, k / (k + 1) with the version that the update makes."""
    log_ratio, fixed = 0.1, {"staleness": torch.tensor([staleness]), "current_version": version}
    loss, _ = policy_loss("a3po", **one_token(log_ratio, 1.0), **fixed)
    assert loss.item() == pytest.approx(-math.exp(a * log_ratio) * math.exp((1 - a) * log_ratio))
    _, metrics = policy_loss("a3po", **one_token(1.0, 1.0), **fixed)
    assert metrics["ratio/max"] == pytest.approx(math.exp(1 - a))
    assert metrics["pg_clipfrac"] == float(math.exp(1 - a) > 1.2)


def test_a3po_takes_the_staleness_of_turns_and_of_rows():
    """A row of two turns, of weights 8 and 2 versions old, is what two rows with a turn each are."""
    turns = torch.tensor([[1, 0, 1, 1]])
    tensors = {
        "log_prob": torch.tensor([[0.4, 9.0, -0.3, 0.2]], requires_grad=True),
        "old_log_prob": torch.zeros(1, 4),
        "advantages": torch.tensor([[1.0, 9.0, -1.0, 2.0]]),
        "response_mask": turns,
    }
    whole, _ = policy_loss("a3po", **tensors, staleness=torch.tensor([[8.0, 5.0, 2.0, 2.0]]))
    rows = {name: tensor.repeat(2, 1) for name, tensor in tensors.items()}
    rows["response_mask"] = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 1]])
    apart, _ = policy_loss("a3po", **rows, staleness=torch.tensor([8.0, 2.0]))
    assert whole.item() == pytest.approx(apart.item())
    slope, expected = (torch.autograd.grad(loss, tensors["log_prob"])[0] for loss in (whole, apart))
    torch.testing.assert_close(slope, expected)
    assert whole.item() != pytest.approx(policy_loss("a3po", **tensors, staleness=torch.tensor([2.0]))[0].item())


def test_a3po_rejects_tokens_whose_weight_is_too_large():
    """pi_prox / pi_rollout is e^2 and e^1.5: the first has neither loss nor gradient, and still counts in the mean."""
    log_ratio = torch.tensor([[4.0, 3.0, 9.0]], dtype=torch.float64, requires_grad=True)
    tensors = {
        "log_prob": log_ratio,
        "old_log_prob": torch.zeros(1, 3),
        "advantages": -torch.ones(1, 3),
        "response_mask": torch.tensor([[1, 1, 0]]),
        "staleness": torch.tensor([2]),
    }
    loss, metrics = policy_loss("a3po", **tensors)
    assert loss.item() == pytest.approx(math.exp(3.0) / 2)
    assert metrics["share_of_tokens_over_cap"] == 0.5
    assert torch.autograd.grad(loss, log_ratio)[0][0].tolist() == pytest.approx([0.0, math.exp(3.0) / 2, 0.0])
    loss, metrics = policy_loss("a3po", **tensors, weight_cap=None)
    assert loss.item() == pytest.approx((math.exp(4.0) + math.exp(3.0)) / 2)
    assert metrics["share_of_tokens_over_cap"] == 0.0
    assert policy_loss("a3po", **tensors, weight_cap=4.0)[0].item() == 0.0
    # Not pi / pi_prox, which staler rows leave behind: here e^1 and e^0.7, with weights e^2 and e^1.4.
    staler = {**tensors, "log_prob": torch.tensor([[3.0, 2.1, 9.0]]), "staleness": torch.tensor([3])}
    assert policy_loss("a3po", **staler)[0].item() == pytest.approx(math.exp(2.1) / 2)
    with pytest.raises(ConfigError, match=r"weight_cap: expected null or a finite number > 1, got 1\.0"):
        policy_loss("a3po", **tensors, weight_cap=1.0)


@pytest.mark.parametrize(("log_ratio", "advantage"), [(1.0, 1.0), (-1.0, -1.0)])
def test_a3po_holds_the_proximal_policy_fixed(log_ratio, advantage):
    """A clipped token has no gradient, not even through the weight pi_prox / pi_beh."""
    tensors = one_token(log_ratio, advantage)
    loss, metrics = policy_loss("a3po", **tensors, staleness=torch.tensor([2.0]))
    assert metrics["pg_clipfrac"] == 1
    assert torch.autograd.grad(loss, tensors["log_prob"])[0].item() == 0


@pytest.mark.parametrize("name", ["st_ppo", "s_ppo"])
def test_the_clipping_bias_is_what_the_clip_took_away(name):
    """The unclipped surrogate of the clipped tokens, with its gradient: added to the loss's it is that without clip."""
    ratios = torch.tensor([[1.5, 1.1, 0.5, 0.5]], dtype=torch.float64)
    log_prob = ratios.log().T.clone().requires_grad_()  # a row each
    old, mask = torch.zeros(4, 1, dtype=torch.float64), torch.tensor([[1], [1], [1], [0]])
    advantages = torch.tensor([[2.0], [2.0], [-3.0], [-3.0]], dtype=torch.float64)
    tensors = {"log_prob": log_prob, "old_log_prob": old, "advantages": advantages, "response_mask": mask}
    term = token_loss(losses()[name], losses()[name].params(), **tensors, extra={})
    assert term.bias.flatten().tolist() == pytest.approx([3.0, 0.0, -1.5, 0.0])
    slope = torch.autograd.grad(term.bias.sum() - term.loss.sum(), log_prob)[0]
    assert slope.flatten().tolist() == pytest.approx([3.0, 2.2, -1.5, 0.0])


@pytest.mark.parametrize(
    ("divide", "norm", "scale"),
    [
        *(("above_one", norm, scale) for norm, scale in ((0.0, 1.0), (0.5, 1.0), (4.0, 0.25))),
        *(("always", norm, scale) for norm, scale in ((0.0, 1.0), (0.5, 2.0), (4.0, 0.25))),
    ],
)
def test_st_ppo_divides_by_the_norm(divide, norm, scale):
    for name in ("st_ppo", "s_ppo"):
        assert losses()[name].params(divide=divide).gradient_scale(norm) == scale


@pytest.mark.parametrize("divide", ["above_one", "always"])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_leaves_no_gradient_to_step_with(divide, norm):
    assert math.isnan(losses()["st_ppo"].params(divide=divide).gradient_scale(norm))


@pytest.mark.parametrize(
    ("name", "params"), [("turn_ratio", {}), ("turn_ratio", {"aggregate": "turns"}), ("st_ppo", {})]
)
def test_a_rejected_token_does_not_split_its_turn(name, params):
    """It has no part in the ratio either: the mean is over the tokens that are left."""
    log_ratio = torch.tensor([[0.4, 0.4, 0.0, -0.6, -0.6, 0.0, 0.1]])
    before, after = torch.tensor([[1, 1, 1, 1, 1, 0, 1]]), torch.tensor([[1, 1, 0, 1, 1, 0, 1]])
    tensors = {
        "log_prob": log_ratio,
        "old_log_prob": torch.zeros(1, 7),
        "advantages": torch.ones(1, 7),
        "response_mask": after,
    }
    loss, metrics = policy_loss(name, **tensors, **params, turn=turn_ids(before))
    turns, tokens = [math.exp(-0.1), math.exp(0.1)], [1, 1] if params else [4, 1]
    assert -loss.item() == pytest.approx(sum(w * n for w, n in zip(turns, tokens, strict=True)) / sum(tokens))
    assert metrics["pg_clipfrac"] == 0
    assert metrics["ratio/max"] == pytest.approx(math.exp(0.1))
    assert policy_loss(name, **tensors, **params)[1]["ratio/max"] == pytest.approx(math.exp(0.4))


@pytest.mark.parametrize("name", sorted(OWN_WEIGHTS))
def test_parts_of_a_batch_add_up_with_its_share(name):
    """By default a call divides by its own weights; the share of the whole batch makes its parts add up."""
    tensors = inputs()
    spec, fixed = losses()[VARIANTS[name][0]], VARIANTS[name][1]
    extra = {key: tensors[key] for key in spec.needs}
    columns = {key: tensors[key] for key in ("old_log_prob", "advantages", "response_mask")} | {"extra": extra}
    share = weight_share(spec, spec.params(**fixed), **columns)
    assert share.item() > 1.1
    whole, parts = compute(name, tensors)[0].item(), []
    for rows in (slice(0, 2), slice(2, 4)):
        part = {key: value[rows] for key, value in tensors.items()}
        loss, _ = compute(name, {**part, "weight_share": share.expand(len(part["rewards"]))})
        parts.append(loss.item() * part["response_mask"].sum().item() / MASK.sum().item())
    assert sum(parts) == pytest.approx(whole)


def test_hdpo_averages_its_second_term_over_rows_with_a_signal():
    tensors = inputs(spread=0.0)
    tensors["advantages"] = torch.zeros(4, 5)
    tensors["tool_advantages"] = torch.ones(4, 5) * torch.tensor([[2.0], [0.0], [0.0], [0.0]])
    assert compute("hdpo", tensors)[0].item() == pytest.approx(-0.15 * 2.0)
    # Ratio 5 and A = -1 in both: 1.15 times the bound, where the plain ratio gives 5.75.
    tensors = one_token(math.log(5.0), -1.0) | {"tool_advantages": torch.tensor([[-1.0]])}
    loss, metrics = policy_loss("hdpo", **tensors)
    assert loss.item() == pytest.approx(3.45)
    assert torch.autograd.grad(loss, tensors["log_prob"])[0].item() == 0
    assert metrics["pg_clipfrac_lower"] == 1
    assert policy_loss("hdpo", **tensors, dual_clip=None)[0].item() == pytest.approx(5.75)


def test_rebel_is_the_mean_over_pairs_of_a_group():
    mask = torch.ones(3, 2)
    tensors = inputs(mask=mask)
    log_ratio = (tensors["log_prob"] - tensors["old_log_prob"]).sum(1)
    tensors["group_log_ratio"] = log_ratio.mean().expand(3)
    tensors["group_reward"] = tensors["rewards"].mean().expand(3)
    gaps = log_ratio - 0.5 * tensors["rewards"]
    pairs = (gaps[:, None] - gaps[None, :]) ** 2
    assert compute("rebel", tensors, eta=0.5)[0].item() == pytest.approx(pairs.mean().item())


def test_a_row_of_one_token_counts_as_much_as_a_longer_one():
    mask = torch.zeros(4, 5)
    mask[0, 2] = 1.0
    mask[1:, :3] = 1.0
    tensors = inputs(mask=mask)
    spec = losses()["rebel"]
    usual = {key: tensors[key] for key in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    usual["log_prob"] = usual["log_prob"].requires_grad_()
    term = token_loss(spec, spec.params(), **usual, extra={key: tensors[key] for key in spec.inputs if key in tensors})
    of_row = [row[own.bool()].mean().item() for row, own in zip(term.loss, mask, strict=True)]
    assert compute("rebel", tensors)[0].item() == pytest.approx(sum(of_row) / 4)


def test_rebels_error_is_of_the_rows_that_have_tokens():
    loss, metrics = compute("rebel", inputs())
    assert metrics["regression_error"] == pytest.approx(loss.item() / 2)


def test_segment_mask_leaves_sure_tokens_out():
    tensors = inputs(spread=0.0)
    tensors["old_log_prob"] = torch.where(MASK.cumsum(1) == 1, math.log(0.95), math.log(0.5)).double()
    tensors["log_prob"] = tensors["old_log_prob"].clone()
    slope = gradient("segment_mask", tensors)
    sure = (MASK == 1) & (tensors["old_log_prob"] > math.log(0.9))
    assert (slope[sure] == 0).all()
    trained = (MASK == 1) & ~sure
    torch.testing.assert_close(slope[trained], -tensors["advantages"][trained] / trained.sum())


def test_segment_mask_counts_and_drops_tokens():
    old = torch.tensor([[math.log(0.95), math.log(0.5)]])
    tensors = {"old_log_prob": old, "advantages": torch.ones(1, 2), "response_mask": torch.ones(1, 2)}
    _, metrics = policy_loss("segment_mask", log_prob=old - torch.tensor([[2.0, 0.1]]), **tensors)
    assert metrics["ppo_kl"] == pytest.approx(0.1)
    assert metrics["share_of_tokens_trained"] == 0.5
    # As SPO drops the edges of a tree that change nothing: the mean is over the others.
    tensors = inputs(spread=0.0)
    tensors["advantages"][0] = 0.0
    others = MASK.clone()
    others[0] = 0
    slope = gradient("segment_mask/zeros", tensors)
    torch.testing.assert_close(slope, -tensors["advantages"] * others / others.sum())
    share = compute("segment_mask/zeros", tensors)[1]["share_of_tokens_trained"]
    assert share == pytest.approx(others.sum().item() / MASK.sum().item())


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    tensors = one_token(3.0, -1.0)
    assert policy_loss("turn_ratio", **tensors)[0].item() == pytest.approx(math.exp(3.0))
    loss, metrics = policy_loss("turn_ratio", **tensors, dual_clip=3.0)
    assert loss.item() == pytest.approx(3.0)
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (0, 1)
    assert policy_loss("turn_ratio", **one_token(1.0, -1.0), dual_clip=3.0)[1]["pg_clipfrac_lower"] == 0
    assert policy_loss("turn_ratio", **one_token(3.0, 1.0), dual_clip=3.0)[1]["pg_clipfrac_lower"] == 0


@pytest.mark.parametrize("log_ratio", [-1.0, 0.05, 1.0, 3.0])
def test_dual_clip_leaves_good_tokens_alone(log_ratio):
    """Applied to them it would be a constant -c A, without a gradient."""
    tensors = one_token(log_ratio, 0.5)
    loss, _ = policy_loss("turn_ratio", **tensors, dual_clip=3.0)
    plain, _ = policy_loss("turn_ratio", **tensors)
    assert loss.item() == plain.item() == pytest.approx(-0.5 * min(math.exp(log_ratio), 1.2))
    slope = torch.autograd.grad(loss, tensors["log_prob"])[0].item()
    assert slope == (0.0 if log_ratio > math.log(1.2) else pytest.approx(-0.5 * math.exp(log_ratio)))


@pytest.mark.parametrize("name", sorted(set(losses()) - {"rebel"}))
def test_metrics_of_the_ratio_are_of_the_mask_alone(name):
    """Every token of the model has ratio e^0.1; off the mask log-probabilities are equal, a ratio of 1."""
    old = torch.full(MASK.shape, -1.0, dtype=torch.float64)
    tensors = inputs(log_prob=old + 0.1 * MASK, old_log_prob=old, staleness=torch.zeros(4))
    metrics = compute(name, tensors)[1]
    assert [metrics[f"ratio/{key}"] for key in ("min", "max", "mean")] == pytest.approx([math.exp(0.1)] * 3)
    assert metrics["ppo_kl"] == pytest.approx(-0.1)


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"rebel"}))
def test_a_loss_says_its_ratio_and_what_it_clipped_for_each_token(variant):
    """Their means over the mask are its metrics."""
    name, params = VARIANTS[variant]
    tensors = inputs(spread=0.8)
    spec, params = losses()[name], losses()[name].params(**params)
    extra = {key: tensors[key] for key in spec.inputs if key in tensors}
    usual = {key: tensors[key] for key in ("old_log_prob", "advantages", "response_mask")}
    term = token_loss(spec, params, log_prob=tensors["log_prob"].requires_grad_(), **usual, extra=extra)
    mask = MASK.bool() & (tensors["old_log_prob"].exp() < getattr(params, "threshold", math.inf))
    assert not term.ratio.requires_grad
    assert term.ratio[mask].mean().item() == pytest.approx(term.metrics["ratio/mean"])
    assert term.clipped.dtype == torch.bool
    assert not term.clipped[~mask].any()
    share = term.clipped.sum().item() / mask.sum().item()
    assert 0 < share < 1
    assert share == pytest.approx(term.metrics["pg_clipfrac"])


@pytest.mark.parametrize("name", ["turn_ratio", "s_ppo", "dgpo"])
@pytest.mark.parametrize("log_ratio", [-1.0, 1.0])
def test_a_token_without_advantage_is_never_clipped(name, log_ratio):
    """There is no gradient that the clip could cut off."""
    assert policy_loss(name, **one_token(log_ratio, 0.0))[1]["pg_clipfrac"] == 0
    assert policy_loss("turn_ratio", **one_token(3.0, 0.0), dual_clip=3.0)[1]["pg_clipfrac_lower"] == 0


def test_further_inputs_are_a_rows_or_a_tokens():
    """A number per row means the same for all its tokens; a loss of rows takes nothing else."""
    tensors = inputs()
    for name, key in (("a3po", "staleness"), ("hdpo", "tool_advantages")):
        per_row = torch.tensor([1.0, 2.0, 8.0, 3.0])
        by_row, by_token = (compute(name, {**tensors, key: v})[0] for v in (per_row, per_row[:, None].expand(4, 5)))
        assert by_row.item() == by_token.item()
        with pytest.raises(ValueError, match=rf"{name}: expected {key} of shape \(4, 5\) or \(4,\), got \(4, 1\)"):
            compute(name, {**tensors, key: per_row[:, None]})
    for wrong in (torch.ones(4, 1), torch.ones(4, 5)):
        with pytest.raises(ValueError, match=r"rebel: expected rewards of shape \(4,\), got \(4, [15]\)"):
            compute("rebel", {**tensors, "rewards": wrong})


def test_what_a_row_without_tokens_holds_is_zero():
    """Whatever stands there, which may be nothing that a loss can compute with."""
    tensors = inputs()
    key = "rewards"
    wanted = ("log_prob", "old_log_prob", "advantages", "response_mask")
    extra = {name: tensors[name].clone() for name in losses()["rebel"].inputs}
    extra[key][-1] = math.nan
    cleaned = clean_inputs(losses()["rebel"], *(tensors[name] for name in wanted), extra)
    torch.testing.assert_close(cleaned.extra[key], torch.cat([tensors[key][:-1], torch.zeros(1, dtype=torch.float64)]))


@pytest.mark.parametrize(
    "mask",
    [
        lambda: torch.ones(5),
        lambda: torch.ones(2, 2, 2),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["1-D", "3-D", "jagged"],
)
def test_tensors_are_padded_rows(mask):
    mask = mask()  # not while collecting: the first jagged tensor imports torch's compiler
    usual = dict.fromkeys(("log_prob", "old_log_prob", "advantages"), mask)
    with pytest.raises(ValueError, match=r"turn_ratio: expected response_mask of shape \(B, L\), padded, got"):
        policy_loss("turn_ratio", **usual, response_mask=mask)


def test_errors_name_what_to_change():
    tensors = inputs()
    usual = {key: tensors[key] for key in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    with pytest.raises(ConfigError, match=r"unknown loss 'turn_ration'; did you mean 'turn_ratio'"):
        policy_loss("turn_ration", **usual)
    with pytest.raises(ConfigError, match=r"turn_ratio.clip_lo: unknown key; did you mean 'clip_low'"):
        policy_loss("turn_ratio", **usual, clip_lo=0.1)
    with pytest.raises(ConfigError, match=r"clip_low: expected a number in \[0, 1\), got 1\.0"):
        policy_loss("turn_ratio", **usual, clip_low=1.0)
    with pytest.raises(ConfigError, match=r"needs 'staleness'.*asynchronous trainers"):
        policy_loss("a3po", **usual)
    with pytest.raises(ValueError, match=r"expected advantages of shape \(4, 5\)"):
        policy_loss("turn_ratio", **{**usual, "advantages": torch.zeros(4, 4)})


@pytest.mark.parametrize("name", ["s_ppo", "turn_ratio", "psft", "segment_mask", "hdpo"])
def test_the_clip_reaches_as_far_up_as_clip_high_and_as_far_down_as_clip_low(name):
    ratios = torch.tensor([1.6, 1.4, 0.2, 0.6], dtype=torch.float64)
    good = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    advantages = torch.ones(4) if name == "psft" else good  # psft takes every token for a good one
    clipped = torch.tensor([1.5, 1.4, 0.2, 0.6] if name == "psft" else [1.5, 1.4, 0.7, 0.7])
    mask = torch.eye(4)  # a turn each
    old = torch.full((4, 4), -1.0, dtype=torch.float64)
    loss, metrics = policy_loss(
        name,
        log_prob=old + ratios.log()[:, None],
        old_log_prob=old,
        advantages=good[:, None].expand(4, 4),
        response_mask=mask,
        clip_low=0.3,
        clip_high=0.5,
        **({"tool_advantages": torch.zeros(4, 4)} if name == "hdpo" else {}),
    )
    assert loss.item() == pytest.approx(-(clipped * advantages).mean().item())
    assert metrics["pg_clipfrac"] == (0.25 if name == "psft" else 0.75)
