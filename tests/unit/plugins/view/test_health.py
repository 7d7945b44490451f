"""Each rule: a run in which it finds something, and one just below its threshold."""

import math
from pathlib import Path
from typing import Any

import naive_stats as naive
import numpy as np
import pandas as pd
import pytest
import synthetic_run
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from verl_turnkey.plugins.log.bounds import Shares, chosen
from verl_turnkey.plugins.log.schema import TABLES
from verl_turnkey.plugins.view import health, join, stats
from verl_turnkey.plugins.view.collapse import Curve, fall
from verl_turnkey.plugins.view.training import charts, success_by_step

SIZE, TURNS = 4, 5


def table(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[column.name for column in TABLES[name].columns if "*" not in column.name])


def make(steps: int, episode=lambda step, n: {}, turn=lambda step, n, t: {}, metrics=()) -> join.LoggedRun:
    """A sound run of two groups of four a step, with what the functions say different (``n``: episode of the step)."""
    episodes, turns = [], []
    for step in range(1, steps + 1):
        for n in range(2 * SIZE):
            key = f"{step}-{n}"
            sound = {"episode": key, "group": f"{step}-{n // SIZE}", "global_step": step, "validation": False}
            sound |= {"composed_return": float(n % 2), "success": n % 2 == 1, "truncated": False, "turns": TURNS}
            episodes.append(sound | episode(step, n))
            for t in range(TURNS):
                played = {"episode": key, "turn": t, "turn_in_row": 0, "anchor": f"s{t}", "action": f"a{t % 2}"}
                turns.append(played | {"valid": True, "prompt_cut": False} | turn(step, n, t))
    tables = [table("episodes", episodes), table("turns", turns), table("credit", []), table("updates", [])]
    logged = table("steps", [{"train_step": s, "name": name, "value": v} for s, name, v in metrics])
    return join.LoggedRun("made", Path(), {}, tables[0].assign(segment=""), join.join(*tables), logged)


def only_finding(run: join.LoggedRun, rule: str) -> health.Finding | None:
    """What the rule says, and that no other rule says anything."""
    findings = [health.Finding(**fields) for fields in health.findings(run)]
    assert all(finding.rule == rule for finding in findings), findings
    return findings[0] if findings else None


def test_a_sound_run_has_no_findings():
    assert health.findings(make(8)) == []
    assert health.findings(make(1)) == []


def metrics(name: str, *values: float) -> dict[str, Any]:
    """A metric in steps 1, 2, ..."""
    return {"metrics": [(step, name, value) for step, value in enumerate(values, 1)]}


LOST, WON = ({"composed_return": float(won), "success": won} for won in (False, True))
PROBABILITIES, VALIDATION = "training/rollout_probs_diff_mean", "val-aux/lake/failed/mean@1"


