"""Losses with a teacher: the authors' numbers, and their twins."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses import policy_loss

# --- Losses with a teacher's log-probabilities: the authors' numbers and gradients, and rows without a text -----------
VALUES = json.loads((Path(__file__).parents[2] / "data" / "oracle" / "teacher_check_values.json").read_text())
NAMES = ("sdar", "sdpo_sampled", "skill_sd")


def row(log_prob, teacher, old=None, advantage=0.0, has_teacher=1.0):
    """One row, with the advantage 0 the term alone."""
    now = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    return {
        "log_prob": now,
        "old_log_prob": now.detach() if old is None else torch.tensor([old], dtype=torch.float64),
        "advantages": torch.full_like(now, advantage).detach(),
        "response_mask": torch.ones_like(now).detach(),
        "teacher_log_prob": torch.tensor([teacher], dtype=torch.float64),
        "has_teacher": torch.tensor([has_teacher]),
    }


def slopes(loss, tensors):
    return torch.autograd.grad(loss, tensors["log_prob"])[0][0].tolist()


def test_sdar_has_the_authors_numbers():
    case = VALUES["sdar"]
    tensors = row(case["logp"], case["teacher"])
    loss, metrics = policy_loss("sdar", **tensors, coefficient=1.0)
    assert loss.item() == pytest.approx(case["mean"], abs=1e-6)
    assert slopes(loss, tensors) == pytest.approx(case["d_dlogp"], abs=1e-6)
    assert metrics["teacher/gate"] == pytest.approx(sum(case["gate"]) / 3, abs=1e-6)
    assert policy_loss("sdar", **tensors)[0].item() == pytest.approx(case["times_c"], abs=1e-6)


def test_skill_sd_has_the_authors_numbers():
    case, of_sdar = VALUES["skillsd"], VALUES["sdar"]
    tensors = row(of_sdar["logp"], of_sdar["teacher"], case["old"])
    loss, metrics = policy_loss("skill_sd", **tensors, lam=1.0)
    assert loss.item() == pytest.approx(case["mean"], abs=1e-6)
    assert slopes(loss, tensors) == pytest.approx(case["d_dlogp"], abs=1e-6)
    assert metrics["teacher/k3"] == pytest.approx(sum(case["term"]) / 3, abs=1e-6)
    assert policy_loss("skill_sd", **tensors)[0].item() == pytest.approx(case["times_lam"], abs=1e-6)


def test_sdpo_pulls_the_sampled_token_to_the_teacher():
    tensors = row([-1.0], [-0.5])
    loss, metrics = policy_loss("sdpo_sampled", **tensors)
    assert loss.item() == pytest.approx(VALUES["sdpo"]["sampled_token"])
    assert slopes(loss, tensors) == pytest.approx([-0.5])  # lp - lt: it raises what the teacher finds likelier
    assert metrics["teacher/gap"] == pytest.approx(0.5)
    for log_ratio, weight in VALUES["sdpo"]["is_clip"].items():
        tensors = row([-1.0], [-0.5], [-1.0 - float(log_ratio)])
        assert slopes(policy_loss("sdpo_sampled", **tensors)[0], tensors) == pytest.approx([-0.5 * weight], abs=1e-6)


def two_rows(**more):
    """A row of one token with a text, and one of three without."""
    now = torch.tensor([[-1.0, 0.0, 0.0], [-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    return {
        "log_prob": now,
        "old_log_prob": now.detach(),
        "advantages": torch.zeros(2, 3),
        "response_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
        "teacher_log_prob": torch.tensor([[-0.5, 0.0, 0.0], [-1.0, -2.0, -3.0]]),
        "has_teacher": torch.tensor([True, False]),
        **more,
    }


def test_sdpo_without_any_text_has_no_gradient():
    tensors = two_rows(advantages=torch.ones(2, 3), has_teacher=torch.zeros(2))
    loss, metrics = policy_loss("sdpo_sampled", **tensors)
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, tensors["log_prob"])[0].any()
    assert metrics["teacher/gap"] == 0.0


@pytest.mark.parametrize(("name", "params"), [("sdar", {}), ("skill_sd", {}), ("sdpo_sampled", {"weight": 0.0})])
def test_without_a_text_it_is_ppo_exactly(name, params):
    """verl's clipped loss with its dual clip, which a3po and hdpo share: here by hdpo without its second term."""
    draw = torch.Generator().manual_seed(3)
    old = -torch.rand(3, 4, generator=draw, dtype=torch.float64)
    tensors = {
        "log_prob": (old + 0.5 * torch.randn(3, 4, generator=draw)).requires_grad_(),
        "old_log_prob": old,
        "advantages": torch.randn(3, 4, generator=draw),
        "response_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0]]),
    }
    without = {"teacher_log_prob": old, "has_teacher": torch.zeros(3)}
    got, metrics = policy_loss(name, **tensors, **without, **params)
    expected, plain = policy_loss("hdpo", **tensors, tool_advantages=torch.zeros(3, 4))
    assert got.item() == expected.item()
    slope, usual = (torch.autograd.grad(loss, tensors["log_prob"])[0] for loss in (got, expected))
    assert slope.tolist() == usual.tolist()
    assert metrics["pg_clipfrac_lower"] == plain["pg_clipfrac_lower"]


