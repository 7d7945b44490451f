"""Kept lines are the whole plan, each with a command that makes its run; comparisons of methods are right."""

from __future__ import annotations

import math
import shlex
from itertools import product
from pathlib import Path

import differences
import lines
import pytest
import run as command_line
import studies
import tables
from tasks import TASKS
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]


def _line(task: str, variant: str, seed: int, success: list[float], lr: float = 5e-4, **about) -> lines.Line:
    steps = {
        4 * i: {f"val-core/{task}/acc/mean@1": value, "episode/success_rate": value, "episode/count": 64.0}
        | {"episode/failed": 0.0, "episode/length/mean": 10.0}
        for i, value in enumerate(success)
    }
    key = {"task": task, "variant": variant, "lr": lr, "seed": seed}
    return lines.line({**key, "overrides": [], "warm_start": f"of {task} {seed}", **about}, steps)


# --- one run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", list(studies.STUDIES))
def test_the_command_of_every_line_makes_its_run(study: str, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def train(study_, planned, *, again):
        calls.append((study_, planned, again))
        return line

    monkeypatch.setattr(command_line, "train", train)
    every = lines.load(study)
    for line in {(line["task"], line["variant"]): line for line in every}.values():
        python, script, *words = shlex.split(line["command"])
        assert (python, script) == ("python", "benchmarks/evidence/run.py")
        result = CliRunner().invoke(command_line.app, words)
        assert result.exit_code == 0, result.output
        assert "this run: " in result.output
        assert "kept: " in result.output
        study_, planned, again = calls[-1]
        assert (study_, planned.key, again) == (study, lines.key(line), True)
        assert planned.steps == lines.validations(line)[0][-1]
        assert planned.on_stack == ("launch" in line)
        assert list(planned.variant.overrides) == line["overrides"] or study == "branching"
    assert all(line["command"] == lines.command(study, lines.key(line)) for line in every)
    assert bool(calls) == bool(every)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing doorkey gigpo", "expected the study to be methods or"),
        ("methods maze gigpo", "expected the task to be doorkey or"),
        ("methods doorkey gigo", "expected grpo_steps or"),
        ("methods doorkey gigpo --critic-lr 0.1", "gigpo has no critic"),
    ],
)
def test_a_run_that_is_not_planned_is_refused(words: str, message: str):
    result = CliRunner().invoke(command_line.app, ["one", *words.split(), "--lr", "0.001", "--seed", "0"])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", list(studies.STUDIES))
def test_all_that_is_planned_has_a_line(study: str):
    assert [planned.key for planned in command_line.missing(study)] == []


@pytest.mark.parametrize("study", list(studies.STUDIES))
def test_kept_lines_are_of_this_plan(study: str):
    for line in lines.load(study):
        assert line["task"] in TASKS
        assert line["variant"] in studies.STUDIES[study].names
        assert line["lr"] in (*studies.RATES, studies.BRANCHING_RATE)
        assert all(math.isfinite(value) for value in lines.validations(line)[1])
        assert line["versions"]["torch"]


def _critics(**last: float) -> list[lines.Line]:
    return [
        _line("doorkey", "turn_gae", seed, [0.4, value], critic_lr=studies.CRITIC_RATES[int(place[1:])])
        for place, value in last.items()
        for seed in studies.SEEDS["doorkey"].tuning
    ]