@pytest.mark.parametrize(
    ("rule", "steps", "run", "holds", "words"),
    [
        ("no_signal", 8, {"episode": lambda step, n: LOST if step >= 6 and n < SIZE else {}}, [6, 7, 8],
         ["50 % of the groups have no signal in steps 6 to 8", "all unsolved", "too hard"]),
        ("no_signal", 8, {"episode": lambda step, n: WON if step >= 6 and n < SIZE else {}}, [6, 7, 8], ["too easy"]),
        ("no_signal", 8, {"episode": lambda step, n: {"composed_return": 0.0} if step == 6 and n < SIZE else {}},
         None, []),
        ("states_do_not_repeat", 4, {"turn": lambda step, n, t: {"anchor": f"{n}.{t}"}}, [1, 2, 3, 4], ["Only 0 %"]),
        # the first state of a group is always the same: it does not count
        ("states_do_not_repeat", 4, {"turn": lambda step, n, t: {"anchor": f"{n}.{t}" if t else "start"}},
         [1, 2, 3, 4], []),
        ("states_do_not_repeat", 4, {"turn": lambda step, n, t: {"anchor": None}}, None, []),
        ("entropy_collapse", 8, metrics("actor/entropy", *[1.0] * 6, 0.1, 0.1), [7, 8], []),
        ("entropy_collapse", 8, metrics("actor/entropy", *[1.0] * 6, 0.3, 0.3), None, []),
        ("repetition", 4, {"turn": lambda step, n, t: {"anchor": "s0", "action": "a"} if step > 2 and t < 2 else {}},
         [3, 4], []),
        # the same action in another state, and in another episode, is none
        ("repetition", 4, {"turn": lambda step, n, t: {"action": "a"}}, None, []),
        ("prompts_cut", 4, {"turn": lambda step, n, t: {"prompt_cut": step > 2 and t < 1}}, [3, 4], []),
        ("prompts_cut", 4, {"turn": lambda step, n, t: {"prompt_cut": False}}, None, []),
        ("invalid_rising", 8, {"turn": lambda step, n, t: {"valid": step < 7 or t > 0}}, [7, 8], ["from 0 % to 20 %"]),
        ("invalid_rising", 8, {"turn": lambda step, n, t: {"valid": t > 0}}, None, []),
        ("invalid", 8, {"turn": lambda step, n, t: {"valid": t > 1}}, None, []),  # 40 %
        ("too_long", 4, {"episode": lambda step, n: {"truncated": n > 2}}, [1, 2, 3, 4], []),
        ("too_long", 4, {"episode": lambda step, n: {"truncated": n > 4}}, None, []),
        ("probabilities_differ", 4, metrics(PROBABILITIES, 0.01, 0.01, 0.2, 0.2), [3, 4], []),
        ("probabilities_differ", 4, metrics(PROBABILITIES, *[0.04] * 4), None, []),
        ("validation_failures", 4, metrics(VALIDATION, 0.0, 0.25, 0.0, 0.0), [2],
         ["25 % of the validation episodes failed at step 2"]),
        ("validation_failures", 4, metrics(VALIDATION, 0.0, 0.0), None, []),
    ],
)  # fmt: skip
def test_a_rule_holds_beyond_its_threshold(rule, steps, run, holds, words):
    finding = only_finding(make(steps, **run), rule)
    assert (finding and finding.steps) == holds
    assert all(word in finding.message for word in words)


def test_a_group_of_one_finished_episode_is_no_group_without_signal():
    def alone(step, n):
        failed = {"failed": "hung", "failed_kind": "timeout", "success": None, "composed_return": None}
        return failed if n % SIZE else {}

    for run in (make(8, lambda step, n: {"group": f"{step}-{n}"}), make(8, alone)):
        assert "no_signal" not in {finding["rule"] for finding in health.findings(run)}
    # of the two groups with several episodes one has no signal, however many of one there are
    pairs = make(8, lambda step, n: {"group": f"{step}-{n // 2 if n < 4 else n}", "composed_return": float(n == 0)})
    [message] = [finding["message"] for finding in health.findings(pairs) if finding["rule"] == "no_signal"]
    assert "50 % of the groups" in message


def test_a_collapse_names_its_step():
    """Solved by half of the episodes, from step 6 on by none; single successes keep the groups apart."""
    run = make(10, lambda step, n: {"success": n % 2 == 1 and (step < 6)})
    finding = only_finding(run, "collapse")
    assert finding.steps == [7, 8, 9, 10]  # where the mean of three steps is below half of the best
    assert "Success fell from 50 %" in finding.message
    assert finding.filter == "step=6&outcome=unsolved&split=training"
    assert finding.mark == 6
    assert "most of it at step 6" in finding.message


def success(solved: np.ndarray) -> Curve:
    """Of a run with these episodes, (steps, groups, episodes of a group)."""
    step, group, _ = np.indices(solved.shape).reshape(3, -1)
    return success_by_step(pd.DataFrame({"global_step": step, "group": group, "success": solved.ravel()}))


def simulated(rng: np.random.Generator, rates: np.ndarray, alike: float) -> np.ndarray:
    """Four groups of eight episodes a step; ``alike``: correlation of the success of two episodes of a group."""
    shape = (len(rates), 4, 1)
    if alike == 1:
        return np.broadcast_to(rng.random(shape) < rates[:, None, None], (len(rates), 4, 8))
    spread = 1 / alike - 1
    of_group = rng.beta(rates[:, None, None] * spread, (1 - rates[:, None, None]) * spread, shape)
    return rng.random((len(rates), 4, 8)) < of_group


