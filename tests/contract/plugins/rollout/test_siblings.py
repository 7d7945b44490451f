"""Candidates for each turn, of which one goes on, in a tree of four leaves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
from forking import CONVERSATION, SHORT, TREE, table, trained_once, way

from verl_turnkey.advantage import compute_credit, validate_record
from verl_turnkey.envs.rewards import RewardError
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout.branching import Branching, Trajectory
from verl_turnkey.plugins.rollout.episode import Episode

BEST = "turnkey.rollout.strategy={name: siblings, candidates: 3, eta: 0}"
BRANCH: ContextVar[int] = ContextVar("BRANCH", default=0)
"""of who asks, from 1; 0: the trajectory itself"""


@pytest.fixture(autouse=True)
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Branching._play

    async def play(self: Branching, branch: Trajectory, *args: Any) -> None:
        BRANCH.set(branch.episode.branch)
        await inner(self, branch, *args)

    monkeypatch.setattr(Branching, "_play", play)


def moves(*turns: Sequence[str]) -> Callable[[str], str]:
    """Of each turn: what the trajectory itself plays, and its two other candidates."""

    def turn(prompt: str) -> str:
        return turns[len(way(prompt))][(BRANCH.get() - 1) % 2 + 1 if BRANCH.get() else 0]

    return turn


def counts(outputs: Any) -> dict[str, float]:
    info = outputs[-1].extra_fields["reward_extra_info"]
    return {name.partition("/")[2]: value for name, value in info.items() if name.startswith("branching/")}


@pytest.mark.parametrize("env", ["Tree", "ReplayedTree"])
@pytest.mark.parametrize("layout", ["steps", "merged"])
@pytest.mark.parametrize("prompt", [(), CONVERSATION])
def test_the_best_candidate_goes_on_and_each_is_trained_once(play, prompt, layout, env):
    """The trajectory's own turns lose; one candidate breaks."""
    overrides = (BEST, SHORT, f"turnkey.rollout.layout={layout}", *prompt)
    plan = moves(["L", "R", "break"], ["L", "L", "R"])
    outputs, script = play(plan, Task(f"contract/{env}-v0", 3), *overrides)
    for i, row in enumerate(outputs):
        validate_record(row.extra_fields["turnkey"], f"row {i}")
    trained_once(outputs, script, measured=1)
    for text in map(script.text, range(len(script.prompts))):  # the past that is shown is that of the candidate
        past = re.findall(r"assistant\n([LR])", text) if prompt else re.findall(r"Action: ([LR])", text)
        assert past == list(way(text))
    batch = table(outputs)
    order = np.lexsort((batch.extra["branch"], batch.step))
    assert batch.extra["parent"][order].tolist() == ["0"] * 2 + ["0.0.1"] * 3
    assert batch.extra["branch"][order].tolist() == [0, 1, 0, 3, 4]
    assert batch.extra["candidate_score"][order].tolist() == [0.25, 0.0, 5.0, 2.0, 2.0]
    assert batch.extra["leaf_outcome"][order].tolist() == [5.25, 0.0, 5.25, 2.25, 2.25]
    assert batch.terminated[order].tolist() == [False, False, True, True, True]
    assert batch.truncated[order].tolist() == [False, True, False, False, False]
    credit = compute_credit("siblings", batch, norm="mean").advantage[order]
    np.testing.assert_allclose(credit, [0.125, -0.125, 2.0, -1.0, -1.0], atol=1e-12)
    counted = counts(outputs)
    assert (counted["forks"], counted["trained"], counted["failed"], counted["trained_steps"]) == (2, 3, 1, 4)
    assert outputs[-1].reward_score == 5.25


@pytest.mark.parametrize(("limit", "candidates"), [(1, [2, 1]), (2, [3, 1]), (3, [3, 2]), (4, [3, 3])])
def test_the_budget_of_a_rollout_holds(play, limit, candidates):
    """What is left over is spent on the first turns; a turn with one candidate is trained, with an advantage of 0."""
    outputs, script = play(moves("LRR", "LRR"), TREE, BEST, SHORT, f"turnkey.rollout.branch_steps={limit}")
    trained_once(outputs, script)
    batch = table(outputs)
    assert [Counter(batch.step.tolist())[t] for t in range(2)] == candidates
    assert counts(outputs)["trained_steps"] == sum(candidates) - 2
    alone = compute_credit("siblings", batch).advantage[batch.step == 1]
    assert (alone == 0).all() == (candidates[1] == 1)


def test_an_episode_is_cut_after_its_last_turn(play):
    outputs, script = play(moves("LRL"), TREE, BEST, SHORT, "turnkey.rollout.max_turns=1")
    trained_once(outputs, script)
    batch = table(outputs)
    assert batch.truncated.tolist() == [True] * 3
    assert sorted(batch.extra["candidate_score"].tolist()) == [0.0, 0.0, 0.25]


