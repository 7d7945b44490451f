"""Objectives against recorded values, against loops straight from their formulas, and what their derivatives keep."""

import json
import math
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimator_cases import table

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit
from verl_turnkey.losses import objectives as module
from verl_turnkey.losses.objectives import ObjectiveParams, gradient, objectives, register_objective

VALUES = json.loads((Path(__file__).parents[2] / "data" / "oracle" / "learned_check_values.json").read_text())
ISTAR, PASSES, SPA = (VALUES[name] for name in ("istar_preference", "two_passes", "spa"))
Trajectory = tuple[int, float, list[float]]
"""group, outcome, q of each step"""


def table_of(trajectories: list[Trajectory], *, order: Any = None, **columns: Any) -> tuple[np.ndarray, StepBatch]:
    """The steps of the trajectories with an outcome on the last one, and their q; in another ``order`` of rows."""
    steps = [
        (group, i, k, q, outcome if k == len(of) - 1 else 0.0)
        for i, (group, outcome, of) in enumerate(trajectories)
        for k, q in enumerate(of)
    ]
    steps = [steps[i] for i in (range(len(steps)) if order is None else order)]
    group, trajectory, step, q, reward = map(list, zip(*steps, strict=True))
    columns = {name: [values[i] for i in trajectory] for name, values in columns.items()}
    return np.array(q), StepBatch(group=group, trajectory=trajectory, step=step, reward=reward, **columns)


def of_trajectories(values: Any, table: StepBatch) -> list[float]:
    """One number per trajectory, which all of its steps have."""
    by_trajectory = np.full(table.n_trajectories, np.nan)
    for value, trajectory in zip(np.asarray(values), table.trajectory, strict=True):
        name = table.ids["trajectory"][trajectory]
        assert math.isnan(by_trajectory[name]) or by_trajectory[name] == value
        by_trajectory[name] = value
    return by_trajectory.tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def naive_preference(trajectories: list[Trajectory], params: ObjectiveParams) -> tuple[float, list[float]] | None:
    """Loss and its derivative by the q of each trajectory's steps, pair by pair."""
    size = [len(q) if params.over == "mean" else 1 for _, _, q in trajectories]
    value = [params.beta * sum(q) / n for (_, _, q), n in zip(trajectories, size, strict=True)]
    pairs = defaultdict(list)
    for a, b in product(range(len(trajectories)), repeat=2):
        (group, won, _), (other, lost, _) = trajectories[a], trajectories[b]
        if group == other and won > 0 >= lost:
            pairs[group].append((a, b))
    if not pairs:
        return None
    loss, slope = 0.0, [0.0] * len(trajectories)
    for of_group in pairs.values():
        for a, b in of_group:
            number = len(pairs) * len(of_group) if params.weigh == "group" else sum(map(len, pairs.values()))
            loss -= math.log(sigmoid(value[a] - value[b])) / number
            slope[a] -= sigmoid(value[b] - value[a]) / number * params.beta / size[a]
            slope[b] += sigmoid(value[b] - value[a]) / number * params.beta / size[b]
    return loss, slope


def drawn(seed: int) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    outcomes = rng.choice([-1.0, 0.0, 1.0], size=24)
    return [(int(rng.integers(5)), float(o), rng.normal(size=rng.integers(1, 6)).tolist()) for o in outcomes]


@pytest.mark.parametrize(("beta", "over"), product((0.05, 1.0), ("sum", "mean")))
def test_preference_is_what_is_on_record(beta, over):
    expected = ISTAR[f"beta={beta},{over}"]
    q, table = table_of(ISTAR["input"])
    result = gradient("preference", q, table, ObjectiveParams(beta=beta, over=over))
    assert result is not None
    assert result.loss == pytest.approx(expected["loss"], abs=1e-8)
    slope = of_trajectories(result.coefficients, table)
    assert slope == pytest.approx(expected["coefficient_of_every_token_of_the_trajectory"], abs=1e-8)
    assert result.metrics == {"pairs": len(expected["pairs"]), "pair_accuracy": expected["pair_accuracy"]}


def test_groups_weigh_alike_as_on_record():
    q, table = table_of(ISTAR["input"])
    result = gradient("preference", q, table, ObjectiveParams(beta=1.0, weigh="group"))
    assert result is not None
    assert result.loss == pytest.approx(ISTAR["beta=1,sum,groups weigh alike: loss"], abs=1e-8)


def test_groups_of_seven_and_three_pairs_weigh_alike_to_the_last_digit():
    """Weights in single precision are off in the eighth."""
    won, lost = (0, 1.0, [0.0]), (0, 0.0, [0.0])
    q, table = table_of([won, *[lost] * 7, (1, 1.0, [0.0]), *[(1, 0.0, [0.0])] * 3])
    result = gradient("preference", q, table, ObjectiveParams(beta=1.0, weigh="group"))
    assert result is not None
    assert result.loss == pytest.approx(math.log(2), rel=1e-15)
    assert of_trajectories(result.coefficients, table)[:2] == pytest.approx([-1 / 4, 1 / 28], rel=1e-15)


