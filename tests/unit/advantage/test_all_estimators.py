"""What holds for every estimator, whatever it computes."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from estimator_cases import as_batch, cases, step_rows, table, with_parents, with_rates
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, Tokens, compute_credit, describe_part, estimators, modifiers
from verl_turnkey.advantage.glossary import MEANINGS

# --- What holds for every estimator, whatever it computes -------------------------------------------------------------
SHIPPED = {name: spec for name, spec in estimators().items() if spec.fn.__module__.startswith("verl_turnkey.")}
#: Options that take other ways through the code than the defaults.
VARIANTS = [
    *((name, {}) for name in SHIPPED),
    ("gigpo", {"norm": "mean", "scope": "steps", "singleton": "score"}),
    ("gigpo", {"scope": "trajectories"}),
    ("gigpo", {"similarity": 0.9}),
    ("hgpo", {"norm": "mean", "std": "sample", "weights": "code", "episode_level": True, "scope": "steps"}),
    ("salt", {"base": "rloo", "average": "trajectories", "history": 2}),
    ("proxmo", {"norm": "mean", "success_rate": "clamped_score", "neighbours": "all_steps", "scope": "steps"}),
    ("turn_gae", {"whiten": "none", "truncated": "value"}),
    ("vc_gae", {"whiten": "none"}),
    ("vc_gae", {"length_alpha": 0.5}),
    ("graph", {"edge": "code", "norm": "mean", "scope": "steps", "singleton": "score"}),
    ("graph", {"edge": "progress", "decay": 0.9}),
    ("graph", {"rule": "graft"}),
    ("graph", {"rule": "g2po"}),
    ("graph", {"rule": "g2po", "norm": "mean", "success_value": 10.0, "scope": "steps"}),
    ("loo_td", {"prior": "averaged", "lam": 0.0}),
    ("loo_td", {"text": "none", "gamma": 0.9}),
    ("tree", {"rule": "treerl"}),
    ("tree", {"rule": "tree_grpo", "norm": "mean"}),
    ("tree", {"rule": "arpo", "shared": "sum"}),
    ("tree", {"rule": "spo"}),
    ("siblings", {"norm": "mean"}),
    ("rae", {"gamma": 0.9, "decay": 0.5}),
    ("hae", {"normalise": False, "keep_penalty": 0.3, "bootstrap_truncated": True}),
    (
        "marshal",
        {
            "reward_norm": "mean",
            "whiten_rewards": True,
            "advantage_norm": "distinct_mean",
            "whiten_advantages": True,
        },
    ),
    ("rebn", {"std": "population"}),
    ("rloo_steps", {"scope": "steps", "singleton": "score"}),
    ("rloo_steps", {"scope": "trajectories"}),
    ("rtmc", {"divide_by_std": True, "n_prior": 0.0}),
    ("rtmc", {"states": "actions", "gamma": 1.0}),
    ("maxrl", {"epsilon": 1e-6}),
    ("dual_level", {"trajectory_w": 0.5, "singleton": "score"}),
    ("step_episode", {"estimator": "grpo"}),
    ("step_episode", {"estimator": "reinforce_pp", "baseline": "one_per_trajectory"}),
    ("dual_granularity", {"weight": "steps"}),
    ("progress", {"prover": "best_of_k"}),
    ("information_gain", {"gain": "log_probability", "pool": "joint"}),
    ("turn_norm", {"over": "batch"}),
    ("turn_norm", {"rule": "mt_grpo"}),
    ("mc_grpo", {"floor": 0.0}),
    ("shrinkage", {"prior": "given"}),
    ("copo", {"rho": 0.5}),
    ("dynamo_modulation", {"threshold": 0.2}),
]
#: Methods that ask for outcomes in [0, 1].
OF_RATES = ("a_grae", "ngrpo", "shrinkage")
ANY = pytest.mark.parametrize(("name", "params"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
#: A value of each extra column that a method needs; where nothing was won it speaks of no progress.
EXTRA = {"tool_calls": 1, "role": "setter", "parent": "start", "switch": 1}
EXTRA |= {f"value_{stream}": 0.0 for stream in ("low", "high", "term")}
EXTRA |= {"entropy": 0.5, "log_prob": -1.0, "answer": "yes", "task": "task", "prior": 0.0}
EXTRA |= {"teacher_gap": 0.1, "teacher_gap_mean": 0.1, "teacher_log_prob_mean": -1.0}
EXTRA |= {"rank": 1.0, "rank_velocity": 0.1, "rank_acceleration": 0.0}
EXTRA |= {"turn_score": 0.0, "candidate_score": 0.0, "turn_value": 0.0, "potential": 0.0, "gold_probability": 0.5}
FULL = step_rows(
    "anchor", "action", "value", "tokens", "success", "text", *(name for name in EXTRA if name != "parent"), ends=True
).map(with_parents)


def compares(name, params):
    """Whether credit is what a step is above others, not above a critic's, a given or a moving estimate alone."""
    if name in ("rae", "progress", "ngrpo") or params.get("prior") == "given":
        return False
    return params.get("whiten") != "none" and params.get("normalise", True)


