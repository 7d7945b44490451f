"""Kuhn poker of OpenSpiel, trained in self-play and against a random opponent, with credit by role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import POLICY, Run, data, gigpo_by_role, train

from verl_turnkey.envs.tasks import Task, write_parquet

PLAYERS = ["player 0", "player 1"]
SEEDS, STEPS = [1, 2, 3, 4], 2


@pytest.fixture(scope="module", params=["self", "random"])
def played(request: pytest.FixtureRequest, model: Path, out: Path) -> tuple[str, Run]:
    folder = out / request.param
    for split in ("train", "val"):
        tasks = [Task("turnkey/OpenSpiel-v0", seed, {"game": "kuhn_poker"}) for seed in SEEDS]
        write_parquet(folder / f"{split}.parquet", tasks, "kuhn", split)
    return request.param, train(
        folder,
        model,
        "+turnkey=gigpo",
        "+turnkey/env=openspiel",
        f"turnkey.opponent={request.param}",
        f"turnkey.rollout.action_format={POLICY}:choose",
        "turnkey.rollout.max_tokens_per_turn=8",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
        *data(folder, batch=4),
        f"trainer.test_freq={STEPS}",
        steps=STEPS,
    )


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_each_role_alone(played: tuple[str, Run], step: int) -> None:
    played[1].agrees_with(gigpo_by_role, step)


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_policy_plays_all_roles_or_the_one_of_its_seed(played: tuple[str, Run], split: str) -> None:
    """Validation is against a random opponent in either case, as the recipe says."""
    opponent, run = played
    episodes = run.episodes(split)
    assert episodes
    for episode in episodes:
        assert episode["failed"] is None
        roles = {json.loads(step["extra"])["role"] for step in episode["steps"]}
        others = [turn for text in episode["texts"] for turn in json.loads(text["opponents"] or "[]")]
        if opponent == "self" and split == "train":
            assert roles == {*PLAYERS}
            assert others == []
        else:
            seat = PLAYERS[episode["seed"] % 2]
            assert roles == {seat}
            assert {turn["role"] for turn in others} == {*PLAYERS} - {seat}
            assert all(turn["by"] == "random" for turn in others)


def test_what_one_wins_the_other_loses(played: tuple[str, Run]) -> None:
    opponent, run = played
    outcomes = [
        {extra["role"]: extra["role_outcome"] for step in e["steps"] for extra in [json.loads(step["extra"])]}
        for e in run.episodes("train")
    ]
    assert all(outcome in (-2, -1, 1, 2) for of_roles in outcomes for outcome in of_roles.values())
    if opponent == "self":
        assert all(sum(of_roles.values()) == 0 for of_roles in outcomes)
