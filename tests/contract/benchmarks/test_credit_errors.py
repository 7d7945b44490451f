"""Variance and bias are those of known estimates, keys are what they are called, and the page has the kept tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import credit_errors  # noqa: E402
from credit_errors import HISTORY, KEYS, NUMBER, STATE, TURN  # noqa: E402
from exact_values import WON, WORDS, Game  # noqa: E402
from model_credit import World  # noqa: E402

from verl_turnkey.advantage.group_ops import joint_codes  # noqa: E402
from verl_turnkey.plugins.cli.tables import between  # noqa: E402


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_variance_and_bias_of_estimates_that_are_known(scale: float):
    """Of one cell's mean, of noise of its own, and of noise that a batch has in common; whatever the scale."""
    draw = np.random.default_rng(0)
    batches, size, cells = 4000, 20, 30
    exact, off = draw.normal(size=cells), 0.5 * draw.normal(size=cells)
    cell, batch = draw.integers(0, cells, batches * size), np.repeat(np.arange(batches), size)
    noise = 1.5 * draw.normal(size=len(cell)) + 0.7 * draw.normal(size=batches)[batch]
    errors = credit_errors.with_errors(scale * (exact[cell] + off[cell] + noise), exact[cell], cell, batch)
    true, mean = np.mean(exact[cell] ** 2), (exact + off)[cell]
    c = true / np.mean(mean * exact[cell])
    assert errors["measured"] == 1
    assert errors["variance"] == pytest.approx(c**2 * (1.5**2 + 0.7**2) / true, rel=0.03)
    assert errors["bias"] == pytest.approx(np.mean((c * mean - exact[cell]) ** 2) / true, rel=0.03)
    for what in ("variance", "bias"):
        assert 0 < errors[f"{what}_error"] < 0.1 * errors[what]


def test_cells_of_one_batch_are_not_split():
    """A cell that one batch alone has would have no variance, though its estimates share that batch's noise."""
    cell, batch = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1])
    errors = credit_errors.errors(np.array([9.0, 9.0, 1.0, 3.0]), np.array([5.0, 5.0, 2.0, 2.0]), cell, batch)
    assert errors["measured"] == 0.5
    assert errors["variance"] == pytest.approx((5 - 3) / 4), "E[a^2] is 5, the product of the two batches is 3"
    assert errors["bias"] == pytest.approx(3 / 4 - 1)


@pytest.fixture(scope="module")
def world() -> World:
    """Action 0 leads on and wins after the third time, action 1 leads back, the others stay; prompts tell the state."""
    policy = np.tile([0.5, 0.2, *[0.3 / 4] * 4], (3, 1))
    following = np.array([[1, 0, *[0] * 4], [2, 0, *[1] * 4], [WON, 1, *[2] * 4]])
    return World.of([Game(["a", "b", "c"], ["", "", ""], np.arange(3), policy, following)] * 2, 6, prompts=3)


def test_finer_keys_are_shared_less_and_follow_each_other(world: World):
    batch = world.batch(4, 64, np.random.default_rng(0))
    tables = {name: credit_errors.keyed(world, batch, name) for name in KEYS}
    groups = {name: joint_codes(steps.group, steps.anchor)[1] for name, steps in tables.items()}
    assert groups[STATE] == groups[TURN] < groups[NUMBER] < groups[HISTORY]
    for name, steps in tables.items():
        raw = steps.extra["next_anchor"]
        within = np.flatnonzero(steps.step[1:])  # steps that another one of their trajectory follows
        codes: dict[str, int] = {}
        for row in within:
            assert codes.setdefault(raw[row], steps.anchor[row + 1]) == steps.anchor[row + 1], name
        assert set(raw[steps.terminated]) == {"solved"}
    history = tables[HISTORY]
    seen: dict[int, tuple] = {}
    for trajectory in range(history.n_trajectories):
        rows = np.flatnonzero(history.trajectory == trajectory)
        past: tuple = ()
        for row in rows:
            past = (*past, int(batch.situation[row]))
            assert seen.setdefault(history.anchor[row], past) == past
            past = (*past, WORDS[batch.action[row]])
    assert len(seen) == len(set(seen.values()))


def test_methods_that_compare_states_see_the_keys_and_the_others_do_not(world: World):
    measured = credit_errors.measure(world, 20, 0)
    assert list(measured["keys"]) == list(KEYS)
    shared = [measured["keys"][name]["shared"] for name in KEYS]
    assert shared[0] > shared[2] > shared[3]
    correlations = {
        method: {
            round(measured["keys"][name]["methods"][method]["correlation"], 9) for name in (STATE, NUMBER, HISTORY)
        }
        for method in credit_errors.KEYED
    }
    assert len(correlations.pop("grpo_steps")) == 1
    assert all(len(values) == 3 for values in correlations.values()), correlations
    exact = measured["keys"][STATE]["methods"][credit_errors.EXACT]
    assert exact["variance"] == pytest.approx(0, abs=1e-9)
    assert exact["bias"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", list(credit_errors.CONTENTS))
def test_the_page_has_the_tables_of_the_kept_results(name: str):
    page = credit_errors.PAGE.read_text(encoding="utf-8")
    begin, end = between(page, name)
    table = credit_errors.CONTENTS[name](json.loads(credit_errors.RESULTS.read_text()))
    assert page[begin:end] == f"{table}\n"