def test_outcome_ce_is_what_is_on_record():
    q, table = table_of(ISTAR["input"])
    result = gradient("outcome_ce", q, table, ObjectiveParams(beta=1.0))
    assert result is not None
    assert result.loss == pytest.approx(ISTAR["outcome_ce, beta=1, sum: loss"], abs=1e-8)
    assert of_trajectories(result.coefficients, table) == pytest.approx(ISTAR["outcome_ce: coefficients"], abs=1e-8)
    assert result.metrics == {"accuracy": 7 / 8}


@pytest.mark.parametrize("seed", range(5))
def test_outcome_ce_is_the_loop_over_trajectories(seed):
    trajectories, params = drawn(seed), ObjectiveParams(beta=0.7, over="mean")
    q, table = table_of(trajectories)
    result = gradient("outcome_ce", q, table, params)
    value = [0.7 * sum(of) / len(of) for _, _, of in trajectories]
    won = [outcome > 0 for _, outcome, _ in trajectories]
    n = len(won)
    assert result is not None
    assert result.loss == pytest.approx(
        -sum(math.log(sigmoid(v if w else -v)) for v, w in zip(value, won, strict=True)) / n
    )
    slope = [0.7 / len(of) * (sigmoid(v) - w) / n for (_, _, of), v, w in zip(trajectories, value, won, strict=True)]
    assert of_trajectories(result.coefficients, table) == pytest.approx(slope)


def test_sum_to_outcome_is_what_is_on_record():
    q, table = table_of([(0, outcome, c) for outcome, c in zip(SPA["R"], SPA["c"], strict=True)])
    result = gradient("sum_to_outcome", q, table, ObjectiveParams(beta=0.05))
    assert result is not None
    assert result.loss == pytest.approx(SPA["loss"], abs=1e-8)
    slope = SPA["coefficient of every c of the trajectory"]
    assert of_trajectories(result.coefficients, table) == pytest.approx(slope, abs=1e-8)
    assert result.metrics["error"] == pytest.approx(0.175)


@pytest.mark.parametrize(("seed", "over", "weigh"), product(range(4), ("sum", "mean"), ("pair", "group")))
def test_preference_is_the_loop_over_pairs_in_any_order_of_rows(seed, over, weigh):
    trajectories, params = drawn(seed), ObjectiveParams(beta=0.3, over=over, weigh=weigh)
    expected = naive_preference(trajectories, params)
    assert expected is not None
    rows = sum(len(q) for _, _, q in trajectories)
    for order in (np.arange(rows), np.random.default_rng(seed).permutation(rows)):
        q, table = table_of(trajectories, order=order)
        result = gradient("preference", q, table, params)
        assert result is not None
        assert result.loss == pytest.approx(expected[0])
        assert of_trajectories(result.coefficients, table) == pytest.approx(expected[1])


@pytest.mark.parametrize("outcomes", [(1, 1, 1), (0, 0, 0), (0, -1, 0)])
def test_without_a_pair_there_is_nothing_to_learn(outcomes):
    q, table = table_of([(0, float(outcome), [0.1, 0.2]) for outcome in outcomes])
    assert gradient("preference", q, table, ObjectiveParams()) is None
    alone, single = table_of([(0, 1.0, [0.1]), (1, 0.0, [0.2])])
    assert gradient("preference", alone, single, ObjectiveParams()) is None


@pytest.mark.parametrize("name", objectives())
def test_a_batch_without_steps_teaches_nothing(name):
    empty = table([], group="")
    assert gradient(name, [], empty, ObjectiveParams()) is None


def test_which_trajectories_are_good():
    """A flag comes before the score, a number before both."""
    flags = {"success": [False, True]}
    q, table = table_of([(0, 1.0, [0.0, 0.0]), (0, 0.2, [0.0])], **flags)
    for params, signs in (
        (ObjectiveParams(), [1, -1]),
        (ObjectiveParams(positive=0.5), [-1, 1]),
        (ObjectiveParams(positive=0.1), None),
    ):
        result = gradient("preference", q, table, params)
        assert (result and np.sign(of_trajectories(result.coefficients, table)).tolist()) == signs
    q, unflagged = table_of([(0, 1.0, [0.0, 0.0]), (0, 0.0, [0.0])])
    result = gradient("preference", q, unflagged, ObjectiveParams())
    assert result is not None
    assert np.sign(of_trajectories(result.coefficients, unflagged)).tolist() == [-1, 1]


