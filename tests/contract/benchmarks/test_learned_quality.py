"""The scorer learns what the objectives say, the bounds are bounds, and the page has the tables of the kept results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import learned_quality as quality  # noqa: E402
from hinted_policy import locks  # noqa: E402
from learned_quality import BEST, EXACT, SCORERS, Place, Scorer  # noqa: E402

from verl_turnkey.losses.objectives import gradient, objectives  # noqa: E402
from verl_turnkey.plugins.cli.tables import between  # noqa: E402


@pytest.fixture(scope="module")
def place() -> Place:
    return Place.of(locks(np.random.default_rng(0)), 0.5)


def test_every_shipped_objective_is_compared():
    assert {objective for _, objective in SCORERS.values()} == set(objectives())


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_begins_at_0_and_lowers_its_objective(place: Place, name: str):
    batch = place.world(place.start).batch(8, 64, np.random.default_rng(0))
    prompts, scorer = place.prompts(batch), Scorer(name, place.start, 0.003)
    factor = 1 if scorer.kind == "head" else 1 / scorer.params.beta

    def loss() -> float:
        objective = gradient(
            scorer.objective, factor * scorer.scores(prompts, batch, place.start), batch.steps, scorer.params
        )
        assert objective is not None
        return objective.loss

    assert np.abs(scorer.scores(prompts, batch, place.start)).max() < 1e-15
    before = loss()
    scorer.learn(prompts, batch, place.start)
    assert loss() < before


def test_log_ratios_are_to_the_policy_of_now_or_to_the_first_one(place: Place):
    batch = place.world(place.start).batch(8, 64, np.random.default_rng(0))
    prompts, moved = place.prompts(batch), 0.9 * place.start + 0.1 / place.start.shape[1]
    old, ref = (
        Scorer("preference", place.start, 0.1, reference).scores(prompts, batch, moved) for reference in ("old", "ref")
    )
    ratio = np.log(place.start / moved)[prompts, batch.action]
    assert old == pytest.approx(0.05 * ratio)
    assert np.abs(ref).max() < 1e-15


def test_bounds_and_agreement_on_batches_that_no_scorer_has_seen(place: Place):
    result = quality.standing(place, 0, checks=(1, 16), tests=3)
    assert result[EXACT][0] == pytest.approx(1)
    assert 0.9 < result[BEST][0] < 1
    assert set(result) == {*quality.USUAL, BEST, EXACT, *SCORERS}
    for name in SCORERS:
        best = quality.best_rate([result], name, "16")
        assert 0.4 < result[name][best]["16"]["alone"][0] < result[BEST][0]


@pytest.mark.parametrize("name", ["gigpo", "sum_to_outcome"])
def test_a_policy_learns(place: Place, name: str):
    scorer = Scorer(name, place.start, 0.1) if name in SCORERS else None
    ahead = [place.world(place.start).batch(8, 64, np.random.default_rng(0))]
    curve = quality.learning(place, name, 0, scorer, ahead, updates=4)
    assert len(curve) == 5
    assert curve[-1] > 1.2 * curve[0]


def test_the_page_has_the_tables_of_the_kept_results():
    page = quality.PAGE.read_text(encoding="utf-8")
    results = json.loads(quality.RESULTS.read_text())
    for name, make in quality.CONTENTS.items():
        begin, end = between(page, name)
        assert page[begin:end] == make(results), name
