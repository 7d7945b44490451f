"""The exact values are those of the tables, and each way to name a method is judged."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import credit_quality  # noqa: E402
from known_values import END, Family, Table, dense, dialogue, doorkey, maze, softmax  # noqa: E402

from verl_turnkey.plugins.cli.tables import between  # noqa: E402

SMALL = Table(
    following=np.array([[[1, 0], [2, 1]], [[2, END], [0, 1]], [[END, 1], [2, 2]]]),
    chance=np.array([[[0.5, 0.5], [0.9, 0.1]], [[0.3, 0.7], [1.0, 0.0]], [[0.2, 0.8], [0.5, 0.5]]]),
    reward=np.array([[[0.0, -1.0], [0.5, 0.0]], [[0.0, 2.0], [0.0, 0.0]], [[1.0, 0.0], [-0.5, 0.0]]]),
    key=["a", "b", "c"],
    text=["in a", "in b", "in c"],
    row=np.array([0, 1, 0]),
)
LOGITS = np.array([[0.3, -0.2], [0.0, 0.7]])


def expected(table: Table, policy: np.ndarray, state: int, left: int) -> float:
    """The return, by all ways to go on."""
    if left == 0 or state == END:
        return 0.0
    return sum(
        policy[table.row[state], a]
        * table.chance[state, a, k]
        * (table.reward[state, a, k] + expected(table, policy, table.following[state, a, k], left - 1))
        for a, k in np.ndindex(2, 2)
    )


def test_values_and_gradient_are_those_of_all_ways_to_go_on():
    family = Family([SMALL, replace(SMALL, start=1)], softmax(LOGITS), 4)
    for place, table in enumerate(family.tables):
        assert family.values[place][0][4, table.start] == pytest.approx(expected(table, family.policy, table.start, 4))
        for row, action in np.ndindex(2, 2):
            step = np.zeros((2, 2))
            step[row, action] = 1e-6
            up, down = (expected(table, softmax(LOGITS + sign * step), table.start, 4) for sign in (1, -1))
            assert family.gradients[place][row, action] == pytest.approx((up - down) / 2e-6, abs=1e-7)


@pytest.mark.parametrize(
    "make",
    [lambda: maze(1, 0.4), lambda: dense(1), lambda: doorkey(1, 0.4), lambda: dialogue(1, 0.4)],
    ids=["maze", "dense", "doorkey", "dialogue"],
)
def test_episodes_are_those_of_the_tables(make):
    """Exact advantages of many episodes sum to the exact gradient, and the return is the value of the start."""
    family = make()
    draw = np.random.default_rng(0)
    batches = [family.draw(512, draw) for _ in range(4)]
    total = sum(family.gradient(batch, batch.exact) for batch, _ in batches)
    assert credit_quality.cosine(total, sum(truth for _, truth in batches)) > 0.97
    returns = [np.bincount(batch.steps.trajectory, batch.steps.reward) for batch, _ in batches]
    error = np.std(np.concatenate(returns)) / np.sqrt(2048)
    if family.tasks >= len(family.tables):  # all tasks are in each batch
        assert np.mean(np.concatenate(returns)) == pytest.approx(family.success, abs=5 * error)
    steps = batches[0][0].steps
    assert steps.step.max() < family.horizon
    assert set(steps.extra["turn_limit"]) == {float(family.horizon)}


def test_keys_recur_as_they_should():
    state, history, never = (
        maze(1, 0.4, keys).draw(64, np.random.default_rng(0))[0].steps for keys in ("state", "history", "never")
    )
    counts = [
        len({*zip(steps.group.tolist(), steps.anchor.tolist(), strict=True)}) for steps in (state, history, never)
    ]
    assert counts[0] < counts[1] < counts[2] == len(never)


def run(*words: str) -> str:
    result = CliRunner().invoke(credit_quality.app, ["run", *words], catch_exceptions=False)
    return result.output


FEW = ("--family", "maze .4", "--policies", "2", "--batches", "3")


def test_methods_by_name_with_parameters_and_of_a_file(tmp_path, monkeypatch):
    file = tmp_path / "own_credit_of_benchmark.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from verl_turnkey.advantage import Credit, register_estimator\n"
        "@dataclass(frozen=True)\n"
        "class Params: pass\n"
        "@register_estimator('exactly_nothing', params=Params, paper='none', summary='gives no credit')\n"
        "def nothing(batch, params):\n"
        "    return Credit.of_parts({'step_level': 0.0 * batch.reward}, batch.penalty)\n"
    )
    monkeypatch.setattr(credit_quality, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(credit_quality, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("<!-- credit quality: written -->\n<!-- /credit quality -->\n")
    printed = run("grpo_steps", "loo_td,lam=1.0", f"{file}:exactly_nothing", *FEW, "--save")
    assert "| one batch / sum of 3 | grpo_steps | loo_td, lam 1.0 | exactly_nothing | exact |" in printed
    kept = json.loads((tmp_path / "results.json").read_text())["families"]["maze .4"]
    assert {name: len(cells) for name, cells in kept.items()} == dict.fromkeys(kept, 2)
    assert kept["exactly_nothing"] == [[0.0, 0.0]] * 2
    assert np.mean(kept["loo_td, lam 1.0"]) > np.mean(kept["grpo_steps"])
    assert CliRunner().invoke(credit_quality.app, ["table"]).output.strip() in printed
    assert CliRunner().invoke(credit_quality.app, ["table"]).output in (tmp_path / "page.md").read_text()


def test_the_page_has_the_kept_table():
    results = json.loads(credit_quality.RESULTS.read_text())
    start, end = between(credit_quality.PAGE.read_text(), "credit quality")
    assert credit_quality.PAGE.read_text()[start:end] == credit_quality.tables(results) + "\n"


def test_what_is_not_there_is_refused():
    for words, message in (
        (("gigpoo", *FEW), r"expected one of .*gigpo.*, or FILE.py:NAME, got 'gigpoo'"),
        (("gigpo", "--family", "mase"), r"expected families of maze, success .2; .*, got mase"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            CliRunner().invoke(credit_quality.app, ["run", *words], standalone_mode=False, catch_exceptions=False)