@pytest.mark.parametrize(
    ("tried", "further", "best"),
    [
        ({}, {1, 2, 3}, None),
        ({"c1": 0.5, "c2": 0.6, "c3": 0.4}, set(), 2),
        ({"c1": 0.5, "c2": 0.6, "c3": 0.7}, {4}, None),
        ({"c1": 0.9, "c2": 0.6, "c3": 0.7}, {0}, None),
        ({"c1": 0.5, "c2": 0.6, "c3": 0.7, "c4": 0.1}, set(), 3),
    ],
)
def test_the_critics_rate_is_chosen_on_seeds_of_its_own(
    tried: dict[str, float], further: set[int], best: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(studies, "CRITIC_TASKS", ("doorkey",))
    kept = _critics(**tried)
    done = {lines.key(line) for line in kept}
    todo = [planned for planned in studies.critic(kept) if planned.task == "doorkey" and planned.key not in done]
    tuning = [planned for planned in todo if planned.seed in studies.SEEDS["doorkey"].tuning]
    assert {planned.variant.critic_lr for planned in tuning} == {studies.CRITIC_RATES[place] for place in further}
    reported = {(planned.name, planned.seed, planned.variant.critic_lr) for planned in todo if planned not in tuning}
    if best is None or studies.CRITIC_RATES[best] == studies.CRITIC_RATE:
        assert not reported
    else:
        seeds = studies.SEEDS["doorkey"].reported
        rates = {studies.PPO: studies.CRITIC_RATES[best]}
        names = (studies.PPO, *studies.CRITIC_PEERS)
        assert reported == {(name, seed, rates.get(name)) for name, seed in product(names, seeds)}


def test_a_critics_table_has_its_rates_and_the_reported_seeds_with_the_best():
    kept = _critics(c1=0.5, c2=0.6, c3=0.7, c4=0.1)
    kept += [_line("doorkey", "turn_gae", seed, [0.4, 0.8], critic_lr=3e-3) for seed in range(3)]
    kept += [_line("doorkey", "gigpo", seed, [0.4, 0.9]) for seed in range(3)]
    table = tables.critic(kept)
    assert "| turn_gae | - | 0.450 | 0.500 | **0.550** | 0.250 |" in table
    [row] = [row for row in table.splitlines() if row.startswith("| gigpo |")]
    assert "| +0.050 (p 0.250) | 1.00 |" in row


# --- differences ------------------------------------------------------------------------------------------------------


def test_a_p_is_the_share_of_signs_with_as_large_a_mean():
    assert differences.sign_flip([1.0, 1.0, 1.0]) == 2 / 8
    assert differences.sign_flip([3.0, -1.0, -1.0, -1.0]) == 1.0
    assert differences.sign_flip([4.0, 2.0, 1.0, -1.0]) == 6 / 16


def test_holm_multiplies_by_the_comparisons_that_are_left():
    adjusted = differences.holm({("a", "x"): 0.01, ("b", "x"): 0.04, ("c", "x"): 0.03, ("d", "x"): 0.9})
    assert adjusted == pytest.approx({("a", "x"): 0.04, ("c", "x"): 0.09, ("b", "x"): 0.09, ("d", "x"): 0.9})


def test_over_all_tasks_each_task_counts_alike():
    of = {
        ("doorkey", "gigpo"): dict.fromkeys(range(8), 0.6),
        ("doorkey", "grpo_steps"): dict.fromkeys(range(8), 0.5),
        ("rooms", "gigpo"): {0: 0.8, 1: 0.8, 2: 0.8},
        ("rooms", "grpo_steps"): {0: 0.5, 1: 0.5, 2: 0.5},
    }
    pairs = differences.over_tasks(of, ("doorkey", "rooms"), "gigpo", "grpo_steps")
    assert len(pairs) == 11
    assert sum(pairs) == pytest.approx((0.1 + 0.3) / 2)
    [row] = [row for row in differences.of_all(of, ("doorkey", "rooms")) if row[0] == "gigpo"]
    assert row == ["gigpo", "**+0.200 (p 0.001, corrected p 0.001)**", "-", "-", "-"]
    [row] = [row for row in differences.of_task(of, "rooms") if row[0] == "gigpo"]
    assert row == ["gigpo", "+0.300 (p 0.250, 3 of 3)", "-", "-", "-"]
    assert differences.over_tasks(of, ("doorkey", "kitchen"), "gigpo", "grpo_steps") == []
