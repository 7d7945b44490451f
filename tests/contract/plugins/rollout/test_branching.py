"""Episodes that fork, through the real agent loop and real hosts, in a tree whose values are known in closed form."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from contract_tools import Worker
from scripted import BRANCH, CONVERSATION, MOVES, SHORT, TREE, Script, counts, table, trained_once, way
from verl.trainer.ppo.v1 import agent_loop_tq

from verl_turnkey.advantage import compute_credit, validate_record
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.branching import Allowance, Branching, Budget, Cost, Node, Trajectory
from verl_turnkey.plugins.rollout.strategies import Fork, ForkPoint, register_strategy, registry
from verl_turnkey.plugins.rollout.strategies.builtin import Vine
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION

#: Values of a policy that moves left and right alike often.
VALUE = {"": (0.0 + 1.0 + 2.25 + 5.25) / 4, "L": 0.5, "R": 3.5}


def explorer(trunk: Sequence[str], *broken: tuple[int, int]) -> Callable[[str], str]:
    """The moves of the episode itself; four branches of a state play all that can follow, those of ``broken`` break."""

    def turn(prompt: str) -> str:
        t, branch = len(way(prompt)), BRANCH.get()
        if branch is None:
            return trunk[t]
        return "break" if branch[:2] in broken else MOVES[branch[1] >> (1 - t) & 1]

    return turn


VINE = "turnkey.rollout.strategy={name: vine, rollouts: 4}"


@pytest.mark.parametrize("env", ["Tree", "ReplayedTree"])
@pytest.mark.parametrize("prompt", [(), CONVERSATION])
def test_the_credit_of_a_vine_is_that_of_the_true_values(play, numbered, env, prompt):
    outputs, script = play(explorer("RL"), Task(f"contract/{env}-v0", 3), VINE, SHORT, *prompt)
    assert [row.extra_fields["turnkey"]["failed"] for row in outputs] == [None] * len(outputs)
    assert len(outputs) == (1 if prompt else 2)
    batch = table(outputs)
    assert batch.extra["turn_value"].tolist() == [VALUE[""], VALUE["R"]]
    assert batch.extra["value_rollouts"].tolist() == [4, 4]
    credit = compute_credit("progress", batch, alpha=0).advantage
    np.testing.assert_allclose(credit, [0.25 + VALUE["R"] - VALUE[""], 2.0 - VALUE["R"]], atol=1e-12)
    trained_once(outputs, script, measured=4 * 2 + 4)
    assert len(set(map(str, numbered))) == 8
    measured_tokens = sum(map(len, script.answers)) - sum(sum(row.response_mask) for row in outputs)
    assert counts(outputs) == {
        "forks": 2, "trained": 0, "measured": 8, "failed": 0, "trained_tokens": 0, "trained_steps": 0,
        "measured_tokens": measured_tokens, "measured_steps": 12,
    }  # fmt: skip


def test_a_branch_that_fails_costs_itself(play, numbered):
    outputs, script = play(explorer("RL", (0, 3), (1, 0)), TREE, VINE, SHORT)
    batch = table(outputs)
    np.testing.assert_allclose(batch.extra["turn_value"], [(0 + 1 + 2.25) / 3, (2 + 5 + 5) / 3])
    assert batch.extra["value_rollouts"].tolist() == [3, 3]
    assert (counts(outputs)["failed"], counts(outputs)["measured"]) == (2, 6)
    assert loop_worker._process.failures.counts == {}  # a branch is no episode
    assert loop_worker._process.failed_branches.counts == {"step": 2}
    trained_once(outputs, script, measured=3 * 2 + 1 + 4)


def test_an_episode_that_fails_takes_its_branches_along(play, numbered):
    outputs, _ = play(explorer(["R", "break"]), TREE, VINE, SHORT)
    (row,) = outputs
    assert "the branch broke" in row.extra_fields["turnkey"]["failed"]
    assert counts(outputs)["measured"] == 0


@pytest.mark.parametrize(("key", "limit", "begun"), [("steps", 5, [2, 1]), ("tokens", 24, [1, 2])])
def test_the_budget_of_an_episode_holds(play, numbered, key, limit, begun):
    """A branch may need 8 tokens and a step per turn ahead, and needs 2 tokens; what is left is for later states."""
    limits = ("turnkey.rollout.max_turns=2", "turnkey.rollout.branches_at_once=2")
    outputs, _ = play(explorer("RL"), TREE, VINE, SHORT, *limits, f"turnkey.rollout.branch_{key}={limit}")
    assert table(outputs).extra["value_rollouts"].tolist() == begun
    assert counts(outputs)[f"measured_{key}"] <= limit
    assert counts(outputs)["measured_steps"] == 2 * begun[0] + begun[1]


class _Coin:
    """A rollout from one state: it succeeds in its first step or fails in its tenth, with equal chances."""

    def __init__(self, rng: random.Random, most: Cost) -> None:
        self.won, self.most, self.spent = rng.random() < 0.5, most, Cost()
        self.begins, self.trained, self.depth, self.environment = 0, False, 0, None
        reward = {"composed_reward": float(self.won)}
        self.episode = SimpleNamespace(branch=0, steps=[SimpleNamespace(record=reward)], players=[None])

    def node(self, t: int) -> Node:
        return 0, t


@pytest.mark.parametrize("steps", [None, 30, 20, 12])
def test_a_budget_does_not_bias_the_value_of_a_state(steps):
    """How many rollouts are measured must not depend on how long the first of them were."""

    async def measure(rng: random.Random) -> list[float]:
        async def walk(branch: _Coin, _: Branching) -> None:
            for _ in range(1 if branch.won else 10):
                await asyncio.sleep(0)
                branch.spent += Cost(tokens=1, steps=1)

        async def nothing(*_: Any) -> None:
            return None

        async def clone() -> Any:
            return SimpleNamespace(close=lambda: None)

        def fork(branch: int, trained: bool, turns: int, most: Cost) -> _Coin:
            return _Coin(rng, most)

        trajectory = SimpleNamespace(
            turns=10, sampling={"max_tokens": 1}, depth=0, begins=-1, candidates=[], fork=fork,
            episode=SimpleNamespace(branch=0, steps=[]), environment=SimpleNamespace(clone=clone),
        )  # fmt: skip
        budget = Budget(None, steps, at_once=4)
        branching = Branching(Vine(rollouts=9), budget, Allowance(), walk, nothing, nothing, nothing, print)
        await branching.at(trajectory)
        await branching.finished()
        return branching._returns.get((0, 0), [])

    rng = random.Random(0)
    samples = [asyncio.run(measure(rng)) for _ in range(600)]
    assert {len(sample) for sample in samples} == {9 if steps is None else steps // 10}
    means = [fmean(sample) for sample in samples]
    assert abs(fmean(means) - 0.5) < 4 * stdev(means) / len(means) ** 0.5


def test_validation_and_independent_episodes_do_not_fork(play, numbered):
    rows = {}
    for name, overrides, fields in (("plain", (), {}), ("validation", (VINE,), {VALIDATION: True})):
        rows[name], script = play(explorer("RL"), TREE, SHORT, *overrides, fields=fields)
        assert len(script.prompts) == 2
        for row in rows[name]:
            row.metrics.generate_sequences = row.metrics.tool_calls = 0.0
    assert rows["plain"] == rows["validation"]
    assert numbered == []
    assert set(rows["plain"][0].extra_fields["turnkey"]["steps"][0]["extra"]) == {"next_anchor"}


@pytest.fixture
def bushy():
    """A strategy of a user's own: three trained branches at the start, one more of each trajectory at its next turn."""

    @register_strategy("bushy", summary="for this test")
    @dataclass(frozen=True)
    class Bushy:
        roots: str = "shared"

        def fork(self, at: ForkPoint) -> Fork | None:
            assert at.depth == len(at.steps) == at.turn
            return Fork(3 if at.turn == 0 else 1, trained=True)

        def columns(self, rewards: Any, measured: Any) -> dict[str, list[float]]:
            assert not any(measured)
            return {}

    yield
    del registry._STRATEGIES["bushy"]


