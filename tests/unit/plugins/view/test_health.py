"""Each rule: a run in which it finds something, and one just below its threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic_run

from verl_turnkey.plugins.log.bounds import Shares, chosen
from verl_turnkey.plugins.log.schema import TABLES
from verl_turnkey.plugins.view import health, join
from verl_turnkey.plugins.view.collapse import Curve, fall
from verl_turnkey.plugins.view.training import charts, success_by_step

SIZE, TURNS = 4, 5


def table(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[column.name for column in TABLES[name].columns if "*" not in column.name])


def make(steps: int, episode=lambda step, n: {}, turn=lambda step, n, t: {}, metrics=()) -> join.Run:
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
    return join.Run("made", Path(), {}, tables[0].assign(segment=""), join.join(*tables), logged)


def only_finding(run: join.Run, rule: str) -> health.Finding | None:
    """What the rule says, and that no other rule says anything."""
    findings = [health.Finding(**fields) for fields in health.findings(run)]
    assert all(finding.rule == rule for finding in findings), findings
    return findings[0] if findings else None


def test_a_sound_run_has_no_findings():
    assert health.findings(make(8)) == []
    assert health.findings(make(1)) == []


def test_groups_without_signal_are_told_with_the_steps_from_which_on():
    run = make(8, lambda step, n: {"composed_return": 0.0, "success": False} if step >= 6 and n < SIZE else {})
    finding = only_finding(run, "no_signal")
    assert finding.steps == [6, 7, 8]
    assert "50 % of the groups have no signal in steps 6 to 8" in finding.message
    assert "all lost" in finding.message
    assert "too hard" in finding.message
    easy = make(8, lambda step, n: {"composed_return": 1.0, "success": True} if step >= 6 and n < SIZE else {})
    assert "too easy" in only_finding(easy, "no_signal").message
    assert (
        only_finding(make(8, lambda step, n: {"composed_return": 0.0} if step == 6 and n < SIZE else {}), "no_signal")
        is None
    )


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


def test_states_that_do_not_repeat():
    alone = make(4, turn=lambda step, n, t: {"anchor": f"{n}.{t}"})
    assert "Only 0 %" in only_finding(alone, "states_do_not_repeat").message
    # the first state of a group is always the same: it does not count
    first = make(4, turn=lambda step, n, t: {"anchor": f"{n}.{t}" if t else "start"})
    assert only_finding(first, "states_do_not_repeat").steps == [1, 2, 3, 4]
    without = make(4, turn=lambda step, n, t: {"anchor": None})
    assert only_finding(without, "states_do_not_repeat") is None


@pytest.mark.parametrize(("last", "steps"), [(0.1, [7, 8]), (0.3, None)])
def test_entropy_that_collapses(last, steps):
    metrics = [(step, "actor/entropy", 1.0 if step < 7 else last) for step in range(1, 9)]
    finding = only_finding(make(8, metrics=metrics), "entropy_collapse")
    assert (finding and finding.steps) == steps


def test_a_collapse_names_its_step():
    """Solved by half of the episodes, from step 6 on by none; single successes keep the groups apart."""
    run = make(10, lambda step, n: {"success": n % 2 == 1 and (step < 6)})
    finding = only_finding(run, "collapse")
    assert finding.steps == [7, 8, 9, 10]  # where the mean of three steps is below half of the best
    assert "Success fell from 50 %" in finding.message
    assert finding.filter == "step=6&outcome=lost&split=training"
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


def test_actions_repeated_in_vain():
    def stuck(step, n, t):
        return {"anchor": "s0", "action": "a"} if step > 2 and t < 2 else {}

    assert only_finding(make(4, turn=stuck), "repetition").steps == [3, 4]
    # the same action in another state, and in another episode, is none
    assert only_finding(make(4, turn=lambda step, n, t: {"action": "a"}), "repetition") is None


@pytest.mark.parametrize(("share", "steps"), [(1, [3, 4]), (0, None)])
def test_prompts_cut(share, steps):
    finding = only_finding(make(4, turn=lambda step, n, t: {"prompt_cut": step > 2 and t < share}), "prompts_cut")
    assert (finding and finding.steps) == steps


def test_invalid_actions_that_rise():
    finding = only_finding(make(8, turn=lambda step, n, t: {"valid": step < 7 or t > 0}), "invalid_rising")
    assert finding.steps == [7, 8]
    assert "from 0 % to 20 %" in finding.message
    assert only_finding(make(8, turn=lambda step, n, t: {"valid": t > 0}), "invalid_rising") is None


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
    empty = join.Run("made", Path(), {}, run.episodes, joined, run.steps)
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
    made = join.Run("made", Path(), {}, logged, joined, run.steps, {"": Shares(0.5, 0.5)})
    assert logged["failed"].notna().sum() > 20
    assert health.findings(made) == []
    [success] = [chart for chart in charts(made) if chart["title"] == "Success"]
    assert set(success["series"][0]["y"]) == {0.5}
    assert health.findings(join.Run("made", Path(), {}, logged, joined, run.steps)) != []


def test_episodes_that_end_at_a_limit():
    assert only_finding(make(4, lambda step, n: {"truncated": n > 2}), "too_long").steps == [1, 2, 3, 4]
    assert only_finding(make(4, lambda step, n: {"truncated": n > 4}), "too_long") is None


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
    assert only_finding(make(8, turn=lambda step, n, t: {"valid": t > 1}), "invalid") is None  # 40 %

    lost = make(8, lambda step, n: {"composed_return": 0.0, "success": False}, lambda step, n, t: {"valid": False})
    messages = {finding["rule"]: finding["message"] for finding in health.findings(lost)}
    assert "100 % of their turns have no valid action: fix that first" in messages["no_signal"]
    assert "too hard" not in messages["no_signal"]
    assert "tokens" not in messages["invalid"]


def test_probabilities_that_differ_between_rollout_and_trainer():
    name = "training/rollout_probs_diff_mean"
    finding = only_finding(
        make(4, metrics=[(s, name, 0.01 if s < 3 else 0.2) for s in range(1, 5)]), "probabilities_differ"
    )
    assert finding.steps == [3, 4]
    assert only_finding(make(4, metrics=[(s, name, 0.04) for s in range(1, 5)]), "probabilities_differ") is None


def test_validation_episodes_that_failed():
    name = "val-aux/lake/failed/mean@1"
    finding = only_finding(make(4, metrics=[(2, name, 0.25), (4, name, 0.0)]), "validation_failures")
    assert finding.steps == [2]
    assert "25 % of the validation episodes failed at step 2" in finding.message
    assert only_finding(make(4, metrics=[(2, name, 0.0)]), "validation_failures") is None
