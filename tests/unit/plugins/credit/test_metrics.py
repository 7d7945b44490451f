"""Metrics of several batches are those of one batch of all their episodes."""

import math
import re
import statistics
from typing import Any

import numpy as np
import pytest
from step_tables import nested, table

from verl_turnkey.advantage import RecordError, make_record, make_step
from verl_turnkey.plugins import notices
from verl_turnkey.plugins.credit.metrics import (
    Signals,
    combine,
    decision_density,
    decision_metrics,
    episode_metrics,
    reward_metrics,
    row_metrics,
    signal_metrics,
    signals,
    warn_of_branches,
    warn_of_turn_limit,
)
from verl_turnkey.plugins.credit.rows import Rows, read_rows


def batch(lengths: list[int], solved: int, failed: int, groups: int, seed: int) -> tuple[dict[str, float], np.ndarray]:
    """What is logged of episodes of these lengths, and the credit of their steps."""
    credit = np.random.default_rng(seed).normal(size=sum(lengths))
    count = len(lengths) + failed
    metrics = {
        "episode/count": float(count),
        "episode/failed": float(failed),
        **({"episode/failed/timeout": float(failed)} if failed else {}),
        "episode/missing": float(seed),
        "episode/success_rate": solved / count,
        "episode/invalid_rate": 0.1 * seed,
        "credit/anchor_groups": float(groups),
        "credit/groups": 2.0,
    }
    if lengths:
        metrics |= {
            "episode/length/mean": float(np.mean(lengths)),
            "episode/length/max": float(max(lengths)),
            "episode/composed_return.terminal/mean": solved / len(lengths),
            "credit/step/mean": float(credit.mean()),
            "credit/anchor_group_size/mean": len(credit) / groups,
            "credit/share_steps_in_anchor_groups": 0.5,
            "credit/level_1/share_steps_in_groups": 0.8,
            "credit/own_group_size/mean": 3.0,
        }
    return metrics, credit


def test_each_is_a_mean_of_what_it_counts():
    parts = [batch([5] * 8, 8, 0, 10, 1), batch([50] * 6, 0, 2, 20, 2), batch([], 0, 4, 0, 0)]
    combined = combine([metrics for metrics, _ in parts])
    credit = np.concatenate([credit for _, credit in parts])
    assert combined == pytest.approx(
        {
            "episode/count": 20,
            "episode/failed": 6,
            "episode/failed/timeout": 6,
            "episode/missing": 3,
            "episode/success_rate": 8 / 20,
            "episode/invalid_rate": (40 * 0.1 + 300 * 0.2) / 340,
            "episode/length/mean": 340 / 14,
            "episode/length/max": 50,
            "episode/composed_return.terminal/mean": 8 / 14,
            "credit/anchor_groups": 30,
            "credit/groups": 6,
            "credit/anchor_group_size/mean": 340 / 30,
            "credit/step/mean": credit.mean(),
            "credit/share_steps_in_anchor_groups": 0.5,
            "credit/level_1/share_steps_in_groups": 0.8,
            "credit/own_group_size/mean": 3.0,
        }
    )


def test_a_density_of_covered_turns_weighs_by_their_number():
    """5 of 10 turns and 10 of 100."""
    parts = [
        {"episode/count": 2.0, "episode/length/mean": length, "episode/decisions/covered": covered, **density}
        for length, covered, density in [
            (5.0, 0.5, {"episode/decisions/density": 0.2}),
            (50.0, 0.1, {"episode/decisions/density": 0.5}),
            (4.0, 0.0, {}),
        ]
    ]
    combined = combine(parts)
    assert combined["episode/decisions/covered"] == pytest.approx(15 / 118)
    assert combined["episode/decisions/density"] == pytest.approx((5 * 0.2 + 10 * 0.5) / 15)


def test_one_batch_stays_as_it_is():
    metrics, _ = batch([3, 4], 1, 1, 2, 1)
    assert combine([metrics]) == pytest.approx(metrics)
    assert combine([]) == {}


