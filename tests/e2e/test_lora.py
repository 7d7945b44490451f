"""LoRA: the adapter alone is trained, it plays, and the reference policy is the actor without it."""

from __future__ import annotations

from pathlib import Path

import naive
import numpy as np
import pytest
import torch
from launch import POLICY, SEPARATE, Run, minigrid, short, train
from safetensors.torch import load_file

STEPS = 5
ROUNDED = {"sync": 1e-4, "separate_async": 0.02}
"""log-probabilities: verl rounds weights that are sent with the adapter in them to bfloat16"""
LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": 8}
MODES = {
    "sync": (),
    # The server is sent the weights with the adapter in them.
    "separate_async": ("actor_rollout_ref.model.lora.merge=true", *SEPARATE),
}


@pytest.fixture(scope="module", params=short("sync", MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(mode: str, model: Path, out: Path) -> Run:
    """The reward is the number of steps ahead: hardly any group is constant, so the first update moves the adapter."""
    return train(
        out / mode,
        model,
        "+turnkey=gigpo",
        *minigrid(out / mode, LEVEL, seed=3),
        f"turnkey.rewards=[{{name: '{POLICY}:forward'}}]",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=16",
        "actor_rollout_ref.model.target_modules=all-linear",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={out / mode}/checkpoints",
        *MODES[mode],
        steps=STEPS,
        mini_batch=2,
        lr=3e-3,
    )


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_the_naive_twin(run: Run, step: int) -> None:
    run.agrees_with(naive.gigpo, step)


def test_the_adapter_plays(run: Run, mode: str) -> None:
    """The reference is the actor without it: what the first version says, and no later one."""
    rounded, first, later = ROUNDED[mode], [], []
    for step in range(1, STEPS + 1):
        names = ("versions", "mask", "rollout", "before", "reference")
        for (oldest, newest), mask, rollout, actor, reference in run.rows(step, *names):
            (later if oldest else first).append(((rollout - reference).abs() * mask).max().item())
            if oldest == newest == step - 1:
                assert ((rollout - actor).abs() * mask).max() < rounded
    assert max(first) < rounded
    assert np.median(later) > 0.05, later


def test_nothing_but_the_adapter_is_trained(run: Run, model: Path) -> None:
    before = load_file(model / "model.safetensors")
    shard = run.out / "checkpoints" / f"global_step_{STEPS}" / "actor" / "model_world_size_1_rank_0.pt"
    after = torch.load(shard, weights_only=False)
    after = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in after.items()}
    kept = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value for name, value in after.items()}
    assert before.keys() <= kept.keys()
    assert all(torch.equal(value, kept[name]) for name, value in before.items())
    assert all(value.abs().max() > 0 for name, value in after.items() if "lora_B" in name)
