"""Real verl, real vLLM, real Ray: two things a training run must do, and three it must survive."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from launch import Run, data, minigrid, train
from logs import metrics_of, of_step, turns_of
from safetensors.torch import load_file

from verl_turnkey.envs.tasks import Task, write_parquet

HERE = Path(__file__).parent

LEVEL = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 20}
STEPS, FROZEN_AFTER = 5, 3


@pytest.fixture(scope="module")
def learning(model: Path, out: Path) -> Run:
    """Five steps of GiGPO under ST-PPO's loss on DoorKey; after the third the new weights no longer reach vLLM.

    Two epochs with a narrow clip range, so that the second optimizer step of each batch clips. Two ranks, each with a
    server of its own.
    """
    out /= "learning"
    return train(
        out,
        model,
        "+turnkey=gigpo",
        *minigrid(out, LEVEL, train=32, seed=0),
        "+turnkey/loss=st_ppo",
        "turnkey.loss.clip_low=0.01",
        "turnkey.loss.clip_high=0.01",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=2",
        steps=STEPS,
        rollouts=8,
        mini_batch=4,
        lr=1e-4,
        env={"TURNKEY_SPY_FREEZE_AFTER": str(FROZEN_AFTER)},
    )


def test_advantages_in_the_queue_are_those_of_the_naive_twin(learning: Run) -> None:
    """By row key, from the records that the agent loop wrote to a file; nothing of the trainer takes part."""
    played = learning.played()
    for step in range(1, STEPS + 1):
        real = {key for (key,) in learning.rows(step, "keys")}
        assert real == {key for key, row in played.items() if row["global_step"] == step}
        learning.agrees_with(naive.gigpo, step)


def test_positive_credit_becomes_more_likely_than_negative(learning: Run) -> None:
    """Weighted by the credit itself, which is what the gradient promises for a small step."""
    gains = []
    for step in range(1, STEPS + 1):
        seen = learning.seen(step)
        mask = torch.cat(seen["mask"]).bool()
        advantage = torch.cat(seen["advantages"])[mask].double()
        change = (torch.cat(seen["after"]) - torch.cat(seen["before"]))[mask].double()
        up, down = advantage.clamp(min=0), -advantage.clamp(max=0)
        gains.append(((up * change).sum() / up.sum() - (down * change).sum() / down.sum()).item())
    assert min(gains) > 0, gains


def test_generation_uses_the_updated_weights(learning: Run) -> None:
    """In true fp32 vLLM and the actor agree to 1e-5, and only while the weights are sent over."""
    difference = {step: metrics["training/rollout_probs_diff_max"] for step, metrics in learning.metrics.items()}
    for step in range(1, FROZEN_AFTER + 2):  # the batch of the step after the last sync is still right
        assert difference[step] < 1e-5, difference
    assert difference[FROZEN_AFTER + 2] > 1e-5, difference


def test_st_ppo_scales_the_second_update_and_not_the_first(learning: Run) -> None:
    steps = [learning.metrics[step] for step in range(1, STEPS + 1)]  # means over the two optimizer steps of a batch
    assert max(metrics["actor/pg_clipfrac"] for metrics in steps) > 0.02, "the clip range of 0.01 did not arrive"
    clipped = [metrics for metrics in steps if metrics["actor/clipping_bias/rows"] > 0]
    assert clipped
    for metrics in clipped:
        assert metrics["actor/clipping_bias/norm"] > 0
        second = 2 * metrics["actor/clipping_bias/scale"] - 1
        assert second == pytest.approx(1 / max(1.0, 2 * metrics["actor/clipping_bias/norm"]), rel=1e-4)


def test_what_the_docs_name_is_logged(learning: Run) -> None:
    page = (HERE.parents[1] / "docs" / "metrics.md").read_text()
    documented = set()
    for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", cell)
        documented |= {first, *(o if not o.startswith("/") else first.rpartition("/")[0] + o for o in others)}
    prefixes = ("episode/", "rows/", "dealing/", "credit/", "hosts/", "rollout_s/")
    ours = {name for name in documented if name.startswith(prefixes)}
    ours = {name for name in ours if "<" not in name and "..." not in name}
    ours -= {"rows/cached_prompt_share", "rows/observation_tokens"}  # need a server that reports it, that loss
    assert len(ours) > 35
    for step in range(1, STEPS + 1):
        assert sorted(ours - learning.metrics[step].keys()) == []
    assert learning.metrics[2]["hosts/silent"] == 0
    assert learning.metrics[2]["hosts/steps"] >= learning.metrics[2]["episode/count"]
    assert learning.metrics[2]["hosts/step_ms/p50"] > 0


def test_the_log_has_credit_and_updates_of_each_trained_turn(learning: Run) -> None:
    """From both ranks. The first of two epochs is on policy; the second is clipped at a ratio of 1.01."""
    for step in range(1, STEPS + 1):
        turns = turns_of(learning, step, naive.gigpo, epochs=2)
        first, second = (turns[turns["epoch"] == epoch] for epoch in range(2))
        np.testing.assert_allclose(first["ratio"], 1.0, atol=1e-3)
        assert (second["ratio"] - 1).abs().max() > 1e-3
        assert first["clip_share"].max() == 0
        metrics = metrics_of(learning, step)
        assert metrics["turnkey/log/lost"] == 0
        if step > 1:
            assert metrics["turnkey/log/written"] > 0
    clipped = [learning.metrics[step]["actor/pg_clipfrac"] > 0 for step in range(1, STEPS + 1)]
    assert clipped == [(of_step(learning, "updates", step)["clip_share"] > 0).any() for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def broken(model: Path, out: Path) -> Run:
    """One step on environments of which half break, each in its own way; nobody is ever rewarded."""
    out /= "broken"
    out.mkdir()
    # A reset that fails in an environment of the training is tried again, in a new one: it has no part in validation.
    for split, faults in (("train", ("reset", "step", "nan", "hang")), ("val", ("step", "step", "nan", "nan"))):
        tasks = [Task("test/Broken-v0", seed, {"fault": fault}) for seed, fault in enumerate(faults)]
        write_parquet(out / f"{split}.parquet", tasks, "broken", split)
    return train_broken(out, out, model, "+turnkey=gigpo", steps=1)


def train_broken(out: Path, tasks: Path, model: Path, *overrides: str, steps: int) -> Run:
    return train(
        out,
        model,
        *overrides,
        "turnkey.env.probe=false",  # the first task breaks there as well
        "turnkey.env.step_timeout=10",
        "turnkey.rollout.max_turns=5",
        f"turnkey.rollout.action_format={HERE / 'broken_env.py'}:walk",
        "turnkey.rollout.invalid_action_penalty=0",
        "turnkey.update.mini_batches=3",
        "critic.enable=true",
        f"critic.model.path={model}",
        "critic.ppo_max_token_len_per_gpu=8192",
        "critic.optim.weight_decay=0.0",
        *data(tasks, batch=4),
        "actor_rollout_ref.actor.entropy_coeff=0",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={tasks}/checkpoints",
        steps=steps,
        mini_batch=4,
        lr=1e-2,
        modules=(HERE / "broken_env.py",),
    )


def test_a_dead_environment_costs_its_own_episode(broken: Run) -> None:
    episodes = broken.episodes("train")
    failed = [episode for episode in episodes if episode["failed"]]
    assert (len(episodes), len(failed)) == (16, 8)
    reasons = " ".join(episode["failed"] for episode in failed)
    for reason in ("no such room", "the floor gave way", "finite", "longer than 10 s"):
        assert reason in reasons
    metrics = broken.metrics[1]
    assert metrics["episode/failed"] == 8
    kinds = dict.fromkeys(("reset", "step", "reward", "timeout"), 2)
    assert {kind: metrics[f"episode/failed/{kind}"] for kind in kinds} == kinds
    assert metrics["episode/success_rate"] == 0.5
    seen = broken.seen(1)
    by_key = dict(zip(seen["keys"], seen["mask"], strict=True))
    real = [key for key, padding in zip(seen["keys"], seen["padding"], strict=True) if not padding]
    for episode in failed:
        rows = [key for key in real if key.startswith(f"{episode['episode']}_")]
        assert len(rows) == 1, "one row, the earlier steps dropped"
        assert by_key[rows[0]].sum() == 0
    assert len(real) == sum(max(1, len({step["row"] for step in episode["steps"]})) for episode in episodes)
    assert any(seen["padding"])


def test_failed_episodes_count_as_not_solved_in_validation(broken: Run) -> None:
    metrics = broken.metrics[1]
    assert metrics["val-core/broken/acc/mean@1"] == metrics["val-aux/broken/failed/mean@1"] == 0.5
    assert metrics["val-aux/broken/acc_success_only/mean@1"] == 1
    assert metrics["val-aux/broken/episode_length/mean@1"] == 3


def test_what_failed_is_on_the_console(broken: Run) -> None:
    """Although the settings for a CPU let errors through only: the first of each kind, and the share in validation."""
    log = (broken.out / "log.txt").read_text()
    for kind in ("reset", "step", "reward", "timeout"):
        assert f"1 failed episode of the kind '{kind}' in this process so far, the latest: EnvironmentFailure: " in log
    assert "2 of 4 validation episodes failed; latest reasons:" in log


def test_a_batch_without_any_signal_leaves_the_weights_bit_identical(broken: Run, model: Path) -> None:
    assert broken.metrics[1]["actor/grad_norm"] == 0
    assert broken.metrics[1]["actor/lr"] > 0
    before = load_file(model / "model.safetensors")
    after = _checkpoint(broken, "model")
    compared = 0
    for name, tensor in after.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if name in before:
            assert torch.equal(full.cpu(), before[name]), name
            compared += 1
    assert compared == len(before)


def test_three_mini_batches_are_three_optimizer_steps(broken: Run) -> None:
    """Counted by the optimizer itself, though a batch of this many rows is no multiple of anything."""
    states = _checkpoint(broken, "optim")["state"].values()
    assert {int(state["step"]) for state in states} == {3}


def _checkpoint(run: Run, part: str) -> dict[str, Any]:
    file = run.out / "checkpoints" / "global_step_1" / "actor" / f"{part}_world_size_1_rank_0.pt"
    return torch.load(file, weights_only=False)


def test_resumes_and_trains_with_an_estimator_of_verls_own(broken: Run, model: Path) -> None:
    """From the checkpoint, with verl's GAE and a loss of ours, on step rows of which some are failed episodes.

    In micro-batches of a fixed size, as ordinary scripts have them, and with episodes that weigh alike.
    """
    run = train_broken(
        broken.out.with_name("resumed"),
        broken.out,
        model,
        "+turnkey=base",
        "+turnkey/loss=dgpo",
        "algorithm.adv_estimator=gae",
        "turnkey.update.weight_by=episode",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=5",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=2",
        steps=2,
    )
    assert min(run.metrics) == 2, "the first step was not trained again"
    assert len(run.seen(2)["keys"]) % 60 == 0, "3 mini-batches of micro-batches of 2, forward passes in 5 and in 4"
    assert np.isfinite(run.metrics[2]["actor/grad_norm"])
    assert run.metrics[2]["actor/grad_norm"] > 0
    assert run.metrics[2]["critic/vf_loss"] > 0
    assert run.metrics[2]["actor/ratio/max"] >= run.metrics[2]["actor/ratio/min"] > 0  # dgpo's
    assert len([e for e in run.episodes("train") if e["failed"]]) == 8