def table_all(name, rows):
    return as_batch(with_rates(rows) if name in OF_RATES else rows)


COMPARING = [(name, params) for name, params in VARIANTS if compares(name, params)]


@ANY
@settings(max_examples=10, deadline=None)
@given(rows=FULL, random=st.randoms(use_true_random=True))
def test_order_and_names_do_not_matter(name, params, rows, random):
    rows = with_rates(rows) if name in OF_RATES else rows
    before = compute_credit(name, as_batch(rows), **params)
    order = list(range(len(rows)))
    if "similarity" not in params:  # the one rule that visits the rows in the order given
        random.shuffle(order)
    renamed = [
        {
            **rows[i],
            "group": hash(rows[i]["group"]),
            "trajectory": ["id", rows[i]["trajectory"]],
            "anchor": None if rows[i]["anchor"] is None else {"state": rows[i]["anchor"]},
            "action": None if rows[i]["action"] is None else ("act", rows[i]["action"]),
        }
        for i in order
    ]
    after = compute_credit(name, as_batch(renamed), **params)
    assert after.advantage.tolist() == before.advantage[order].tolist()
    assert (before.returns is None) == (after.returns is None)
    if before.returns is not None and after.returns is not None:
        assert after.returns.tolist() == before.returns[order].tolist()
    for original, shuffled in ((before.parts, after.parts), (before.levels, after.levels)):
        assert {key: part.tolist() for key, part in shuffled.items()} == {
            key: part[order].tolist() for key, part in original.items()
        }
    for key, codes in before.groups.items():
        pairs = set(zip(codes[order].tolist(), after.groups[key].tolist(), strict=True))
        assert len(pairs) == len(set(codes)) == len(set(after.groups[key])), f"{key}: other steps are compared"
        assert all((label == -1) == (other == -1) for label, other in pairs), key


@ANY
@settings(max_examples=10, deadline=None)
@given(rows=FULL)
def test_credit_is_finite_its_parts_add_up_and_every_name_is_explained(name, params, rows):
    batch = table_all(name, rows)
    credit = compute_credit(name, batch, **params)
    assert credit.advantage.dtype == np.float64
    assert np.isfinite(credit.advantage).all()
    for key, value in credit.metrics.items():
        assert isinstance(value, float), key
        assert np.isfinite(value), key
    assert "penalty" in credit.parts
    scale = sum(np.abs(part) for part in credit.parts.values())
    assert (np.abs(sum(credit.parts.values()) - credit.advantage) <= 1e-9 * scale + 1e-15).all()
    for key in (*credit.parts, *credit.levels, *credit.groups):
        assert describe_part(key, name), key
        assert f"credit/{key}/mean" in credit.metrics or key not in {**credit.parts, **credit.levels}
    assert credit.groups.keys() <= {*credit.parts, *credit.levels}
    for key, codes in credit.groups.items():  # nobody is compared across groups of episodes, but where all are
        whole = len(set(codes)) == 1 or key == "role_level"
        assert whole or all(len({*batch.group[codes == code]}) == 1 for code in {*codes} - {-1}), key


def test_the_glossary_has_no_name_too_many():
    seen = set()
    for name, params in [*VARIANTS, ("grpo_steps", {"modify": list(modifiers())}), ("hgpo", {"episode_level": True})]:
        credit = compute_credit(name, batch_of(3, 1.0), tokens=Tokens(range(3), [0.5] * 3), **params)
        for key in (*credit.parts, *credit.levels, *credit.groups):
            names = (f"{name}/{key}", key, re.sub(r"\d+", "<k>", key))
            seen.update(in_glossary[:1] if (in_glossary := [alias for alias in names if alias in MEANINGS]) else [])
    assert seen == MEANINGS.keys() - {"method"}


def batch_of(n, value=0.0):
    """n one-step trajectories of one group, all with the same fate."""
    return table(
        [value] * n,
        anchor=["state"] * n,
        action=["move"] * n,
        value=[0.3] * n,
        tokens=[5] * n,
        terminated=[True] * n,
        success=[True] * n,
        text=["You see a red door."] * n,
        extra={name: [value] * n for name, value in EXTRA.items()},
    )


@ANY
def test_no_steps(name, params):
    credit = compute_credit(name, batch_of(0), **params)
    assert credit.advantage.shape == (0,)
    assert all(np.isfinite(value) for value in credit.metrics.values())