@pytest.mark.parametrize(("alike", "rate"), [(0.5, 0.3), (0.5, 0.6), (1, 0.3)])
def test_noise_of_few_groups_is_hardly_ever_a_collapse(alike, rate):
    rng, runs = np.random.default_rng(0), 400
    curves = [success(simulated(rng, np.full(40, rate), alike)) for _ in range(runs)]
    assert sum(fall(curve) is not None for curve in curves) < 0.05 * runs
    assert sum(fall(curve._replace(episodes=np.inf)) is not None for curve in curves) > 0.5 * runs


@pytest.mark.parametrize("alike", [0.5, 1])
def test_a_real_collapse_is_told_though_the_groups_are_few(alike):
    rng, runs = np.random.default_rng(0), 400
    rates = np.repeat([0.9, 0.3], 20)
    drops = [fall(success(simulated(rng, rates, alike))) for _ in range(runs)]
    assert sum(drop is not None for drop in drops) > 0.95 * runs
    assert abs(np.median([drop.turn for drop in drops if drop]) - 20) <= 2


@pytest.mark.parametrize(
    ("solved", "worth"),
    [
        ([[1, 1, 0, 0], [1, 1, 0, 0]], 8),  # the groups have nothing to tell them apart
        ([[1, 1, 1, 1], [0, 0, 0, 0]], 2),
        ([[1, 1, 1, 0], [1, 0, 0, 0]], 4),  # 1/4 is the variance of an episode, 1/16 that of the mean of the groups
        ([[1, 1, 1, 1], [1, 1, 1, 1]], 2),  # nothing tells how alike they are
        ([[1, 1, 0, 0]], 1),
    ],
)
def test_what_the_episodes_of_a_step_are_worth(solved, worth):
    assert success(np.array([solved, solved], bool)).episodes == pytest.approx(worth)


def test_a_collapse_tells_what_changed_and_what_came_first():
    """Before success falls at step 7 the policy narrows, and one update is far too large; then all does the same."""

    def episode(step, n):
        return {"success": n % 2 == 1 and step < 7, "turns": 5 if step < 7 else 20, "composed_return": float(n % 2)}

    def turn(step, n, t):
        return {"action": "left" if step > 6 else f"a{t % 3}", "response_tokens": 9, "anchor": f"s{t}"}

    metrics = [(step, "actor/entropy", 1.0 if step < 6 else 0.5) for step in range(1, 13)]
    metrics += [(step, "actor/grad_norm", 30.0 if step == 5 else 1.0) for step in range(1, 13)]
    metrics += [(step, "actor/ppo_kl", 0.01 if step == 5 else 0.001) for step in range(1, 13)]  # as it may be
    finding = only_finding(make(12, episode, turn, metrics), "collapse")
    assert [(row["step"], row["what"], row["before"], row["after"]) for row in finding.evidence] == [
        (5, "norm of the gradient", "1", "30"),
        (6, "entropy", "1", "0.5"),
        (7, "success", "50 %", "0 %"),
        (7, "turns per episode", "5", "20"),
        (7, "the commonest action's share of the turns", "40 %", "100 %"),
    ]
    assert [row["what"] for row in finding.evidence if row["fall"]] == ["success"]


def test_failures_by_kind():
    def failing(step, n):
        return {"failed": "hung", "failed_kind": "timeout", "success": None} if n == 0 and step in (2, 3) else {}

    finding = only_finding(make(8, failing), "failures")
    assert finding.message == "2 of 64 episodes failed (2 timeout) and train nothing"
    assert (finding.steps, finding.filter) == ([2, 3], "outcome=failed")
    validation = make(8, lambda step, n: failing(step, n) and failing(step, n) | {"validation": True})
    assert only_finding(validation, "failures") is None


def test_a_run_of_which_every_episode_failed_has_no_turn_to_look_at():
    run = make(4, lambda step, n: {"failed": "hung", "failed_kind": "timeout", "success": None, "turns": 0})
    episodes = run.episodes.drop(columns="segment")
    joined = join.join(episodes, table("turns", []), table("credit", []), table("updates", []))
    empty = join.LoggedRun("made", Path(), {}, run.episodes, joined, run.steps)
    assert only_finding(empty, "failures").message == "32 of 32 episodes failed (32 timeout) and train nothing"
    assert charts(empty)