class Bush:
    """Answers with moves in turn, whoever asks."""

    def __init__(self) -> None:
        self.visits: Counter[str] = Counter()

    def __call__(self, prompt: str) -> str:
        self.visits[way(prompt)] += 1
        return MOVES[self.visits[way(prompt)] % 2]


@pytest.mark.parametrize("layout", ["steps", "merged"])
@pytest.mark.parametrize("prompt", [(), CONVERSATION])
def test_each_turn_of_a_tree_is_trained_once(play, bushy, prompt, layout):
    overrides = ("turnkey.rollout.strategy=bushy", SHORT, f"turnkey.rollout.layout={layout}", *prompt)
    outputs, script = play(Bush(), TREE, *overrides)
    for i, row in enumerate(outputs):
        validate_record(row.extra_fields["turnkey"], f"row {i}")
    trained_once(outputs, script)
    assert len(script.prompts) == 4 + 8
    for text in map(script.text, range(len(script.prompts))):  # the past that is shown is the branch's own
        moves = re.findall(r"assistant\n([LR])", text) if prompt else re.findall(r"Action: ([LR])", text)
        assert moves == list(way(text))
    batch = table(outputs)
    assert len(batch) == 12
    assert batch.n_trajectories == 8
    assert Counter(batch.extra["parent"].tolist()) == {"start": 4, "0.0.1": 2, "0.1.1": 2, "0.2.1": 2, "0.3.1": 2}
    # verl gives all rows of a rollout the numbers of the last one: those of the first way through.
    last = outputs[-1]
    assert "branch" not in last.extra_fields["turnkey"]
    assert last.extra_fields["reward_extra_info"]["env_return"] == last.reward_score
    # Each trajectory has its whole outcome, also one that begins at a fork.
    outcome = dict(zip(batch.extra["branch"].tolist(), batch.extra["leaf_outcome"].tolist(), strict=True))
    assert sorted(outcome) == list(range(8))
    leaves = sum(outcome.values())
    plain = compute_credit("tree", batch, rule="treerl")
    assert plain.metrics["credit/leaves"] == 8
    assert plain.metrics["credit/nodes"] == 12
    value = compute_credit("tree", batch, norm="mean", fork_w=0.0).advantage
    ends = [i for i in range(len(batch)) if batch.step[i] == 1]
    expected = [batch.extra["leaf_outcome"][i] - leaves / 8 for i in ends]
    np.testing.assert_allclose(value[ends], expected, atol=1e-12)