@pytest.mark.parametrize("case", cases("zero_variance_float32"))
def test_a_constant_group_gets_exactly_nothing(case):
    """The released codes compute in float32 and blow the rounding of such groups up to 0.48."""
    batch = batch_of(case["inputs"]["group_size"], case["inputs"]["value"])
    for name, params in COMPARING:
        if name not in OF_RATES or 0 <= case["inputs"]["value"] <= 1:
            assert not compute_credit(name, batch, **params).advantage.any(), (name, params)


@pytest.mark.parametrize(("name", "params"), COMPARING, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_a_group_of_one_compares_with_nobody(name, params):
    nothing = {"singleton": "zero"} if "singleton" in params else {}
    alone = batch_of(1, 1.0 if name in OF_RATES else 10.0)
    assert compute_credit(name, alone, **{**params, **nothing}).advantage.tolist() == [0]


#: All but the statistics of released codes: a penalty is the penalised step's alone.
OWN_PENALTY = [(name, params) for name, params in VARIANTS if params.get("scope", "outcomes") == "outcomes"]
NO_COST = {"keep_penalty": 0.0}  # hae: what a kept subgoal costs is part of the reward


@pytest.mark.parametrize(("name", "params"), OWN_PENALTY, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@settings(max_examples=10, deadline=None)
@given(rows=FULL)
def test_a_penalty_is_taken_from_its_own_step_and_nothing_else(name, params, rows):
    free = compute_credit(name, table_all(name, [{**row, "penalty": 0.0} for row in rows]), **params)
    got = compute_credit(name, table_all(name, rows), **params)
    assert got.advantage.tolist() == (free.advantage - [row["penalty"] for row in rows]).tolist()


def lost_group(first_invalid, steps=5):
    """Four episodes from the same state, nothing won; those at first_invalid begin with an invalid action."""
    return as_batch(
        [
            {
                "group": "g",
                "trajectory": trajectory,
                "step": step,
                "reward": 0.0,
                "penalty": 0.1 if step == 0 and trajectory in first_invalid else 0.0,
                "anchor": "start" if step == 0 else (trajectory, step),
                "action": "move",
                "value": 0.0,
                "terminated": step == steps - 1,
                "success": False,
                "tokens": 5,
                "text": "a room",
                **EXTRA,
            }
            for trajectory in range(4)
            for step in range(steps)
        ]
    )


@pytest.mark.parametrize(("name", "params"), OWN_PENALTY, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("first_invalid", [(0,), (0, 1, 2)])
def test_where_nothing_was_won_only_the_invalid_steps_get_anything(name, params, first_invalid):
    if name == "ngrpo":
        return  # to lose is worse than what it compares with, a virtual success
    batch = lost_group(first_invalid)
    free = {key: NO_COST.get(key, value) for key, value in params.items()}
    assert compute_credit(name, batch, **free).advantage.tolist() == (-batch.penalty).tolist()


@pytest.mark.parametrize("scope", ["trajectories", "steps"])
def test_in_the_released_statistics_the_first_penalties_are_everybodys_credit(scope):
    """-0.1, -0.1, -0.1, 0 over the first steps: mean -0.075, std 0.05; over 20 rows mean -0.015, std 0.0366."""
    batch = lost_group((0, 1, 2))
    got = compute_credit("grpo_steps", batch, scope=scope).advantage
    valid, invalid = {"trajectories": (1.5, -0.5), "steps": (0.409426, -2.320078)}[scope]
    np.testing.assert_allclose(got, np.where(batch.penalty > 0, invalid, valid), rtol=1e-4)


@pytest.mark.parametrize(
    ("scope", "pay", "left"),
    [
        ("outcomes", 1, 0.835414),
        ("outcomes", 10, 0.835414),
        ("trajectories", 1, 0.748331),
        ("trajectories", 10, 0.916705),
    ],
)
def test_what_is_left_of_a_winners_invalid_step(scope, pay, left):
    """Half of eight episodes won. Inside the score, a penalty of 0.1 weighs by what the environment pays."""
    batch = table([0.0] + [pay] * 4 + [0.0] * 4, [0, *range(8)], step=[0] + [1] * 8, penalty=[0.0, 0.1] + [0.0] * 7)
    got = compute_credit("grpo_steps", batch, scope=scope).advantage
    np.testing.assert_allclose(got[:2], [0.935414, left], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "missing"), [(name, column) for name, spec in SHIPPED.items() for column in spec.needs]
)
def test_a_missing_column_is_named(name, missing):
    columns = {"anchor": ["A", "B"], "action": ["a", "b"], "value": [0.0, 0.0], "success": [True, False]}
    columns["tokens"] = [5, 5]
    extra = {name: [value] * 2 for name, value in EXTRA.items() if f"extra.{name}" != missing}
    columns.pop(missing, None)
    batch = StepBatch(group=["g"] * 2, trajectory=[0, 1], step=[0, 0], reward=[1.0, 0.0], extra=extra, **columns)
    with pytest.raises(ConfigError, match=rf"'{name}' needs the column '{missing}'"):
        compute_credit(name, batch)


@pytest.mark.parametrize("name", SHIPPED)
def test_columns_that_are_not_needed_may_be_missing(name):
    """proxmo asks for success in its default, which its own test covers."""
    columns = {"anchor": ["A", "A"], "action": ["a", "b"], "value": [0.0, 0.0], "success": [True, False]}
    columns |= {"tokens": [5, 5], "terminated": [True, True]}
    needs = SHIPPED[name].needs if name == "proxmo" else SHIPPED[name].columns(SHIPPED[name].params())
    needed = {column: columns[column] for column in needs if column in columns}
    extra = {column: [value] * 2 for column, value in EXTRA.items() if f"extra.{column}" in needs}
    if "candidate_score" in extra:
        extra["candidate_score"] = [1.0, 0.0]  # it is the reward there
    batch = StepBatch(group=["g"] * 2, trajectory=[0, 1], step=[0, 0], reward=[1.0, 0.0], extra=extra, **needed)
    params = {"success_rate": "clamped_score"} if name == "proxmo" else {}
    assert compute_credit(name, batch, **params).advantage[0] > 0


@pytest.mark.parametrize("name", [name for name, spec in estimators().items() if spec.tier != "from_paper"])
def test_tiers_above_from_paper_are_compared_with_recorded_outputs(name):
    texts = [path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "methods").glob("test_*.py")]
    tests = [test for text in texts for test in re.split(r"\n\n\n", text) if "def test_" in test]
    assert [test for test in tests if 'cases("' in test and f'"{name}"' in test]


# --- A vanishing change of the rewards changes the credit of every method vanishingly, or its page says where not -----
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


def noised(
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
            compute_credit(name, noised(1e-4, where), **params)
        return
    exact = compute_credit(name, noised(0.0, where), **params).advantage
    changes = [
        np.abs(compute_credit(name, noised(noise, where), **params).advantage - exact).max() for noise in (1e-4, 1e-7)
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
        batch, more = noised(noise, where, groups, columns), {"state": RUNNING, "tokens": tokens}
        return compute_credit("rloo_steps", batch, modify=modify, **more).advantage

    groups = (*WINS, (1, 1, 1, 1, 1))  # length_gate is for groups that are solved throughout
    number = sum(map(len, groups)) * STEPS
    of_episode = np.arange(number) // STEPS % 4
    gaps, rising = GAPS[:number], np.linspace(0.1, 0.9, number)

    plain = compute_credit("rloo_steps", noised(0.0, where, groups)).advantage
    exact = credit(0.0)
    assert np.abs(exact - plain).max() > 0.01  # the modifier does something here
    changes = [np.abs(credit(noise) - exact).max() for noise in (1e-4, 1e-7)]
    assert changes[0] < 1e-2
    assert changes[1] < 1e-5


@pytest.mark.parametrize("wins", [0, 1])
def test_a_group_that_is_constant_up_to_noise_has_no_larger_factor_than_one_of_two_outcomes(wins):
    """Of five rollouts at most 1/sqrt(1/5), on credit that is of unit size in both."""
    noisy = compute_credit("a_grae", noised(1e-4, "within", (*WINS, (wins,) * 5)))
    assert noisy.levels["a_grae/group_factor"].max() <= 5**0.5


@pytest.mark.parametrize(("name", "largest"), CONSTANT.items())
def test_noise_in_a_constant_batch_has_the_size_that_the_page_says(name, largest):
    credit = compute_credit(name, noised(1e-7, "within", ((0, 0, 0, 0, 0),) * 3)).advantage
    assert np.abs(credit).max() == pytest.approx(largest, abs=5e-3)
    coarse = compute_credit("grpo_steps", noised(1e-4, "within", ((0, 0, 0, 0, 0),) * 3)).advantage
    assert np.abs(coarse).max() == pytest.approx(1.24, abs=5e-3)


@pytest.mark.parametrize("name", ["grpo_steps", "rebn", "maxrl"])
def test_an_epsilon_above_the_noise_bounds_it(name):
    credit = compute_credit(name, noised(1e-7, "within", ((0, 0, 0, 0, 0),) * 3), epsilon=1e-3).advantage
    assert np.abs(credit).max() < 1e-3