@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_that_rules_the_token_out_gives_finite_numbers(name):
    for teacher in (-1e4, 0.0):
        tensors = row([-30.0], [teacher])
        loss, _ = policy_loss(name, **tensors)
        assert math.isfinite(loss.item())
        assert math.isfinite(slopes(loss, tensors)[0])


@pytest.mark.parametrize("name", NAMES)
def test_without_a_teacher_the_key_is_named(name):
    tensors = {
        key: value for key, value in row([-1.0], [-1.0]).items() if key not in ("teacher_log_prob", "has_teacher")
    }
    with pytest.raises(ConfigError, match=f"loss '{name}' needs 'teacher_log_prob'.*set turnkey.teacher.source"):
        policy_loss(name, **tensors)


# --- The losses with a teacher once more, as plain loops over tokens: values, gradients and metrics on random rows ----
def ppo(row, t, clip_low=0.2, clip_high=0.2, dual_clip=3.0):
    """PPO's clipped loss of one token, and its slope in the token's log-probability; log-ratios are cut at +-20."""
    advantage, moved = row["advantages"][t], row["log_prob"][t] - row["old_log_prob"][t]
    ratio = math.exp(min(max(moved, -20), 20))
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    value, slope = -ratio * advantage, -ratio * advantage * (abs(moved) < 20)
    if -bounded * advantage > value:
        value, slope = -bounded * advantage, 0.0
    if advantage < 0 and dual_clip is not None and value > -dual_clip * advantage:
        value, slope = -dual_clip * advantage, 0.0
    return value, slope


def sdar(row, t, coefficient=0.01, beta=5.0, pg_weight=1.0, **clip):
    value, slope = ppo(row, t, **clip)
    value, slope = pg_weight * value, pg_weight * slope
    gap = row["teacher_log_prob"][t] - row["log_prob"][t]
    gate = 1 / (1 + math.exp(-beta * gap))
    if not row["has_teacher"]:
        return value, slope, None
    return value + coefficient * gate * gap, slope - coefficient * gate, gate


def skill_sd(row, t, lam=0.001, **clip):
    value, slope = ppo(row, t, **clip)
    if not row["has_teacher"]:
        return value, slope, None
    gap = row["teacher_log_prob"][t] - row["log_prob"][t]
    moved = row["log_prob"][t] - row["old_log_prob"][t]
    k3, weight = math.exp(min(gap, 20)) - 1 - gap, math.exp(min(moved, 10))
    # d k3 / d lp = 1 - exp(gap), d weight / d lp = weight, each until its bound
    of_k3 = 1 - (math.exp(gap) if gap < 20 else 0.0)
    return value + lam * weight * k3, slope + lam * weight * ((k3 if moved < 10 else 0.0) + of_k3), weight * k3


def sdpo_sampled(row, t, weight=1.0, is_clip=2.0, rows="with_text", of_batch=1.0, **clip):
    """``of_batch``: tokens of the batch over tokens of rows with a text, so that the mean is one over the latter."""
    value, slope = ppo(row, t, **clip)
    value, slope = (1 - weight) * value, (1 - weight) * slope
    if not row["has_teacher"]:
        return value, slope, None
    gap = row["teacher_log_prob"][t] - row["log_prob"][t]
    moved = row["log_prob"][t] - row["old_log_prob"][t]
    pull = min(math.exp(min(max(moved, -20), 20)), is_clip) * -gap
    scale = weight * (of_batch if rows == "with_text" else 1.0)
    return value + scale * pull * row["log_prob"][t], slope + scale * pull, gap


