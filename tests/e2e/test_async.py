"""verl's asynchronous trainers: rows of several weight versions in one batch, and A-3PO's loss on them."""

from __future__ import annotations

from pathlib import Path

import naive
import numpy as np
import pytest
import torch
from launch import Run, train

from verl_turnkey.envs.tasks import Task, split_seeds, write_parquet

POLICY = Path(__file__).with_name("word_policy.py")
LEVEL = "MiniGrid-DoorKey-5x5-v0"
TURNS = (5, 30)  # half of the tasks are over soon, so that the others are caught in the middle by new weights
STEPS = 3

# By mode: what it needs, and how many updates of the actor a training step makes.
MODES: dict[str, tuple[tuple[str, ...], int]] = {
    "colocate_async": (("actor_rollout_ref.actor.ppo_mini_batch_size=4",), 1),
    "separate_async": (
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "trainer.v1.separate_async.parameter_sync_step=2",
            # One logical GPU for the trainer, one for the server apart from it.
            "ray_kwargs.ray_init.num_gpus=2",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.hybrid_engine=false",
        ),
        2,
    ),
}


@pytest.fixture(scope="module", params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(mode: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp(mode)
    for split, seeds in zip(("train", "val"), split_seeds(16, 4, seed=0), strict=True):
        tasks = [
            Task("turnkey/MiniGrid-v0", seed, {"level": LEVEL, "max_steps": TURNS[i % 2]})
            for i, seed in enumerate(seeds)
        ]
        write_parquet(out / f"{split}.parquet", tasks, "doorkey", split)
    return train(
        out,
        "+turnkey=gigpo",
        "+turnkey/env=babyai",
        "+turnkey/loss=a3po",
        "+turnkey/device=cpu",
        f"trainer.v1.trainer_mode=turnkey_{mode}",
        *MODES[mode][0],
        "turnkey.rollout.template=minigrid",
        "turnkey.rollout.action_format=plain",
        f"turnkey.rollout.max_turns={max(TURNS)}",
        f"turnkey.rewards=[{{name: step}}, {{name: '{POLICY}:forward', weight: 0.1}}]",
        f"data.train_files={out}/train.parquet",
        f"data.val_files={out}/val.parquet",
        "data.train_batch_size=4",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.total_training_steps={STEPS}",
    )


@pytest.fixture(scope="module")
def updates(mode: str) -> list[tuple[int, int]]:
    return [(step, update) for step in range(1, STEPS + 1) for update in range(MODES[mode][1])]


def test_credit_is_that_of_the_naive_twin(run: Run, updates: list[tuple[int, int]]) -> None:
    for step, update in updates:
        run.agrees_with(naive.gigpo, step, update)


def test_rows_tell_the_weights_that_generated_them(run: Run) -> None:
    """Before the first update of a step the actor has the newest version: only its rows have the actor's log-probs."""
    fresh, stale = [], []
    for step in range(1, STEPS + 1):
        seen = run.seen(step)
        columns = (seen[name] for name in ("versions", "padding", "mask", "old", "before"))
        for (oldest, newest), padding, mask, rollout, actor in zip(*columns, strict=True):
            if not padding:
                assert 0 <= oldest <= newest <= step - 1
                difference = ((rollout - actor).abs() * mask).max().item()
                (fresh if oldest == step - 1 else stale).append(difference)
    assert min(len(fresh), len(stale)) > 0, "the warm-up batch is of the first version"
    assert max(fresh) < 1e-5
    assert np.median(stale) > 1e-3


def test_an_episode_goes_on_with_new_weights(run: Run, updates: list[tuple[int, int]]) -> None:
    versions: dict[str, set[int]] = {}
    for step, update in updates:
        seen = run.seen(step, update)
        for key, (_, newest), padding in zip(seen["keys"], seen["versions"], seen["padding"], strict=True):
            if not padding:
                versions.setdefault(key.rsplit("_", 1)[0], set()).add(newest)
    assert max(map(len, versions.values())) > 1


def test_staleness_reaches_the_loss(run: Run, updates: list[tuple[int, int]]) -> None:
    found = set()
    for step, update in updates:
        seen = run.seen(step, update)
        for (_, newest), padding, staleness in zip(seen["versions"], seen["padding"], seen["staleness"], strict=True):
            if not padding:
                assert float(staleness) == step - newest
                found.add(float(staleness))
    assert 1.0 in found
    assert max(found) >= 2.0


def test_every_update_moves_the_policy(run: Run, updates: list[tuple[int, int]]) -> None:
    for step, update in updates:
        seen = run.seen(step, update)
        moved = torch.cat([after - before for before, after in zip(seen["before"], seen["after"], strict=True)])
        assert moved.isfinite().all()
        assert moved.abs().max() > 1e-4
    assert all(np.isfinite(run.metrics[step]["actor/grad_norm"]) for step in range(1, STEPS + 1))
