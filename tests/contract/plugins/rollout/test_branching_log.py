"""The log of rollouts that fork, as the agent loop and the trainer write it, and what the page shows of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import Browser
from typer.testing import CliRunner

from verl_turnkey.advantage import compute_credit
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.credit.table import Numbers, credit_columns
from verl_turnkey.plugins.log.writer import Tables
from verl_turnkey.plugins.rollout.strategies import Fork, ForkPoint, register_strategy, registry
from verl_turnkey.plugins.view.join import HAS_CREDIT, LoggedRun, load
from verl_turnkey.plugins.view.training import TrainingHistory

TREE = Task("contract/Tree-v0", 3)
WAYS = ["u_0", "u_0.1", "u_0.2", "u_1", "u_1.1", "u_1.2"]


class Alternating:
    """Left and right in turn, whoever asks."""

    def __init__(self) -> None:
        self.turns = 0

    def __call__(self, prompt: str) -> str:
        self.turns += 1
        return "LR"[self.turns % 2]


@dataclass(frozen=True)
class Late:
    """A measured branch at the start, and two trained ones before the second turn of the first way."""

    roots: str = "shared"

    def fork(self, at: ForkPoint) -> Fork | None:
        if at.turn == 0:
            return Fork(1, trained=False)
        return Fork(2, trained=True) if at.turn == 1 and not at.branch else None

    def columns(self, rewards: list[float], measured: list[list[float]]) -> dict[str, list[float]]:
        return {}


@pytest.fixture
def run(play, tmp_path: Path) -> Iterator[LoggedRun]:
    """Two rollouts of two turns, each with a measured branch and two that are trained."""
    register_strategy("late", summary="for this test")(Late)
    log = tmp_path / "run" / "turnkey_log"
    rows = []
    for session in (0, 1):
        rows.append(play(
            Alternating(), TREE, "turnkey.rollout.strategy=late", f"turnkey.log.trajectories={log}",
            "turnkey.rollout.max_tokens_per_turn=8", session=session,
        )[0])  # fmt: skip
    del registry._STRATEGIES["late"]
    keys = [f"u_{session}_{i}" for session, outputs in enumerate(rows) for i in range(len(outputs))]
    outputs = [row for several in rows for row in several]
    mask = torch.nested.as_nested_tensor([torch.tensor(row.response_mask) for row in outputs], layout=torch.jagged)
    trained = read_rows(keys, [{}] * len(keys), [row.extra_fields for row in outputs], mask)
    credit = compute_credit("tree", trained.steps)
    made_of = {"train_step": 7, "first_row": 0, "numbers": Numbers(), "kl": None}
    tables = Tables(log, "20260101T000000_0000", "trainer")
    tables.put("credit", 7, credit_columns(trained, credit, chosen=np.ones(len(trained.steps), bool), **made_of))
    assert tables.drain(120)
    return load(tmp_path / "run")


def test_branches_are_no_episodes_and_shared_turns_have_their_credit(run):
    episodes, turns = run.episodes.set_index("episode"), run.turns
    assert episodes.index.tolist() == WAYS  # what is only measured is not there
    assert episodes["branch"].tolist() == [0, 1, 2] * 2
    assert [key if isinstance(key, str) else None for key in episodes["parent"]] == [
        None, "u_0", "u_0", None, "u_1", "u_1",
    ]  # fmt: skip
    assert run.first_ways.tolist() == [True, False, False] * 2
    shared = turns[~run.own]
    assert shared["episode"].tolist() == ["u_0.1", "u_0.2", "u_1.1", "u_1.2"]
    assert shared["turn"].tolist() == [0] * 4
    assert shared["trained_by"].tolist() == ["u_0", "u_0", "u_1", "u_1"]
    assert shared["row"].isna().all()
    assert set(turns["reason"]) == {HAS_CREDIT}
    credit = turns.set_index(["episode", "turn"])["advantage"]
    for key, trained in zip(shared["episode"], shared["trained_by"], strict=True):
        assert credit[key, 0] == credit[trained, 0]
    assert turns["advantage"].nunique() > 2
    history = TrainingHistory(run)
    assert (len(history.episodes), len(history.ways), len(history.turns)) == (2, 6, 8)
    assert history.groups["size"].tolist() == [6]


def test_the_page_tells_branches_from_episodes(run, tmp_path):
    out = tmp_path / "page.html"
    CliRunner().invoke(app, ["view", str(tmp_path / "run"), "--out", str(out)], catch_exceptions=False)
    browser = Browser()
    try:
        look(browser, out.as_uri(), run)
        assert browser.console() == []
    finally:
        browser.close()


def look(browser: Browser, address: str, run: LoggedRun) -> None:
    browser.open(address)
    facts = dict(zip(browser.texts(".facts dt"), browser.texts(".facts dd"), strict=True))
    assert (facts["episodes"], facts["branches"], facts["turns"]) == ("2", "4", "8")
    browser.go("#/episodes")
    assert browser.text(".counted") == "6 of 6: 2 episodes and 4 branches"
    assert sorted(browser.texts(".rows td.branch")) == ["0", "0", "1 ← 0", "1 ← 0", "2 ← 0", "2 ← 0"]
    browser.size(400)
    wide = "return [...document.querySelectorAll('.rows td.branch')].map((e) => [e.clientWidth, e.scrollWidth])"
    assert all(0 < needed <= there for there, needed in browser.run(wide))
    browser.size(1280)
    assert "credit of 8 turns" in browser.text(".histogram")
    browser.go("#/episode/u_0.2")
    assert browser.text(".turn .shared") == "Shared, trained once: in episode 1."
    assert browser.texts(".turn .why") == []
    assert len(browser.texts(".turn > header .badge")) == 2
    assert browser.text(".ways") == "branch 2, from the first way at turn 1"
    browser.run("document.querySelector('.turn .shared a').click()")
    browser.until("return location.hash.startsWith('#/episode/u_0?')")
    browser.until("return document.querySelector('.ways')?.textContent.startsWith('forks at')")
    assert browser.text(".ways") == "forks at turn 1: branch 1 turn 1: branch 2"
    assert browser.texts(".turn .shared") == []
    browser.go("#/group/u?visits=1")
    assert "2 episodes and 4 branches" in browser.text(".sub")
    browser.run("document.querySelector('.as-table').open = true")
    cells = "[...row.cells].map((cell) => cell.textContent)"
    rows = browser.run(f"return [...document.querySelectorAll('table.edges tbody tr')].map((row) => {cells})")
    assert sum(int(row[3]) for row in rows) == 8  # each turn once
    won = run.episodes["success"].astype(bool)
    # what a shared turn came to is what all ways through it came to
    first = run.turns[run.turns["turn"] == 0].groupby("action")
    expected = [
        [action, str(run.own[turns.index].sum()), f"{100 * won[turns['at']].mean():.0f} %"] for action, turns in first
    ]
    assert sorted([row[1], row[3], row[4]] for row in rows[: len(expected)]) == expected
    assert browser.texts("table.plain td:first-child a")[-6:] == [
        "episode 1", "episode 1, branch 1", "episode 1, branch 2",
        "episode 2", "episode 2, branch 1", "episode 2, branch 2",
    ]  # fmt: skip
    browser.run("document.querySelector('table.edges button').click()")
    browser.go("#/compare")
    assert "On 1 common tasks" in browser.text(".lead")
    assert browser.texts(".sideways td.num a")[:2] == [f"{int(won[run.first_ways].sum())} of 2"] * 2