def played(*episodes: list[dict[str, Any]], branch: dict[str, Any] | None = None, groups: str = "g") -> Rows:
    """A row per step in any order, one that failed beside, and of each episode a ``branch``, if it is given."""
    records = {"g_99_0": make_record([], failed="it died")}
    for session, episode in enumerate(episodes):
        name = f"{groups[session % len(groups)]}_{session}"
        for t in reversed(range(len(episode))):
            records[f"{name}_{t}"] = make_record([make_step(**{"step": t, "reward": 0.0, **episode[t]})])
        if branch is not None:
            away = {"step": 0, "reward": session % 3, "anchor": episode[0].get("anchor"), **branch}
            records[f"{name}_98"] = make_record([make_step(**away)], branch=1)
    return table(records)


def test_a_failed_episode_counts_as_not_solved():
    ends = ([False, True, True], [False, False], [False])
    metrics = episode_metrics(played(*([{"success": solved} for solved in episode] for episode in ends)))
    assert metrics["episode/success_rate"] == 1 / 4
    assert (metrics["episode/count"], metrics["episode/failed"]) == (4, 1)
    assert (metrics["episode/length/mean"], metrics["episode/length/max"]) == (2, 3)


def test_of_a_rollout_that_forked_the_first_trajectory_counts():
    """Two rollouts; the first forked at its step 1, and two branches go on from there."""
    held = [(1, range(1, 2), True), (2, range(1, 5), False), (0, range(3), False)]
    steps = [[make_step(step=t, reward=1.0, success=s) for t in numbers] for _, numbers, s in held]
    records = [make_record(turns, branch=branch) for turns, (branch, *_) in zip(steps, held, strict=True)]
    records.append(make_record([make_step(step=0, reward=0.5, success=True)]))
    infos = [{"branching/branches": 2.0, "composed_return.step": float(i)} for i in (0, 1, 2, 0)]
    extra_fields = [{"turnkey": record, "reward_extra_info": info} for record, info in zip(records, infos, strict=True)]
    keys = ["g_0_0", "g_0_1", "g_0_2", "g_1_0"]
    masks = [[1], [1, 0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1], [1]]
    rows = table(dict(zip(keys, records, strict=True)), nested(masks))
    assert rows.steps.ids["trajectory"] == ["g_0.1", "g_0.2", "g_0", "g_1"]
    assert (rows.steps.n_groups, rows.branch.tolist()) == (1, [1, 2, 2, 2, 2, 0, 0, 0, 0])
    metrics = episode_metrics(rows)
    assert (metrics["episode/count"], metrics["episode/success_rate"]) == (2, 0.5)
    assert (metrics["episode/length/mean"], metrics["episode/composed_return/mean"]) == (2, 1.75)
    assert reward_metrics(rows, keys, extra_fields) == {
        "episode/composed_return.step/mean": 1.0,
        "branching/branches": 2.0,
    }
    tags = [{"seq_len": 9}] * 4
    assert row_metrics(rows, tags, extra_fields)["rows/per_episode"] == 2
    assert "branching/cached_prompt_share" not in row_metrics(rows, tags, extra_fields)
    for fields, shares in zip(extra_fields, ([0.5], [0.9, 0, 0, 0], [0, 0, 0], [0]), strict=True):
        fields["turnkey_cached"] = shares
    of_rows = row_metrics(rows, tags, extra_fields)
    assert of_rows["branching/cached_prompt_share"] == 0.7  # of the branches' first turns
    assert of_rows["rows/cached_prompt_share"] == pytest.approx(1.4 / 9)