def test_verl_gives_all_rows_of_a_rollout_the_numbers_of_its_first_way_through(play, bushy, monkeypatch):
    """Through verl's own postprocessing; only the queue is left out."""
    put: list[dict[str, Any]] = []

    async def taken(**arguments: Any) -> None:
        put.append(arguments)

    outputs, _ = play(Bush(), TREE, "turnkey.rollout.strategy=bushy", SHORT)
    trunk = sum(
        step["composed_reward"]
        for row in outputs
        for step in row.extra_fields["turnkey"]["steps"]
        if "branch" not in row.extra_fields["turnkey"]
    )
    scores = {row.reward_score for row in outputs}
    assert len(scores) > 1, "the test needs branches that end differently"
    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", taken)
    row = {"uid": "u", "session_id": 0, "global_steps": 1, "data_source": "x", "turnkey_task": TREE.to_json()}
    asyncio.run(Worker()._agent_loop_postprocess(outputs, False, **row))
    assert len(put[0]["keys"]) == len(outputs) == 12
    assert {row.reward_score for row in outputs} == {trunk}
    assert {row.extra_fields["reward_extra_info"]["env_return"] for row in outputs} == {trunk}


def test_the_turns_of_a_branch_that_failed_are_those_of_one_that_went_on_from_it(play, bushy, monkeypatch):
    """The first branch of the start breaks in its second turn, after another one began there."""
    broken = []

    async def step(self: Trajectory, action: str) -> Any:
        if self.episode.branch == 1 and self.made_by == [1]:
            broken.append(self)
            action = "break"
        return await inner(self, action)

    inner = Trajectory.step
    monkeypatch.setattr(Trajectory, "step", step)
    outputs, script = play(Bush(), TREE, "turnkey.rollout.strategy=bushy", SHORT)
    assert len(broken) == 1
    trained_once(outputs, script, measured=1)
    batch = table(outputs)
    assert batch.n_trajectories == 7
    assert len(batch) == 11
    assert counts(outputs)["failed"] == 1


def test_an_error_that_is_nobodys_failure_is_not_lost(play, bushy, monkeypatch):
    """It stops what verl stops on such an error of the loop, even if it came while the episode itself went on."""

    async def fork(self: Branching, trajectory: Trajectory) -> None:
        if trajectory.episode.branch:
            raise ZeroDivisionError("a mistake in a strategy")
        await inner(self, trajectory)

    inner = Branching.at
    monkeypatch.setattr(Branching, "at", fork)
    with pytest.raises(ZeroDivisionError):
        play(Bush(), TREE, "turnkey.rollout.strategy=bushy", SHORT)


def test_branches_ask_the_server_of_their_episode(play, numbered, monkeypatch):
    requests = set()
    generate = Script.generate

    async def seen(self: Script, request_id: str, **kwargs: Any) -> Any:
        requests.add(request_id)
        return await generate(self, request_id, **kwargs)

    monkeypatch.setattr(Script, "generate", seen)
    play(explorer("RL"), TREE, VINE, SHORT)
    assert len(requests) == 1
