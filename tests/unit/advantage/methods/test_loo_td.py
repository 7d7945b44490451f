"""loo_td: its check values, its twin, and what its page promises."""

import json

import naive
import numpy as np
import pytest
from estimator_cases import ORACLE, as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

PARAMS = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([0.9, 1.0]),
        "lam": st.sampled_from([0.0, 0.6, 1.0]),
        "horizon": st.sampled_from([None, 4, 30]),
        "prior": st.sampled_from([2.0, "averaged"]),
        "lone": st.sampled_from([0.0, 1.0]),
        "scale": st.sampled_from(["rms", "none"]),
        "text": st.sampled_from(["words", "none"]),
    }
)
COLUMNS = ("anchor", "text", "next_anchor")


@settings(max_examples=150, deadline=None)
@given(step_rows(*COLUMNS, ends=True), PARAMS, st.booleans(), st.booleans())
def test_equals_its_naive_twin(rows, params, with_next, with_limit):
    limits = {}
    for row in rows:
        if not with_next:
            row.pop("next_anchor")
        if with_limit:
            row["turn_limit"] = limits.setdefault(row["group"], 7 - min(len(limits), 3))
    got = compute_credit("loo_td", as_batch(rows), **params).advantage
    expected = naive.loo_td(rows, **params)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * max(1.0, np.abs(expected).max(initial=0.0)))


def recorded():
    for name in ("loo_td", "loo_td_words"):
        for number, case in enumerate(json.loads((ORACLE / f"{name}.json").read_text())):
            yield pytest.param(case, id=f"{name}-{number}")


@pytest.mark.parametrize("case", [*recorded()])
def test_check_values(case):
    columns, params = dict(case.get("columns", case)), dict(case.get("parameters", {"gamma": case.get("gamma")}))
    if "scale" in params:
        params["scale"] = params["scale"] or "none"
    names = ("group", "trajectory", "step", "reward", "anchor", "terminated")
    extra = {"next_anchor": columns["next_anchor"]} if "next_anchor" in columns else {}
    batch = StepBatch(**{name: columns[name] for name in names}, text=columns.get("texts"), extra=extra)
    credit = compute_credit("loo_td", batch, **params)
    np.testing.assert_allclose(credit.advantage, case["advantage"], atol=1e-10)
    assert credit.metrics["credit/text_trust"] == pytest.approx(case.get("trust", 0.0), abs=1e-9)


def corridor(rng, groups=6, size=6, limit=8, text=False, start=0):
    """Walks of a corridor of five rooms, right with chance .6: won in the last room, lost at the turn limit."""
    rows = []
    for number in range(groups * size):
        room = start
        for step in range(limit):
            after = max(0, room + (1 if rng.random() < 0.6 else -1))
            rows.append(
                {
                    "group": f"g{number // size}",
                    "trajectory": f"t{number:03}",
                    "step": step,
                    "reward": float(after == 4),
                    "penalty": 0.0,
                    "anchor": (number, step) if text else room,
                    "terminated": after == 4,
                    "text": f"You are in room {room}.",
                    "next_anchor": (number, step + 1) if text else after,
                }
            )
            room = after
            if room == 4:
                break
    return rows


def test_no_state_recurs_and_no_text_is_rloo():
    rows = corridor(np.random.default_rng(0), text=True)
    batch = as_batch([{**row, "next_anchor": None} for row in rows])
    got = compute_credit("loo_td", batch, text="none", scale="none").advantage
    assert_same_credit(got, compute_credit("rloo_steps", batch).advantage)


def test_words_tell_values_where_no_state_recurs():
    rows = corridor(np.random.default_rng(0), groups=8, size=8, text=True)
    credit = compute_credit("loo_td", as_batch(rows))
    assert credit.metrics["credit/text_trust"] > 0.2
    shuffled = np.random.default_rng(1).permutation([row["text"] for row in rows])
    other = compute_credit("loo_td", as_batch([{**row, "text": t} for row, t in zip(rows, shuffled, strict=True)]))
    assert other.metrics["credit/text_trust"] < credit.metrics["credit/text_trust"]


