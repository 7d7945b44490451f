"""Episodes of the plain loop that fork: what is trained, and what is measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from verl_turnkey.plugins.rollout.strategies import read_strategy

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks" / "evidence"), str(ROOT / "examples")]

import loop  # noqa: E402
import minimal_loop  # noqa: E402
import studies  # noqa: E402
from forks import Forks  # noqa: E402
from loop import Loop  # noqa: E402
from players import Player, Step, columns, trained  # noqa: E402
from tasks import TASKS  # noqa: E402

DOORKEY = replace(TASKS["doorkey"], prompt_tokens=1000)  # the model of these tests has a token for each byte


class Random:
    """Draws a move for each prompt, in tokens that are less likely the later they come."""

    def __init__(self, made: Loop) -> None:
        self.made, self.draw, self.written = made, np.random.default_rng(0), 0

    def __call__(self, prompts: list[tuple[int, ...]]) -> list[minimal_loop.Response]:
        responses = []
        for _ in prompts:
            ids = tuple(self.made.tokenizer(self.draw.choice(["turn left", "go forward", "toggle"])).input_ids)
            self.written += 1
            responses.append(minimal_loop.Response(ids, (-0.001 * self.written,) * len(ids), 0.7))
        return responses


@pytest.mark.parametrize(
    ("name", "episodes", "measured"),
    # Of each of two rollouts: forks before turns 1 and 2; as many trajectories as a group may have; two before turns 0
    # and 3, cut after two turns.
    [("tree", 2 * 4, 0), ("entropy_branch", 6, 0), ("vine", 2, 2 * 4)],
)
def test_each_turn_of_forked_episodes_is_trained_once_from_the_state_of_the_fork(
    name: str, episodes: int, measured: int, model_dir: Path
):
    strategy = {
        "tree": {"first": 1, "every": 1, "depth": 2},
        "entropy_branch": {"trajectories": 6, "branches": 3, "vocabulary": 2},
        "vine": {"rollouts": 2, "every": 3, "turns": 2},
    }[name]
    variant = studies.Variant("gigpo", {}, {"name": name, **strategy}, tasks=1, rollouts=2)
    made = Loop(replace(DOORKEY, max_turns=6), model_dir, variant, 1e-3, seed=0, n_val=2)
    made.sampler = Random(made)
    players = made.play([3, 3], 2, Forks(made.strategy, 2))
    kept = [player for player in players if player.trained]
    branches = [player for player in players if not player.trained]
    assert (len(kept), len(branches)) == (episodes, measured)
    steps = [step for _, step in trained(players)]
    assert len(steps) + sum(len(player.own) for player in branches) == made.sampler.written
    assert len({id(step) for step in steps}) == len(steps)
    batch = loop.table(players, made.task.max_turns, None, made.strategy)
    assert batch.extra["parent"].tolist()[:2] == ["start", "0.0.1"]
    at = dict.fromkeys(batch.extra["parent"].tolist(), None)
    for player in players:
        assert len(player.steps) == (min(6, player.begins + 2) if not player.trained else 6)
        assert [step.next_anchor for step in player.steps[:-1]] == [step.anchor for step in player.steps[1:]]
        if player.branch:
            [origin] = [source for source in kept if source.branch == player.made_by[player.begins - 1]
                        and source.rollout == player.rollout and player.steps[0] is source.steps[0]]  # fmt: skip
            assert player.steps[: player.begins] == origin.steps[: player.begins]
    for parent, anchor in zip(batch.extra["parent"].tolist(), batch.anchor.tolist(), strict=True):
        assert at[parent] in (None, anchor), "what goes on from one path begins in one state"
        at[parent] = anchor
    if name == "vine":
        assert batch.extra["value_rollouts"].tolist() == [2, 0, 0, 2, 0, 0] * 2


def act(player: Player, reward: float) -> None:
    t, response = len(player.steps), minimal_loop.Response((1,), (-3.0,), 0.0)
    step = Step(0, 0, t, (1,), response, f"s{t}", f"s{t + 1}", "", "go", True, reward, False, False)
    player.steps.append(step)
    player.made_by.append(player.branch)


@pytest.mark.parametrize("strategy", [{"name": "vine", "every": 2}, {"name": "spo_chain", "every": 2}])
def test_a_value_is_the_mean_return_from_the_state_on(strategy: dict):
    """Two branches of the state before turn 2 end with 3 and 5 more; what was paid before is not theirs."""
    strategy_read = read_strategy({**strategy, "rollouts": 2})
    assert strategy_read is not None
    forks, trunk = Forks(strategy_read[1], 1), Player(env=None)
    players = [trunk]
    for reward in (0.5, 1.0, 2.0, 4.0):
        branches = forks.before([trunk]) + forks.written([trunk], [minimal_loop.Response((1,), (-3.0,), 0.0)])
        for more, branch in zip((3.0, 5.0), branches, strict=False):
            act(branch, more - 1.0)
            act(branch, 1.0)
        players += branches
        act(trunk, reward)
    extra = columns(players, strategy_read[1])
    first = (
        0 if strategy["name"] == "vine" else 1
    )  # before the first and the third turn, or before the second and fourth
    assert extra["value_rollouts"] == ([2.0, 0.0, 2.0, 0.0] if first == 0 else [0.0, 2.0, 0.0, 2.0])
    assert extra["turn_value"][first] == extra["turn_value"][first + 2] == 4.0
    assert extra["parent"] == ["start", "0.0.1", "0.0.2", "0.0.3"]


def test_each_rollout_may_be_a_tree_of_its_own():
    strategy = read_strategy({"name": "tree", "first": 1, "depth": 1, "roots": "own"})
    assert strategy is not None
    forks, trunk = Forks(strategy[1], 1), Player(env=None, rollout=3)
    act(trunk, 0.0)
    players = [trunk, *forks.before([trunk])]
    for player in players:
        act(player, 1.0)
    assert columns(players, strategy[1])["parent"] == ["3", "3.0.1", "3.0.1"]