TWINS = {
    "sdar": (sdar, "teacher/gate"),
    "skill_sd": (skill_sd, "teacher/k3"),
    "sdpo_sampled": (sdpo_sampled, "teacher/gap"),
}
CASES = [
    ("sdar", {}),
    ("sdar", {"coefficient": 0.1, "beta": 0.0, "pg_weight": 0.0}),
    ("sdar", {"coefficient": 1.0, "clip_low": 0.1, "clip_high": 0.4, "dual_clip": None}),
    ("skill_sd", {}),
    ("skill_sd", {"lam": 0.1, "clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}),
    ("sdpo_sampled", {}),
    ("sdpo_sampled", {"weight": 0.3, "is_clip": 1.2}),
    ("sdpo_sampled", {"weight": 0.6, "rows": "all", "dual_clip": 1.5}),
]


def random_rows(draw):
    """Rows of several turns with observations between them; the last one failed, and has no token of the model."""
    rows = []
    for _ in range(draw.randint(1, 6)):
        mask = [draw.random() < 0.7 for _ in range(draw.randint(1, 9))]
        old = [-3 * draw.random() for _ in mask]
        gaps = [draw.choice([draw.gauss(0, 1), 25.0 * draw.random(), -25.0 * draw.random()]) for _ in mask]
        rows.append(
            {
                "response_mask": mask,
                "old_log_prob": old,
                "log_prob": [lo + draw.choice([draw.gauss(0, 0.4), draw.gauss(0, 12)]) for lo in old],
                "advantages": [draw.choice([0.0, draw.gauss(0, 1)]) for _ in mask],
                "teacher_log_prob": [lo + gap for lo, gap in zip(old, gaps, strict=True)],
                "has_teacher": draw.random() < 0.6,
            }
        )
    failed = {**rows[-1], "response_mask": [False] * len(rows[-1]["response_mask"]), "has_teacher": draw.random() < 0.5}
    return [*rows, failed]


def tensors(rows):
    """(B, L), padded; nan wherever the mask is 0."""
    longest = max(len(row["response_mask"]) for row in rows)

    def column(name):
        padded = [
            [v if own else math.nan for v, own in zip(row[name], row["response_mask"], strict=True)] for row in rows
        ]
        return torch.tensor([row + [math.nan] * (longest - len(row)) for row in padded], dtype=torch.float64)

    names = ("old_log_prob", "log_prob", "advantages", "teacher_log_prob")
    mask = [row["response_mask"] + [False] * (longest - len(row["response_mask"])) for row in rows]
    has_teacher = torch.tensor([row["has_teacher"] for row in rows])
    return {**{name: column(name) for name in names}, "response_mask": torch.tensor(mask), "has_teacher": has_teacher}


@pytest.mark.parametrize(("name", "params"), CASES)
@pytest.mark.parametrize("seed", range(20))
def test_a_loss_equals_its_twin(name, params, seed):
    rows = random_rows(random.Random(seed))
    places = [(i, t) for i, row in enumerate(rows) for t, own in enumerate(row["response_mask"]) if own]
    with_text = [(i, t) for i, t in places if rows[i]["has_teacher"]]
    twin, metric = TWINS[name]
    more = {"of_batch": len(places) / max(len(with_text), 1)} if name == "sdpo_sampled" else {}
    results = {(i, t): twin(rows[i], t, **params, **more) for i, t in places}
    number = max(len(places), 1)

    inputs = tensors(rows)
    inputs["log_prob"].requires_grad_()
    loss, metrics = policy_loss(name, **inputs, **params)
    assert loss.item() == pytest.approx(sum(value for value, _, _ in results.values()) / number, rel=1e-9, abs=1e-12)
    expected = torch.zeros_like(inputs["log_prob"])
    for place, (_, slope, _) in results.items():
        expected[place] = slope / number
    torch.testing.assert_close(torch.autograd.grad(loss, inputs["log_prob"])[0], expected, rtol=1e-9, atol=1e-12)
    mean = sum(results[place][2] for place in with_text) / max(len(with_text), 1)
    assert metrics[metric] == pytest.approx(mean, rel=1e-9, abs=1e-12)