def test_late_at_a_state_is_worth_less():
    """Who wasted a turn before the same last state loses by it; without turns left both would be worth the same."""
    steps = {"good": ["a", "b", "c"], "late": ["a", "a", "b", "c"], "lost": ["a", "a", "a", "b"]}
    rows = [
        {"group": "g", "trajectory": name, "step": k, "anchor": state, "penalty": 0.0}
        | {"terminated": (won := state == "c"), "reward": float(won)}
        for name, path in steps.items()
        for k, state in enumerate(path)
    ]
    credit = dict(
        zip(
            ((row["trajectory"], row["step"]) for row in rows),
            compute_credit("loo_td", as_batch(rows), lam=0.0, prior=0.3).advantage,
            strict=True,
        )
    )
    assert credit["good", 0] > 0 > credit["late", 0]


def test_a_limit_that_is_too_large_is_seen_by_its_metrics():
    rows = corridor(np.random.default_rng(3))
    right = compute_credit("loo_td", as_batch(rows)).metrics
    wrong = compute_credit("loo_td", as_batch(rows), horizon=16).metrics
    assert right["credit/turn_limit"] == 8
    assert right["credit/share_cut_early"] == 0 < wrong["credit/share_cut_early"]
    assert wrong["credit/prior"] >= right["credit/prior"]


def test_each_group_has_the_limit_of_its_column():
    limits, plain = {"g0": 6, "g1": 8}, {"prior": 1.0, "lone": 0.0, "scale": "none", "text": "none"}
    rows = [row for row in corridor(np.random.default_rng(5), groups=2) if row["step"] < limits[row["group"]]]
    both = compute_credit("loo_td", as_batch([{**row, "turn_limit": limits[row["group"]]} for row in rows]), **plain)
    alone = [
        compute_credit("loo_td", as_batch([row for row in rows if row["group"] == name]), horizon=limit, **plain)
        for name, limit in limits.items()
    ]
    assert_same_credit(both.advantage, np.concatenate([credit.advantage for credit in alone]))
    assert both.metrics["credit/share_cut_early"] == 0
    assert compute_credit("loo_td", as_batch(rows), horizon=8, **plain).metrics["credit/share_cut_early"] > 0


def test_a_limit_that_nobody_reaches_is_that_of_the_column():
    rows = [row for row in corridor(np.random.default_rng(3), limit=30) if row["step"] < 20]
    assert (
        compute_credit("loo_td", as_batch([{**row, "turn_limit": 40} for row in rows])).metrics["credit/turn_limit"]
        == 40
    )


@pytest.mark.parametrize("shift", [1e-9, 1e-6])
def test_a_vanishing_change_of_rewards_or_of_one_limit_changes_credit_vanishingly(shift):
    rows = [{**row, "turn_limit": 8} for row in corridor(np.random.default_rng(7))]
    draw = np.random.default_rng(8)
    moved = [{**row, "reward": row["reward"] + shift * draw.normal()} for row in rows]
    before, after = (compute_credit("loo_td", as_batch(table), prior="averaged").advantage for table in (rows, moved))
    assert np.abs(after - before).max() < 1e3 * shift
    moved = [{**row, "turn_limit": 7.0 if row["trajectory"] == "t000" else 8} for row in rows]  # the group's is 8
    assert_same_credit(compute_credit("loo_td", as_batch(moved), prior="averaged").advantage, before)


@pytest.mark.parametrize("prior", ["best", True, 0.0, -1.0])
def test_a_prior_is_a_number_or_a_choice(prior):
    with pytest.raises(ConfigError, match=r"loo_td\.prior: expected"):
        compute_credit("loo_td", as_batch(corridor(np.random.default_rng(0))), prior=prior)
