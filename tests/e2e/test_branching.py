"""On MiniGrid: values by fresh rollouts from each state, which train nothing themselves, and trees of episodes."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
from launch import POLICY, Run, minigrid, train
from transformers import AutoTokenizer

pytestmark = pytest.mark.long

TURNS, STEPS, ROLLOUTS = 4, 2, 3
LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": TURNS}


def branch(out: Path, model: Path, *overrides: str, seed: int) -> Run:
    """The reward is the number of steps ahead, so that states and leaves differ."""
    return train(
        out,
        model,
        *overrides,
        *minigrid(out, LEVEL, seed=seed),
        f"turnkey.rewards=[{{name: '{POLICY}:forward'}}]",
        steps=STEPS,
        rollouts=2,
        mini_batch=4,
        lr=1e-4,
    )


@pytest.fixture(scope="module")
def run(model: Path, out: Path) -> Run:
    strategy = f"turnkey.rollout.strategy={{name: vine, rollouts: {ROLLOUTS}}}"
    return branch(out / "vine", model, "+turnkey=progress", "turnkey.credit.alpha=0", strategy, seed=1)


def vine(steps: list[dict[str, Any]]) -> list[float]:
    return naive.progress([record | record["extra"] for record in steps], alpha=0)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_the_values_that_were_measured(run: Run, step: int) -> None:
    run.agrees_with(vine, step)
    extra = [record["extra"] for record in run.steps() if record["global_step"] == step]
    assert {columns["value_rollouts"] for columns in extra} == {ROLLOUTS}
    values = np.array([columns["turn_value"] for columns in extra])
    np.testing.assert_allclose(values * ROLLOUTS, (values * ROLLOUTS).round(), atol=1e-9)
    assert 0 <= values.min() < values.max() <= TURNS


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_what_is_measured_is_not_trained(run: Run, model: Path, step: int) -> None:
    run.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))
    metrics = run.metrics[step]
    turns = metrics["episode/length/mean"]
    assert metrics["episode/count"] == 8
    assert metrics["branching/forks"] == turns
    assert metrics["branching/measured"] == ROLLOUTS * turns
    assert metrics["branching/failed"] == metrics["branching/trained"] == 0
    assert metrics["branching/measured_tokens"] > metrics["rows/trained_tokens"] / 8
    assert metrics["actor/grad_norm"] > 0
    assert metrics["training/rollout_probs_diff_max"] < 1e-4


def test_values_are_those_of_the_policy(run: Run) -> None:
    """What an estimate says is to come is, on average over all states, what comes."""
    come: list[float] = []
    for episode in run.episodes("train"):
        rewards = [record["composed_reward"] for record in episode["steps"]]
        come += [sum(rewards[t:]) for t in range(len(rewards))]
    measured = [record["extra"]["turn_value"] for record in run.steps()]
    assert len(measured) == len(come) > 30
    assert len({round(value, 6) for value in measured}) > 3
    spread = np.std(np.array(come)) * np.sqrt(TURNS / len(come))
    assert abs(np.mean(measured) - np.mean(come)) < 4 * spread


@pytest.fixture(scope="module")
def chain(model: Path, out: Path) -> Run:
    strategy = "turnkey.rollout.strategy={name: spo_chain, rollouts: 2, every: 2}"
    credit = ("turnkey.credit.alpha=0", "turnkey.credit.segments=true")
    return branch(out / "chain", model, "+turnkey=progress", *credit, "+turnkey/loss=segment_mask", strategy, seed=3)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_each_turn_of_a_chain_gets_what_its_segment_adds(chain: Run, model: Path, step: int) -> None:
    """The rollouts' log-probabilities tell where it was cut, and each turn has the sum over its segment."""
    chain.agrees_with(lambda rows: naive.progress([r | r["extra"] for r in rows], alpha=0, segments=True), step)
    chain.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))
    measured = {record["extra"]["value_rollouts"] for record in chain.steps() if record["global_step"] == step}
    assert measured <= {0, 2}
    assert 2 in measured
    turns, unlikely = chain.played(), Counter()
    rows = [(turns[key], scores[mask.bool()]) for key, scores, mask in chain.rows(step, "keys", "rollout", "mask")]
    for turn, scores in sorted(rows, key=lambda row: (row[0]["trajectory"], row[0]["step"])):
        before = unlikely[turn["trajectory"]]
        unlikely[turn["trajectory"]] += int((scores < np.log(0.9)).sum())
        cut = unlikely[turn["trajectory"]] // 2 > before // 2
        assert turn["extra"]["value_rollouts"] == (2 if cut else 0)
    assert chain.metrics[step]["actor/grad_norm"] > 0


