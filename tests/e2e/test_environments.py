"""Real engines under stock verl: TextWorld's games, and household problems in ALFWorld's own format."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import naive
import numpy as np
import pytest
from launch import POLICY, Run, data, short, train
from transformers import AutoTokenizer

TURNKEY = Path(sys.executable).with_name("turnkey")
STEPS = 2


def play(out: Path, model: Path, recipe: str, *overrides: str, env: dict[str, str] | None = None) -> Run:
    return train(
        out,
        model,
        "+turnkey=gigpo",
        f"+turnkey/env={recipe}",
        f"turnkey.rollout.action_format={POLICY}:choose",
        *data(out / "tasks", batch=2),
        "data.max_prompt_length=1000",
        "trainer.test_freq=2",
        *overrides,
        steps=STEPS,
        mini_batch=2,
        lr=1e-4,
        env=env,
    )


def tasks(out: Path, *options: str, env: dict[str, str]) -> None:
    command = [TURNKEY, "tasks", out / "tasks", "--train", "8", "--val", "4", *options]
    subprocess.run(command, check=True, env={**os.environ, **env})


@pytest.fixture(scope="module")
def textworld(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("textworld")
    env = {"TURNKEY_CACHE": str(out / "cache")}
    kwargs = '{"challenge": "coin_collector", "level": 2, "games": 4}'
    tasks(out, "--env", "turnkey/TextWorld-v0", "--kwargs", kwargs, env=env)
    return play(
        out,
        model,
        "textworld",  # a conversation
        "turnkey.rollout.max_turns=10",
        "turnkey.rollout.max_tokens_per_turn=8",
        "data.max_response_length=1000",
        env=env,
    )


@pytest.fixture(scope="module")
def alfworld(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Paid for going somewhere as well, since a random walk solves none of these, and picks nothing up in some runs."""
    out = tmp_path_factory.mktemp("alfworld")
    games = ["--train", "6", "--valid-seen", "0", "--valid-unseen", "6"]
    generator = [sys.executable, "-m", "verl_turnkey.envs.adapters.alfworld.generate"]
    subprocess.run([*generator, out / "data", *games], check=True)
    env = {"ALFWORLD_DATA": str(out / "data")}
    tasks(out, "--env", "turnkey/ALFWorld-v0", "--val-kwargs", '{"split": "valid_unseen"}', env=env)
    rewards = f"turnkey.rewards=[{{name: step}}, {{name: '{POLICY}:going', weight: 0.1}}]"
    return play(out, model, "alfworld", "turnkey.rollout.max_turns=8", rewards, env=env)


@pytest.fixture(params=short("alfworld", ("textworld", "alfworld")))
def run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(request.param)


def test_every_episode_is_played_to_its_end_in_the_real_engine(run: Run) -> None:
    package = {"turnkey/TextWorld-v0": "textworld", "turnkey/ALFWorld-v0": "alfworld"}
    for split, number in (("train", 8 * STEPS), ("val", 4)):
        episodes = run.episodes(split)
        assert len(episodes) == number
        for episode in episodes:
            assert episode["failed"] is None
            name, version = episode["package"].split()
            assert name == package[episode["env"]]
            assert version
            assert episode["validation"] == (split == "val")
            last = episode["steps"][-1]
            assert last["terminated"] or last["truncated"]
            assert all(step["valid"] for step in episode["steps"])


def test_the_rollouts_of_a_group_begin_alike(run: Run) -> None:
    starts: dict[str, set[str]] = {}
    for episode in run.episodes("train"):
        starts.setdefault(episode["group"], set()).add(episode["texts"][0]["prompt_tail"])
    assert len(starts) == 2 * STEPS
    assert all(len(seen) == 1 for seen in starts.values())
    assert len(set.union(*starts.values())) > 1


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_of_real_states_is_that_of_the_naive_twin(run: Run, step: int) -> None:
    run.agrees_with(naive.gigpo, step)
    assert run.metrics[step]["credit/share_steps_in_anchor_groups"] > 0.2, "the states of a group repeat"
    assert np.isfinite(run.metrics[step]["actor/grad_norm"])


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_every_turn_is_in_one_row_as_it_was_written(run: Run, model: Path, step: int) -> None:
    run.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))
    assert run.metrics[step]["training/rollout_probs_diff_max"] < 1e-4  # the row's context is what the server saw


@pytest.mark.long
def test_a_conversation_is_one_row(textworld: Run, alfworld: Run) -> None:
    def sizes(run: Run, part: str) -> list[int]:
        return [len({step[part] for step in episode["steps"]}) for episode in run.episodes("train")]

    assert sizes(alfworld, "row") == sizes(alfworld, "turn")
    assert set(sizes(textworld, "row")) == {1}
    assert max(sizes(textworld, "turn")) > 3


def test_something_was_learnt_from(run: Run) -> None:
    assert max(data.get("actor/grad_norm", 0.0) for data in run.metrics.values()) > 0


def test_components_are_logged_by_name(alfworld: Run) -> None:
    went = [
        sum((step["action"] or "").startswith("go to ") for step in episode["steps"])
        for episode in alfworld.episodes("train")
        if episode["global_step"] == 1
    ]
    assert alfworld.metrics[1]["episode/composed_return.going/mean"] == pytest.approx(0.1 * np.mean(went))
    assert sum(went) > 0


@pytest.mark.long
def test_walks_find_coins(textworld: Run) -> None:
    assert max(textworld.metrics[step]["episode/success_rate"] for step in range(1, STEPS + 1)) > 0
    assert textworld.metrics[1]["episode/composed_return/mean"] == textworld.metrics[1]["episode/success_rate"]
