"""verl's asynchronous trainers: batches of several weight versions, episodes that go on with new weights, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from launch import POLICY, SEPARATE, Run, minigrid, train
from logs import metrics_of, turns_of

DOORKEY = "MiniGrid-DoorKey-5x5-v0"
# Half of the tasks are over soon, so that the others are caught in the middle by new weights.
LEVELS = [{"level": DOORKEY, "max_steps": turns} for turns in (5, 30)]


def play(out: Path, model: Path, *overrides: str, **more: Any) -> Run:
    rewards = f"turnkey.rewards=[{{name: step}}, {{name: '{POLICY}:forward', weight: 0.1}}]"
    tasks = minigrid(out, *LEVELS, seed=0)
    return train(out, model, "+turnkey=gigpo", *overrides, *tasks, rewards, lr=1e-3, **more)


COLOCATE = (
    "+turnkey/loss=a3po",
    "trainer.v1.trainer_mode=turnkey_colocate_async",
    "trainer.save_freq=2",
    "turnkey.groups.allocation=variance",
    "turnkey.groups.keep=0.75",
)


@pytest.fixture(scope="module")
def colocate(model: Path, out: Path) -> Run:
    """Two steps; a third in a new process, from the checkpoint. Spy and trajectories of both are in one place."""
    out /= "colocate"
    saved = f"trainer.default_local_dir={out}/checkpoints"
    first = play(out, model, *COLOCATE, saved, mini_batch=4)
    log, spy = f"turnkey.log.trajectories={out}/episodes", {"TURNKEY_SPY": f"{out}/spy"}
    resumed = play(out / "resumed", model, *COLOCATE, saved, log, mini_batch=4, steps=3, env=spy)
    assert min(resumed.metrics) == 3
    return Run(out, first.metrics | resumed.metrics)


@pytest.fixture(scope="module")
def separate(model: Path, out: Path) -> Run:
    """Three steps of two updates each with verl's own loss; the server is apart from the trainer."""
    return play(
        out / "separate",
        model,
        *SEPARATE,
        "ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL=INFO",  # verl's default
        "trainer.test_freq=3",
        mini_batch=2,
        steps=3,
    )


UPDATES = {
    "colocate": [(step, 0) for step in (1, 2, 3)],
    "separate": [(step, update) for step in (1, 2, 3) for update in (0, 1)],
}


@pytest.fixture(params=list(UPDATES))
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(mode: str, request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(mode)


def test_credit_is_that_of_the_naive_twin(run: Run, mode: str) -> None:
    """After the resume too, on groups that were played before it."""
    for step, update in UPDATES[mode]:
        run.agrees_with(naive.gigpo, step, update)


def test_the_log_has_credit_and_updates_of_each_trained_turn(run: Run, mode: str) -> None:
    """Of each update of a step, whatever the rollout's step was; after the resume too."""
    for step in (1, 2, 3):
        turns = turns_of(run, step, naive.gigpo if mode == "colocate" else None, updates=1 + (mode == "separate"))
        assert metrics_of(run, step)["turnkey/log/lost"] == 0
        # a3po takes no entropy, and its recipe has no old policy computed
        assert turns["entropy"].notna().all() == (mode == "separate")


def test_rows_tell_the_weights_that_generated_them(run: Run) -> None:
    """Before the first update of a step the actor has the newest version: only its rows have the actor's log-probs."""
    fresh, stale = [], []
    for step in (1, 2, 3):
        for (oldest, newest), mask, rollout, actor in run.rows(step, "versions", "mask", "rollout", "before"):
            assert 0 <= oldest <= newest <= step - 1
            difference = ((rollout - actor).abs() * mask).max().item()
            (fresh if oldest == step - 1 else stale).append(difference)
    assert min(len(fresh), len(stale)) > 0, "the warm-up batch is of the first version"
    assert max(fresh) < 1e-4  # float32: the log-prob of a rare token differs by some 1e-5 between vLLM and the actor
    assert np.median(stale) > 1e-3


def test_every_update_moves_the_policy(run: Run, mode: str) -> None:
    for step, update in UPDATES[mode]:
        seen = run.seen(step, update)
        moved = torch.cat([after - before for before, after in zip(seen["before"], seen["after"], strict=True)])
        assert moved.isfinite().all()
        assert moved.abs().max() > 1e-4
    assert all(np.isfinite(run.metrics[step]["actor/grad_norm"]) for step in (1, 2, 3))


def test_tasks_that_are_known_are_played_more_or_less_often(colocate: Run) -> None:
    """The eight tasks come again from the second step on; what is known of them is in the checkpoint."""
    steps = [colocate.metrics[step] for step in (1, 2, 3)]
    assert [metrics["groups/kept"] for metrics in steps] == [0.75] * 3
    assert [metrics["episode/missing"] for metrics in steps] == [0] * 3
    assert steps[0]["groups/known"] == 0
    for metrics in steps[1:]:
        assert metrics["groups/known"] > 0
        assert metrics["groups/episodes/min"] < 4 < metrics["groups/episodes/max"]


def test_staleness_reaches_the_loss(colocate: Run) -> None:
    ages = set()
    for step, update in UPDATES["colocate"]:
        for (_, newest), mask, staleness in colocate.rows(step, "versions", "mask", "staleness", update=update):
            if mask.any():
                assert set(staleness[mask.bool()].tolist()) == {step - 1 - newest}
                ages.add(float(step - 1 - newest))
    assert 0.0 in ages
    assert max(ages) >= 1.0


def test_an_episode_goes_on_with_new_weights(colocate: Run) -> None:
    versions: dict[str, set[int]] = {}
    for step, update in UPDATES["colocate"]:
        for key, (_, newest) in colocate.rows(step, "keys", "versions", update=update):
            versions.setdefault(key.rsplit("_", 1)[0], set()).add(newest)
    assert max(map(len, versions.values())) > 1


def test_the_old_policy_is_that_of_the_beginning_of_the_step(separate: Run) -> None:
    """In the second update the actor has moved; rows of the step's own version have the old policy's log-probs."""
    compared = 0
    for step in (1, 2, 3):
        names = ("versions", "mask", "rollout", "old", "before")
        for (oldest, _), mask, rollout, old, actor in separate.rows(step, *names, update=1):
            if oldest == step - 1:
                assert ((rollout - old).abs() * mask).max() < 1e-4
                compared += int(((actor - old).abs() * mask).max() > 1e-3)
    assert compared > 0


def test_metrics_are_those_of_all_updates(separate: Run) -> None:
    for step in (1, 2, 3):
        metrics = separate.metrics[step]
        assert (metrics["episode/count"], metrics["episode/failed"], metrics["episode/missing"]) == (16, 0, 0)
        turns = separate.played()
        rewards = [turns[key]["reward"] for update in (0, 1) for (key,) in separate.rows(step, "keys", update=update)]
        assert metrics["episode/length/mean"] == pytest.approx(len(rewards) / 16)
        assert metrics["episode/composed_return/mean"] == pytest.approx(sum(rewards) / 16, abs=1e-6)
    [accuracy] = [value for key, value in separate.metrics[3].items() if key.startswith("val-core/doorkey/acc")]
    assert 0 <= accuracy <= 1