def test_failed_episodes_of_groups_that_were_not_logged_are_no_rate():
    """The log has all failed episodes, and of a share of the groups the others: rates are over these groups."""

    def failing(step, n):
        return {"failed": "hung", "failed_kind": "timeout", "success": None}

    run = make(8)
    other = make(8, failing)
    foreign = other.episodes.assign(episode="x" + other.episodes["episode"], group="x" + other.episodes["group"])
    episodes = pd.concat([run.episodes, foreign], ignore_index=True)
    ours = set(run.episodes["group"])
    kept = [group for group in ours if chosen(group, 0.5)]
    assert 0 < len(kept) < len(ours)
    logged = episodes[episodes["group"].isin(kept) | episodes["failed"].notna()].reset_index(drop=True)
    logged = logged[~(logged["failed"].notna() & logged["group"].map(lambda group: chosen(group, 0.5)))]
    logged = logged.reset_index(drop=True)
    turns = run.turns.drop(columns=["at", "reason"])[list(table("turns", []))]
    joined = join.join(logged, turns, table("credit", []), table("updates", []))
    made = join.LoggedRun("made", Path(), {}, logged, joined, run.steps, {"": Shares(0.5, 0.5)})
    assert logged["failed"].notna().sum() > 20
    assert health.findings(made) == []
    [success] = [chart for chart in charts(made) if chart["title"] == "Success"]
    assert set(success["series"][0]["y"]) == {0.5}
    assert health.findings(join.LoggedRun("made", Path(), {}, logged, joined, run.steps)) != []


def test_what_the_rules_look_at_is_drawn():
    def turn(step, n, t):
        return {"anchor": "s0", "action": "a0"} if step == 2 and t < 2 else {}

    run = make(2, lambda step, n: {"composed_return": 1.0} if step == 2 and n < SIZE else {}, turn)
    drawn = {chart["title"]: chart["series"] for chart in charts(run)}
    [signal], [vain, commonest] = drawn["Groups without signal"], drawn["Repetition"]
    assert (signal["x"], signal["y"]) == ([1, 2], [0.0, 0.5])
    assert vain["y"] == [0.0, 0.2]  # one of five turns
    assert commonest["y"] == [0.6, 0.8]  # a0 of a0 a1 a0 a1 a0, then of a0 a0 a0 a1 a0


def test_every_rule_has_a_test_and_words():
    source = Path(__file__).read_text(encoding="utf-8")
    for name, rule in health.RULES.items():
        assert f'"{name}"' in source
        assert rule.__doc__


def test_an_invented_run_has_plausible_findings(tmp_path):
    synthetic_run.write(tmp_path / "run", episodes=160, steps=6)
    findings = health.findings(join.load(tmp_path / "run"))
    assert {finding["rule"] for finding in findings} <= {"no_signal", "failures", "too_long"}


def test_invalid_actions_from_the_first_step_come_before_hard_tasks():
    def turn(step, n, t):
        written = {"valid": t == 0, "parse_note": None if t == 0 else "no <action>", "response_tokens": 4 if t else 2}
        return written if step < 4 else {"valid": True, "response_tokens": 2}

    finding = only_finding(make(8, turn=turn), "invalid")
    assert finding.steps == [1, 2, 3]
    assert "80 % of the turns in steps 1 to 3 have no valid action, most often: no <action>" in finding.message
    assert "100 % of them end at 4 tokens" in finding.message

    lost = make(8, lambda step, n: {"composed_return": 0.0, "success": False}, lambda step, n, t: {"valid": False})
    messages = {finding["rule"]: finding["message"] for finding in health.findings(lost)}
    assert "100 % of their turns have no valid action: fix that first" in messages["no_signal"]
    assert "too hard" not in messages["no_signal"]
    assert "tokens" not in messages["invalid"]


# --- Statistics of evaluations: against naive twins, published numbers, and the coverage of intervals in simul --------
few = settings(max_examples=25, deadline=None)
scores = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9)


