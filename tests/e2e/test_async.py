"""verl's asynchronous trainers: batches of several weight versions, episodes that go on with new weights, resuming."""

from __future__ import annotations

from pathlib import Path

import naive
import numpy as np
import pytest
import torch
from launch import Run, minigrid, train
from logs import metrics_of, turns_of

POLICY = Path(__file__).with_name("word_policy.py")
DOORKEY = "MiniGrid-DoorKey-5x5-v0"
# Half of the tasks are over soon, so that the others are caught in the middle by new weights.
LEVELS = [{"level": DOORKEY, "max_steps": turns} for turns in (5, 30)]


def play(out: Path, model: Path, *overrides: str, env: dict[str, str] | None = None) -> Run:
    return train(
        out,
        "+turnkey=gigpo",
        "+turnkey/env=babyai",
        *overrides,
        "+turnkey/device=cpu",
        *minigrid(out, *LEVELS, train=8, val=4, seed=0),
        f"turnkey.rewards=[{{name: step}}, {{name: '{POLICY}:forward', weight: 0.1}}]",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        env=env,
    )


COLOCATE = (
    "+turnkey/loss=a3po",
    "trainer.v1.trainer_mode=turnkey_colocate_async",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.save_freq=2",
    "turnkey.groups.allocation=variance",
    "turnkey.groups.keep=0.75",
)


@pytest.fixture(scope="module")
def colocate(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps; a third in a new process, from the checkpoint. Spy and trajectories of both are in one place."""
    out = tmp_path_factory.mktemp("colocate")
    saved = f"trainer.default_local_dir={out}/checkpoints"
    first = play(out, model, *COLOCATE, saved, "trainer.total_training_steps=2")
    resumed = play(
        out / "resumed",
        model,
        *COLOCATE,
        saved,
        "trainer.total_training_steps=3",
        f"turnkey.log.trajectories={out}/episodes",
        env={"TURNKEY_SPY": f"{out}/spy"},
    )
    assert min(resumed.metrics) == 3
    return Run(out, first.metrics | resumed.metrics)


@pytest.fixture(scope="module")
def separate(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps of two updates each with verl's own loss; the server is apart from the trainer."""
    return play(
        tmp_path_factory.mktemp("separate"),
        model,
        "trainer.v1.trainer_mode=turnkey_separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        # One logical GPU for the trainer, one for the server.
        "ray_kwargs.ray_init.num_gpus=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.hybrid_engine=false",
        "ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL=INFO",  # verl's default
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
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
        seen = run.seen(step)
        columns = (seen[name] for name in ("versions", "padding", "mask", "rollout", "before"))
        for (oldest, newest), padding, mask, rollout, actor in zip(*columns, strict=True):
            if not padding:
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
        seen = colocate.seen(step, update)
        columns = (seen[name] for name in ("versions", "padding", "mask", "staleness"))
        for (_, newest), padding, mask, staleness in zip(*columns, strict=True):
            if not padding and mask.any():
                assert set(staleness[mask.bool()].tolist()) == {step - 1 - newest}
                ages.add(float(step - 1 - newest))
    assert 0.0 in ages
    assert max(ages) >= 1.0


def test_an_episode_goes_on_with_new_weights(colocate: Run) -> None:
    versions: dict[str, set[int]] = {}
    for step, update in UPDATES["colocate"]:
        seen = colocate.seen(step, update)
        for key, (_, newest), padding in zip(seen["keys"], seen["versions"], seen["padding"], strict=True):
            if not padding:
                versions.setdefault(key.rsplit("_", 1)[0], set()).add(newest)
    assert max(map(len, versions.values())) > 1


def test_the_old_policy_is_that_of_the_beginning_of_the_step(separate: Run) -> None:
    """In the second update the actor has moved; rows of the step's own version have the old policy's log-probs."""
    compared = 0
    for step in (1, 2, 3):
        seen = separate.seen(step, 1)
        columns = (seen[name] for name in ("versions", "padding", "mask", "rollout", "old", "before"))
        for (oldest, _), padding, mask, rollout, old, actor in zip(*columns, strict=True):
            if not padding and oldest == step - 1:
                assert ((rollout - old).abs() * mask).max() < 1e-4
                compared += int(((actor - old).abs() * mask).max() > 1e-3)
    assert compared > 0


def test_metrics_are_those_of_all_updates(separate: Run) -> None:
    for step in (1, 2, 3):
        metrics = separate.metrics[step]
        assert (metrics["episode/count"], metrics["episode/failed"], metrics["episode/missing"]) == (16, 0, 0)
        played = separate.played()
        keys = [
            key
            for update in (0, 1)
            for key, padding in zip(*(separate.seen(step, update)[name] for name in ("keys", "padding")), strict=True)
            if not padding
        ]
        assert metrics["episode/length/mean"] == pytest.approx(len(keys) / 16)
        assert metrics["episode/composed_return/mean"] == pytest.approx(
            sum(played[key]["reward"] for key in keys) / 16, abs=1e-6
        )
    [accuracy] = [value for key, value in separate.metrics[3].items() if key.startswith("val-core/doorkey/acc")]
    assert 0 <= accuracy <= 1
