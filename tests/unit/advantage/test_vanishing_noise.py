"""A vanishing change of the rewards changes the credit of every method vanishingly, or its page says where not.

Groups that are constant at some level are left out: dividing by a standard deviation gives any noise in them unit size,
with GRPO as with all methods after it (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_all_estimators import ANY, EXTRA, OF_RATES

from verl_turnkey.advantage import StepBatch, Tokens, compute_credit, estimators, modifiers

PAGES = Path(__file__).parents[3] / "docs" / "methods"
WINS = ((1, 1, 0, 0, 0), (1, 0, 0, 0, 0), (1, 1, 1, 1, 0), (1, 0, 1, 0, 1))
STEPS = 3
#: Methods whose credit jumps, and under which noise; their pages have a section on it.
JUMPS = {"mc_grpo": ("within", "beyond"), "maxrl": ("beyond",)}
#: Modifiers that no method is made of.
MODIFIERS = sorted({*modifiers()} - {*estimators()})
#: Of rank_shaping, which leaves the first batch alone.
RUNNING = {f"modify/rank_shaping/{name}": 0.5 for name in ("rank", "rank_velocity", "rank_acceleration")}
GAPS = np.random.default_rng(1).normal(size=(500, 4))
#: Largest credit of a batch in which all outcomes are 0 up to 1e-7: the page has these numbers.
CONSTANT = {"grpo_steps": 0.04, "rebn": 1.47, "hae": 1.76, "maxrl": 0.98, "rloo_steps": 0.0, "marshal": 0.0}


def table(
    noise: float, where: str, wins_by_group: Sequence[Sequence[int]] = WINS, columns: Mapping[str, Any] | None = None
) -> StepBatch:
    """Episodes of outcome 0 or 1 up to ``noise``, ``within`` [0, 1] or ``beyond`` it; steps share their states."""
    rng = np.random.default_rng(0)
    rows = [(g, k, won, t) for g, wins in enumerate(wins_by_group) for k, won in enumerate(wins) for t in range(STEPS)]
    outcome = {}
    for g, k, won, _ in rows:
        if (g, k) not in outcome:
            change = noise * rng.uniform(0.1, 1)
            outcome[g, k] = won - change if bool(won) == (where == "within") else won + change
    last = [t == STEPS - 1 for *_, t in rows]
    extra = {name: [value] * len(rows) for name, value in EXTRA.items()}
    extra["parent"] = ["start" if t == 0 else f"{g} {k} {t - 1}" for g, k, _, t in rows]
    extra |= {name: values for name, values in (columns or {}).items() if name != "tokens"}
    return StepBatch(
        group=[g for g, *_ in rows],
        trajectory=[(g, k) for g, k, *_ in rows],
        step=[t for *_, t in rows],
        reward=[outcome[g, k] * end for (g, k, *_), end in zip(rows, last, strict=True)],
        anchor=[(g, t) for g, _, _, t in rows],
        action=[(t + k * (t == 1)) % 2 for _, k, _, t in rows],
        terminated=last,
        success=[bool(won) for _, _, won, _ in rows],
        value=[0.3 + 0.1 * t for *_, t in rows],
        tokens=(columns or {}).get("tokens", [3 + t for *_, t in rows]),
        text=[f"state {t}" for *_, t in rows],
        extra=extra,
    )


@ANY
@pytest.mark.parametrize("where", ["within", "beyond"])
def test_credit_changes_no_more_than_the_rewards_allow(name, params, where):
    if name in OF_RATES and where == "beyond":
        with pytest.raises(Exception, match="expected outcomes"):
            compute_credit(name, table(1e-4, where), **params)
        return
    exact = compute_credit(name, table(0.0, where), **params).advantage
    changes = [
        np.abs(compute_credit(name, table(noise, where), **params).advantage - exact).max() for noise in (1e-4, 1e-7)
    ]
    if where in JUMPS.get(name, ()):
        assert changes[1] > 0.1  # else the exception is no longer one
        assert "## Where credit jumps" in (PAGES / f"{name}.md").read_text()
    else:
        assert changes[0] < 1e-2
        assert changes[1] < 1e-5


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("where", ["within", "beyond"])
def test_terms_of_modifiers_change_no_more_than_the_rewards_allow(modifier, where):
    def credit(noise: float) -> np.ndarray:
        columns = {"tokens": 3 + of_episode, "tool_calls": of_episode, "rank": 2 + of_episode}
        columns |= dict.fromkeys(("entropy", "gold_probability", "rank_velocity", "rank_acceleration"), rising)
        columns |= {"teacher_gap": gaps.sum(1), "teacher_gap_mean": gaps.mean(1), "teacher_log_prob_mean": -rising}
        tokens = Tokens(np.arange(number).repeat(4), gaps.ravel())
        modify = [{"name": modifier, **({"weight": 1.0} if modifier == "opid" else {})}]
        batch, more = table(noise, where, groups, columns), {"state": RUNNING, "tokens": tokens}
        return compute_credit("rloo_steps", batch, modify=modify, **more).advantage

    groups = (*WINS, (1, 1, 1, 1, 1))  # length_gate is for groups that are solved throughout
    number = sum(map(len, groups)) * STEPS
    of_episode = np.arange(number) // STEPS % 4
    gaps, rising = GAPS[:number], np.linspace(0.1, 0.9, number)

    plain = compute_credit("rloo_steps", table(0.0, where, groups)).advantage
    exact = credit(0.0)
    assert np.abs(exact - plain).max() > 0.01  # the modifier does something here
    changes = [np.abs(credit(noise) - exact).max() for noise in (1e-4, 1e-7)]
    assert changes[0] < 1e-2
    assert changes[1] < 1e-5


@pytest.mark.parametrize("wins", [0, 1])
def test_a_group_that_is_constant_up_to_noise_has_no_larger_factor_than_one_of_two_outcomes(wins):
    """Of five rollouts at most 1/sqrt(1/5), on credit that is of unit size in both."""
    noisy = compute_credit("a_grae", table(1e-4, "within", (*WINS, (wins,) * 5)))
    assert noisy.levels["a_grae/group_factor"].max() <= 5**0.5


@pytest.mark.parametrize(("name", "largest"), CONSTANT.items())
def test_noise_in_a_constant_batch_has_the_size_that_the_page_says(name, largest):
    credit = compute_credit(name, table(1e-7, "within", ((0, 0, 0, 0, 0),) * 3)).advantage
    assert np.abs(credit).max() == pytest.approx(largest, abs=5e-3)
    coarse = compute_credit("grpo_steps", table(1e-4, "within", ((0, 0, 0, 0, 0),) * 3)).advantage
    assert np.abs(coarse).max() == pytest.approx(1.24, abs=5e-3)


@pytest.mark.parametrize("name", ["grpo_steps", "rebn", "maxrl"])
def test_an_epsilon_above_the_noise_bounds_it(name):
    credit = compute_credit(name, table(1e-7, "within", ((0, 0, 0, 0, 0),) * 3), epsilon=1e-3).advantage
    assert np.abs(credit).max() < 1e-3