# --- pass@k, Wilson ---------------------------------------------------------------------------------------------------
@few
@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_counts_the_choices(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert stats.pass_at_k([c], n, k) == pytest.approx([naive.pass_at_k(c, n, k)], abs=1e-12)


def test_pass_at_k_of_many_samples_and_of_tasks_with_different_numbers():
    assert stats.pass_at_k([1000], 2000, 1000)[0] == pytest.approx(1.0)
    assert stats.pass_at_k([0, 1, 4], [4, 8, 4], 2) == pytest.approx([0.0, 0.25, 1.0])


@pytest.mark.parametrize(("solved", "samples", "k"), [([1], 4, 5), ([1], 4, 0), ([5], 4, 1), ([-1], 4, 1), ([], 4, 1)])
def test_what_has_no_pass_at_k(solved, samples, k):
    with pytest.raises(ValueError, match=r"expected|needs"):
        stats.pass_at_k(solved, samples, k)


NEWCOMBE = [  # 1998, Statistics in Medicine 17:857, table I, method 3
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0, 0.1611),
    (1, 29, 0.0061, 0.1718),
]


@pytest.mark.parametrize(("c", "n", "low", "high"), NEWCOMBE)
def test_wilson_of_the_literature(c, n, low, high):
    assert stats.wilson(c / n, n) == pytest.approx((c / n, low, high), abs=5e-5)


@few
@given(c=st.integers(0, 12), n=st.integers(12, 40), confidence=st.sampled_from([0.5, 0.9, 0.99]))
def test_wilson_inverts_the_test(c, n, confidence):
    interval = stats.wilson(c / n, n, confidence)
    assert interval.low <= c / n <= interval.high
    assert interval[1:] == pytest.approx(naive.wilson(c / n, n, confidence), abs=1e-9)
    assert interval.low < interval.high


def test_success_counts_what_the_samples_are_worth():
    alike = stats.success([8] * 10 + [0] * 10, 8)  # every sample repeats its task: 20 samples
    assert alike[1:] == pytest.approx(stats.wilson(0.5, 20)[1:])
    free = stats.success([4] * 20, 8)  # no task differs from another: all 160
    assert free == stats.wilson(0.5, 160)
    for solved, p in ((0, 0.0), (8, 1.0)):  # nothing tells how alike they are: the tasks
        assert stats.success([solved] * 20, 8) == stats.wilson(p, 20)
    assert stats.success([3], 8) == stats.wilson(3 / 8, 1)
    means = np.array([1, 3, 6, 2]) / 8
    p = means.mean()
    effective = p * (1 - p) / (means.var(ddof=1) / 4)
    assert 4 < effective < 32
    assert stats.success([1, 3, 6, 2], 8) == stats.wilson(p, effective)


def test_the_interval_holds_what_it_says():
    """50 tasks x 8 samples whose chances differ: the mean chance lies in 95 % of the intervals, not of plain ones."""
    rng = np.random.default_rng(0)
    trials, ours, plain, boot = 300, 0, 0, 0
    for trial in range(trials):
        solved = rng.binomial(8, rng.beta(0.5, 0.5, size=50))
        _, low, high = stats.success(solved, 8)
        ours += low <= 0.5 <= high
        _, low, high = stats.wilson(solved.mean() / 8, 400)
        plain += low <= 0.5 <= high
        _, low, high = stats.bootstrap(solved / 8, resamples=400, seed=trial)
        boot += low <= 0.5 <= high
    assert ours / trials > 0.92
    assert boot / trials > 0.90
    assert plain / trials < 0.75


# --- resampling -------------------------------------------------------------------------------------------------------
def test_bootstrap_of_a_mean_is_nearly_normal():
    values = np.random.default_rng(1).normal(3, 2, size=200)
    value, low, high = stats.bootstrap(values, resamples=2000, seed=5)
    half = 1.96 * values.std() / 200**0.5
    assert value == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((value - half, value + half), abs=0.03)
    assert stats.bootstrap(values, resamples=2000, seed=5) == (value, low, high)
    assert stats.bootstrap(values, resamples=2000, seed=6).low != low


def test_the_runs_of_a_task_stay_with_it():
    """Tasks of different difficulty whose runs agree: no uncertainty, which resampling tasks would claim."""
    table = np.tile([0.1, 0.5, 0.9], (4, 1))
    assert stats.bootstrap(table, resamples=50) == pytest.approx((0.5, 0.5, 0.5))
    assert stats.bootstrap(table.T, resamples=50).low < 0.5