BLOCK = 32  # tokens that vLLM caches together, as +turnkey/device=cpu sets it
#: How branches are trained: the launch line, and the credit of each row.
TRAINED = {
    "tree": (
        [
            "+turnkey=tree",
            "turnkey.rollout.strategy={name: tree, depth: 1}",
            "trainer.v1.trainer_mode=turnkey_colocate_async",
        ],
        naive.tree,
    ),
    "entropy_branch": (
        [
            "+turnkey=tree",
            "turnkey.credit.rule=arpo",
            "turnkey.rollout.strategy={name: entropy_branch, trajectories: 6}",
        ],
        partial(naive.tree, rule="arpo"),
    ),
    "siblings": (["+turnkey=siblings", "turnkey.rollout.strategy={name: siblings, candidates: 3}"], naive.siblings),
}


@pytest.fixture(scope="module", params=TRAINED)
def forest(request: pytest.FixtureRequest, model: Path, out: Path) -> tuple[str, Run]:
    line, _ = TRAINED[request.param]
    return request.param, branch(out / request.param, model, *line, seed=2)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_each_turn_of_a_tree_is_trained_once_with_the_credit_of_its_method(forest: tuple[str, Run], step: int) -> None:
    strategy, run = forest
    credit, metrics = TRAINED[strategy][1], run.metrics[step]
    assert metrics["episode/count"] == 8
    if strategy == "tree":  # each rollout goes on in two ways from its turn 1
        assert metrics["branching/trained"] == metrics["branching/forks"] > 0.5
    elif strategy == "siblings":  # two more candidates for each turn
        assert metrics["branching/forks"] == metrics["episode/length/mean"]
        assert metrics["branching/trained"] == 2 * metrics["branching/forks"]
    else:  # of four groups, each with up to four branches
        assert 0 < 8 * metrics["branching/trained"] <= 16
    assert metrics["branching/measured"] == metrics["branching/failed"] == 0
    assert metrics["actor/grad_norm"] > 0
    queue = {key: (advantage, mask.bool()) for key, advantage, mask in run.rows(step, "keys", "advantages", "mask")}
    rollouts = {key.rpartition("_")[0] for key in queue}
    rows = [
        {
            "key": f"{episode['episode'].partition('.')[0]}_{int(turn['row'])}",
            "group": episode["group"],
            "trajectory": episode["episode"],
            "step": turn["turn"],
            "reward": turn["composed_reward"],
            "penalty": turn["penalty"],
            "prompt_tokens": turn["prompt_tokens"],
            **json.loads(turn["extra"]),
        }
        for episode in run.episodes("train")
        if episode["episode"].partition(".")[0] in rollouts
        for turn in episode["steps"]
        if turn["row"] is not None
    ]
    assert sorted(row["key"] for row in rows) == sorted(queue)
    assert queue.keys().isdisjoint(run.seen(STEPS + 1 - step)["keys"]), "trained in one step alone"
    assert len({row["trajectory"] for row in rows}) > 8, "branches are trained"
    for row, value in zip(rows, credit(rows), strict=True):
        advantage, mask = queue[row["key"]]
        np.testing.assert_allclose(advantage[mask].numpy(), value, atol=1e-5, err_msg=row["key"])
    if strategy == "entropy_branch":
        # The path has asked with the same prompt before: the server has its whole blocks, but for the last token.
        begins = {
            row["trajectory"]: row["prompt_tokens"]
            for row in sorted(rows, key=lambda row: -row["step"])
            if "." in row["trajectory"]
        }
        cached = [(tokens - 1) // BLOCK * BLOCK / tokens for tokens in begins.values()]
        assert np.mean(cached) > 0.3
        assert metrics["branching/cached_prompt_share"] == pytest.approx(np.mean(cached))