def test_a_turn_of_the_path_that_fails_costs_the_rollout(play):
    outputs, _ = play(moves("LRL", ["break", "R", "L"]), TREE, BEST, SHORT)
    (row,) = outputs
    assert "the branch broke" in row.extra_fields["turnkey"]["failed"]


def test_without_a_rival_that_lasts_the_path_goes_on_itself(play):
    broken = ["L", "break", "break"]
    outputs, script = play(moves(broken, broken), TREE, BEST, SHORT)
    trained_once(outputs, script, measured=4)
    batch = table(outputs)
    assert batch.extra["branch"].tolist() == [0.0, 0.0]
    assert batch.extra["candidate_score"].tolist() == [0.0, 0.0]


def test_a_candidate_that_cannot_be_scored_costs_itself(play, monkeypatch):
    inner = Episode.score

    async def score(self: Episode, *args: Any) -> float:
        if self.branch == 1:
            raise RewardError("no judge")
        return await inner(self, *args)

    monkeypatch.setattr(Episode, "score", score)
    outputs, script = play(moves("LRR", "LRL"), TREE, BEST, SHORT)
    trained_once(outputs, script, measured=1)
    batch = table(outputs)
    assert sorted(batch.extra["branch"].tolist()) == [0.0, 0.0, 2.0, 3.0, 4.0]
    assert counts(outputs)["failed"] == 1
    assert outputs[-1].reward_score == 5.25


def test_a_candidate_that_lost_is_closed_before_it_is_judged(play, monkeypatch):
    branches: list[Trajectory] = []
    still_open: list[bool] = []
    course, rewards = Branching._to_the_choice, Episode.apply_rewards

    async def to_the_choice(self: Branching, clone: Any, candidate: Any, branch: Trajectory) -> float:
        branches.append(branch)
        return await course(self, clone, candidate, branch)

    async def apply(self: Episode, *args: Any) -> None:
        still_open.extend(branch.environment._open for branch in branches if branch.episode is self)
        await rewards(self, *args)

    monkeypatch.setattr(Branching, "_to_the_choice", to_the_choice)
    monkeypatch.setattr(Episode, "apply_rewards", apply)
    outputs, script = play(moves("LRR", "LRR"), TREE, BEST, SHORT)
    trained_once(outputs, script)
    assert still_open == [False] * 4


def test_a_choice_by_chance_keeps_every_candidate(play):
    for _ in range(4):
        outputs, script = play(moves("LRL", "RLR"), TREE, BEST.replace(", eta: 0", ""), SHORT)
        trained_once(outputs, script)
        batch = table(outputs)
        assert len(batch) == 6
        path = np.flatnonzero(batch.extra["branch"] == 0)
        scores = batch.extra["candidate_score"][path]
        assert batch.extra["leaf_outcome"][path].tolist() == [scores.sum()] * 2


def player(*turns: Sequence[str]) -> Callable[[str], str]:
    """As :func:`moves`, where the state does not tell the turn."""

    def turn(prompt: str) -> str:
        past = re.findall(r"Action: (find|wait)\b", prompt)
        return turns[len(past)][(BRANCH.get() - 1) % 2 + 1 if BRANCH.get() else 0]

    return turn


def test_candidates_that_end_the_episode_and_others_are_compared(play):
    """Of equal scores the first one is chosen: find, 0.5, goes on where the trajectory itself had lost."""
    plan = player(["lose", "find", "win"], ["wait", "time out", "lose"])
    outputs, script = play(plan, Task("contract/Awkward-v0", 3), BEST, SHORT)
    trained_once(outputs, script)
    batch = table(outputs)
    order = np.lexsort((batch.extra["branch"], batch.step))
    assert batch.extra["branch"][order].tolist() == [0, 1, 2, 0, 3, 4]
    assert batch.extra["candidate_score"][order].tolist() == [0.5, 0.0, 0.5, 0.5, 0.0, 0.0]
    assert batch.terminated[order].tolist() == [False, True, True, False, False, True]
    assert batch.truncated[order].tolist() == [False, False, False, True, True, False]
    assert batch.success[order].tolist() == [False, False, True, False, False, False]
    assert outputs[-1].reward_score == 1.0


def test_an_episode_ends_with_the_candidate_that_ends_it(play):
    paid = "turnkey.rewards=[{name: outcome}]"
    outputs, script = play(player(["wait", "lose", "win"]), Task("contract/Awkward-v0", 3), BEST, SHORT, paid)
    trained_once(outputs, script)
    batch = table(outputs)
    order = np.argsort(batch.extra["branch"])
    assert batch.step.tolist() == [0, 0, 0]
    assert batch.extra["candidate_score"][order].tolist() == [1.0, 0.0, 0.0]
    assert batch.extra["leaf_outcome"][order].tolist() == [1.0, 0.0, 0.0]
    assert batch.success[order].tolist() == [True, False, False]
    assert batch.truncated[order].tolist() == [False, False, True]