def test_a_bootstrap_in_pieces_draws_as_many(monkeypatch):
    monkeypatch.setattr(stats, "CHUNK", 50)
    seen = []

    def mean(values, axis):
        seen.append(values.shape)
        return np.mean(values, axis=axis)

    stats.bootstrap(np.arange(8.0), mean, resamples=100)
    assert sum(shape[0] for shape in seen if len(shape) == 2) == 100
    whole = stats.improvement([1.0, 2, 3], [2.0, 3, 4], resamples=99)
    assert whole.low <= whole.value <= whole.high


@few
@given(values=scores)
def test_interquartile_mean(values):
    assert stats.interquartile_mean(values) == pytest.approx(naive.interquartile_mean(values))
    assert stats.interquartile_mean(values) == pytest.approx(trim_mean(values, 0.25))


@few
@given(runs=st.integers(1, 4), others=st.integers(1, 3), tasks=st.integers(1, 3), data=st.data())
def test_improvement(runs, others, tasks, data):
    a, b = (
        [data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=tasks, max_size=tasks)) for _ in range(number)]
        for number in (runs, others)
    )
    value, low, high = stats.improvement(a, b, resamples=20)
    assert value == pytest.approx(naive.improvement(a, b))
    assert 0 <= low <= high <= 1
    assert stats.improvement(b, a, resamples=20).value == pytest.approx(1 - value)


def test_numbers_of_rliable():
    """Agarwal et al. 2021, tests of version 1.2.0: runs x tasks."""
    x, y = np.array([[1, 2], [2, 2], [1, 1], [2, 1]]), np.array([[1, 1], [2, 2], [3, 3]])
    assert stats.bootstrap(x, stats.interquartile_mean).value == 1.5
    assert stats.bootstrap(y, stats.interquartile_mean).value == 2
    assert stats.improvement(x, y).value == pytest.approx(1 / 3)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([[1.0, 2]], [[1.0]]), ([[[1.0]]], [1.0])])
def test_what_cannot_be_compared(a, b):
    with pytest.raises(ValueError, match="expected"):
        stats.improvement(a, b)


# --- learning curves --------------------------------------------------------------------------------------------------
def test_area_of_curves_by_hand():
    assert stats.area([0, 10, 20], [0, 1, 1], 0, 20) == 0.75
    assert stats.area([0, 10, 20], [0, 1, 1], 0, 10) == 0.5  # the budget of the shortest curve
    assert stats.area([0, 10], [0, 1], 0, 5) == 0.25  # between two evaluations
    assert stats.area([5], [0.3], 5, 5) == 0.3
    for wrong in ([0, 10], [2, 20], [10, 0]):
        with pytest.raises(ValueError, match="increasing x"):
            stats.area(wrong, [0, 1], 1, 15)


@few
@given(heights=st.lists(st.floats(0, 1), min_size=2, max_size=6), a=st.floats(0, 0.4), b=st.floats(0.6, 1))
def test_area(heights, a, b):
    x = [float(i * i) for i in range(len(heights))]
    area = stats.area(x, heights, a * x[-1], b * x[-1])
    assert area == pytest.approx(naive.area(list(zip(x, heights, strict=True)), a * x[-1], b * x[-1]), abs=2e-3)


def test_a_level_must_hold():
    assert stats.steps_to([0, 5, 10, 15, 20], [0.2, 0.9, 0.5, 0.8, 0.9], 0.8) == 15
    assert stats.steps_to([0, 5, 10], [0.8, 0.8, 0.1], 0.8) == 0
    assert stats.steps_to([0, 5, 10], [0.2, 0.5, 0.9], 0.8) == math.inf  # the last one alone
    assert stats.steps_to([0], [0.9], 0.8) == math.inf


@pytest.mark.parametrize(
    ("costs", "summary"),
    [
        ([10, 20, 40, math.inf, math.inf], "3 of 5, median 40"),
        ([10, math.inf, math.inf], "1 of 3"),
        ([10, 20], "2 of 2, median 15"),
        ([8378.464, 12000.0], "2 of 2, median 10189"),
        ([0.5, 0.75], "2 of 2, median 0.625"),
        ([], "0 of 0"),
    ],
)
def test_runs_that_did_not_reach_it_count_as_infinite(costs, summary):
    assert stats.reached(costs) == summary