def test_what_rows_hold():
    """Two rows of one episode and one row of another, which has two turns; a failed one and a padding row beside."""
    turns = [make_step(step=t, reward=0.0) for t in range(2)]
    held = [turns[:1], turns[1:], turns, [], turns[:1]]
    records = [make_record(steps, failed=None if steps else "it died") for steps in held]
    extra_fields = [
        {"turnkey": record, "turnkey_break": why}
        for record, why in zip(records, ["first", "prefix", "first", None, "first"], strict=True)
    ]
    masks = nested([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    tags = [{"seq_len": n, "is_padding": n == 1000} for n in (5, 7, 9, 100, 1000)]
    rows = read_rows(["g_0_0", "g_0_1", "g_1_0", "g_2_0", "pad_0_0"], tags, extra_fields, masks)
    extra_fields[0]["turnkey_cached"], extra_fields[2]["turnkey_cached"] = [0.0], [0.5, 1.0]
    assert row_metrics(rows, tags, extra_fields) == {
        "rows/per_episode": 1.5,
        "rows/trained_tokens": 6.0,
        "rows/masked_tokens": 15.0,
        "rows/cached_prompt_share": 0.5,
        "rows/break/prefix": 1.0,
    }
    for fields in extra_fields:  # of a loop that says nothing
        del fields["turnkey_break"]
    assert not [name for name in row_metrics(rows, tags, extra_fields) if "break" in name]
    nothing = read_rows(["g_2_0"], tags[3:4], extra_fields[3:4], nested([[0] * 4]))
    assert row_metrics(nothing, tags[3:4], extra_fields[3:4]) == {}


def test_rows_of_several_batches():
    parts = [
        {"episode/count": 3.0, "rows/per_episode": 1.0, "rows/trained_tokens": 5.0, "rows/break/full": 1.0},
        {"episode/count": 1.0, "rows/per_episode": 3.0, "rows/trained_tokens": 7.0, "rows/masked_tokens": 2.0},
    ]
    assert combine(parts) == {
        "episode/count": 4.0,
        "rows/per_episode": 1.5,
        "rows/trained_tokens": 12.0,
        "rows/masked_tokens": 2.0,
        "rows/break/full": 1.0,
    }


def test_a_failed_episode_has_nothing_to_train():
    with pytest.raises(RecordError, match="g_1_0: a failed episode must be fully masked"):
        table({"g_1_0": make_record([], failed="it died")}, nested([[1]]))


def test_a_batch_whose_branches_all_failed_is_said(monkeypatch: pytest.MonkeyPatch):
    warnings: list[str] = []
    monkeypatch.setattr("verl_turnkey.plugins.credit.metrics.warn_once", warnings.append)
    for failed, measured in ((0.0, 0.0), (2.0, 0.5), (0.0, 3.0)):
        warn_of_branches({"branching/failed": failed, "branching/measured": measured, "branching/trained": 0.0})
    warn_of_branches({})
    assert warnings == []
    warn_of_branches({"branching/failed": 0.5, "branching/measured": 0.0, "branching/trained": 0.0})
    assert "all branches of a batch failed" in warnings[0]


def test_a_turn_limit_that_misleads_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notices, "_warned", set())
    names = ("share_cut_early", "turn_limit", "prior", "share_steps_met")
    for values in ((0.1, 20.0, 3.0, 0.9), (0.0, 20.0, 30.0, 0.4), (0.23, 20.0, 3.0, 0.9), (0.4, 20.0, 10.0, 0.5)):
        warn_of_turn_limit({f"credit/{name}": value for name, value in zip(names, values, strict=True)})
    warn_of_turn_limit({})
    warn_of_turn_limit({"credit/prior": 30.0, "credit/share_steps_met": 0.9}, fitted=False)
    cut, prior = [record.getMessage() for record in caplog.records]
    assert cut.startswith("23% of the episodes of a batch were cut before the turn limit")
    assert "on average 20.0 turns" in cut
    assert "turnkey.rollout.max_turns" in cut
    assert "credit/prior is 10" in prior


def naive(turns: list[tuple[int, int, int, float]]) -> tuple[float, float]:
    """Of turns as state, action, trajectory and what is still earned."""
    covered = decisions = 0
    for state, action, _, _ in turns:
        first: dict[tuple[bool, int], float] = {}
        for s, a, trajectory, ahead in turns:
            if s == state:
                first.setdefault((a == action, trajectory), ahead)
        own = [ahead for (same, _), ahead in first.items() if same]
        other = [ahead for (same, _), ahead in first.items() if not same]
        if len(own) < 2 or len(other) < 2:
            continue
        covered += 1
        error = math.sqrt(statistics.variance(own) / len(own) + statistics.variance(other) / len(other))
        decisions += abs(statistics.mean(own) - statistics.mean(other)) > 2 * error + 1e-9
    return decisions / covered if covered else math.nan, covered / len(turns)


@pytest.mark.parametrize("seed", range(40))
def test_equals_a_loop_over_all_turns(seed):
    rng = np.random.default_rng(seed)
    turns = [
        (int(rng.integers(4)), int(rng.integers(1, 4)), trajectory, float(rng.choice([0.0, 1.0, 1e4])))
        for trajectory in range(rng.integers(1, 9))
        for _ in range(rng.integers(1, 6))
    ]
    got = decision_density(*(np.array(column) for column in zip(*turns, strict=True)))
    assert got == pytest.approx(naive(turns), nan_ok=True)


def made(*episodes: list[tuple[str, str, float]]) -> dict[str, float]:
    """The turns of each episode, as state, action and reward."""
    named = ([dict(zip(("anchor", "action", "reward"), turn, strict=True)) for turn in turns] for turns in episodes)
    return decision_metrics(played(*named, branch={"action": "away"}, groups="gh"))


def test_metrics_of_rows():
    """Left wins and right loses, after a corridor in which nothing is to be chosen."""
    won, lost = [("hall", "on", 0.5), ("fork", "left", 1.0)], [("hall", "on", 0.5), ("fork", "right", 0.0)]
    assert made(*[won] * 4, *[lost] * 4) == {"episode/decisions/covered": 0.5, "episode/decisions/density": 1.0}
    # what was earned before the turn does not count, and without a second episode there is no error to compare with
    late = [("hall", "on", 7.0), ("fork", "left", 0.0)]
    assert made(*[late] * 4, *[lost] * 4) == {"episode/decisions/covered": 0.5, "episode/decisions/density": 0.0}
    assert made(won, won, lost, lost) == {"episode/decisions/covered": 0.0}


def test_rows_without_states_or_episodes_have_none():
    assert decision_metrics(played([{"action": "on"}])) == {}
    assert made() == {}


def loops(calls: str) -> int:
    return signals([ord(call) for call in calls], [True] * len(calls), False).loops


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        ("", 0),
        ("aa", 0),
        ("aaa", 1),
        ("aaaaaaa", 1),
        ("aaabaaa", 2),
        ("aabaab", 0),
        ("ababa", 0),
        ("ababab", 1),
        ("abababababab", 1),
        ("abababccbdbdbdaaa", 3),
        ("abcabcabc", 0),
    ],
)
def test_loops_by_hand(calls, number):
    assert loops(calls) == number