@pytest.mark.parametrize("over", ["sum", "mean"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 16), (1, 1), (2, 3), (4, 2)])
def test_two_passes_give_the_gradient_of_one_graph(over, ranks, micro):
    """Micro-batches and ranks cut trajectories and pairs anywhere; FSDP takes the mean over ranks."""
    vocabulary, rows = 6, PASSES["rows"]
    start = (torch.arange(vocabulary**2, dtype=torch.float64).reshape(vocabulary, vocabulary) * 0.37).sin()

    def row_q(weights: torch.Tensor, j: int) -> torch.Tensor:
        _, tokens, mask = rows[j]
        log_probs = weights.log_softmax(-1)
        return sum(log_probs[tokens[t - 1], tokens[t]] for t in range(1, len(tokens)) if mask[t]) - PASSES["ref"][j]

    trajectories = [(group, float(won), [0.0] * len(q)) for group, won, q in ISTAR["input"]]
    _, table = table_of(trajectories)
    q = torch.stack([row_q(start, j) for j in range(len(rows))])
    result = gradient("preference", q, table, ObjectiveParams(over=over))
    assert result is not None
    expected = PASSES[over]
    assert result.loss == pytest.approx(expected["loss"], abs=1e-8)
    of_ranks = []
    for rank in range(ranks):
        weights = start.clone().requires_grad_(True)
        mine = list(range(len(rows)))[rank::ranks]
        for at in range(0, len(mine), micro):
            sum(result.coefficients[j] * row_q(weights, j) * ranks for j in mine[at : at + micro]).backward()
        of_ranks.append(weights.grad)
    two = sum(of_ranks) / ranks
    assert two.norm().item() == pytest.approx(expected["grad_norm"], abs=1e-8)
    assert two[2].tolist() == pytest.approx(expected["grad row 2"], abs=1e-8)


@pytest.mark.parametrize(
    ("name", "settings", "score"),
    [
        ("paper: z-scores, all steps", {"estimator": "grpo"}, "score=beta q, beta=0.05"),
        ("rloo, all steps, batch_norm", {"estimator": "rloo"}, "score/(max|score|+1e-6), released batch_norm"),
        (
            "released: rloo, first step of each trajectory, batch_norm, outcome 10 or 0",
            {"estimator": "rloo", "baseline": "one_per_trajectory"},
            "score/(max|score|+1e-6), released batch_norm",
        ),
    ],
)
def test_the_advantages_of_istar_are_what_is_on_record(name, settings, score):
    expected = VALUES["istar_advantage"]
    factor = 10.0 if "10 or 0" in name else 1.0
    trajectories = [(group, factor * won, q) for group, won, q in ISTAR["input"]]
    _, table = table_of(trajectories)
    table = StepBatch(
        group=table.group,
        trajectory=table.trajectory,
        step=table.step,
        reward=table.reward,
        extra={"turn_score": [value for of in expected[score] for value in of]},
    )
    advantage = compute_credit("step_episode", table, **settings).advantage
    np.testing.assert_allclose(advantage, [value for of in expected[name] for value in of], atol=2e-5)


def test_an_objective_of_a_users_own():
    """It sees the table; what it returns is checked."""
    q, table = table_of([(0, 2.0, [1.0, 3.0])])
    result = gradient(
        lambda q, table, params: ((q * torch.tensor(table.reward)).sum(), {"mine": 1.0}), q, table, PARAMS
    )
    assert result is not None
    assert (result.loss, result.coefficients.tolist(), result.metrics) == (6.0, [0.0, 2.0], {"mine": 1.0})
    for wrong in (lambda q, *_: (q, {}), lambda *_: (torch.tensor(1.0), {}), lambda q, *_: (q.sum() * math.nan, {})):
        with pytest.raises(ValueError, match="expected a finite scalar that depends on q"):
            gradient(wrong, q, table, PARAMS)
    with pytest.raises(ValueError, match="expected a finite derivative"):
        gradient(lambda q, *_: ((q - q).sum().sqrt(), {}), q, table, PARAMS)
    for numbers in ([1.0], [1.0, math.inf]):
        with pytest.raises(ValueError, match="expected 2 finite numbers"):
            gradient("preference", numbers, table, PARAMS)
    with pytest.raises(ConfigError, match=r"did you mean 'preference'.*known: outcome_ce, preference, sum_to_outcome"):
        gradient("preferance", q, table, PARAMS)


PARAMS = ObjectiveParams()


def test_names_are_unique_and_fields_known(monkeypatch):
    monkeypatch.setattr(module, "_OBJECTIVES", dict(module._OBJECTIVES))
    with pytest.raises(ValueError, match=r"'preference' is already registered by verl_turnkey.losses.objectives"):
        register_objective("preference")
    with pytest.raises(ValueError, match="reads: expected fields among beta, over, weigh, positive, got 'gamma'"):
        register_objective("mine", reads=("gamma",))
    register_objective("mine", reads=("beta",))(lambda q, table, params: (q.sum(), {}))
    q, table = table_of([(0, 1.0, [1.0, 3.0])])
    result = gradient("mine", q, table, PARAMS)
    assert result is not None
    assert result.loss == 4.0
    with pytest.raises(ConfigError, match="beta: expected a number > 0, got 0"):
        ObjectiveParams(beta=0)