@pytest.mark.parametrize("seed", range(30))
def test_loops_like_expressions_over_text(seed):
    """A stretch of two calls in turn may share its last call with the next one: matches look ahead."""
    rng = np.random.default_rng(seed)
    calls = "".join(rng.choice(list("ab" if seed % 2 else "abc"), 40))
    repeated = len(re.findall(r"(?:^|(?<=(.)))(?!\1)(?=(.)\2\2)", calls))
    longest = [m.end() - m.start() for m in (_turns(calls, start) for start in range(len(calls))) if m]
    assert longest
    stretches = {_turns(calls, start).end() for start in range(len(calls)) if _is_long(_turns(calls, start))}
    assert loops(calls) == repeated + len(stretches)


def _turns(calls: str, start: int) -> re.Match[str] | None:
    return re.compile(r"(.)(?!\1)(.)(?:\1\2)*\1?|.").match(calls, start)


def _is_long(match: re.Match[str] | None) -> bool:
    return match is not None and match.end() - match.start() >= 6


def test_the_score_of_the_released_port():
    assert Signals(0, 0, False).score == 50
    assert Signals(2, 1, True).score == 50 - 16 - 5 - 3
    assert Signals(9, 0, False).score == 0


def signals_made(*episodes: list[dict[str, Any]]) -> dict[str, float]:
    return signal_metrics(played(*episodes, branch={"step": 9, "anchor": None, "valid": False, "truncated": True}))


def test_signals_of_rows():
    stuck = [{"anchor": "wall", "action": "forward"}] * 3
    walks = [{"anchor": f"cell {t}", "action": "forward"} for t in range(5)]
    fails = [{"anchor": "s", "action": None, "valid": False}] * 4
    fails[-1] = {**fails[-1], "truncated": True}
    assert signals_made(stuck, walks, fails, walks[:1]) == {
        "episode/signals/failures": 4 / 4,
        "episode/signals/loops": 1 / 4,
        "episode/signals/exhausted": 1 / 4,
        "episode/signals/share": 2 / 4,
        "episode/signals/score": pytest.approx((45 + 50 + 50 - 32 - 3 + 50) / 4),
    }


def test_signals_without_states_and_without_actions():
    assert signals_made([{"action": "forward"}] * 5)["episode/signals/loops"] == 1
    assert signals_made([{"anchor": "s"}] * 5) == {}
    assert signals_made() == {}
