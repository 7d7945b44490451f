"""Updates in phases through stock verl: turn after turn from the last (SeeUPO), and with carried log-ratios (REBEL)."""

from __future__ import annotations

from pathlib import Path

import naive
import numpy as np
import pytest
import torch
from launch import POLICY, Run, minigrid, train

pytestmark = pytest.mark.long

LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": 8}


def play(out: Path, model: Path, *overrides: str, mini_batch: int, steps: int) -> Run:
    """Each step ahead is paid, so that hardly any group is constant."""
    rewards = f"turnkey.rewards=[{{name: step}}, {{name: '{POLICY}:forward', weight: 0.1}}]"
    settings = (*overrides, *minigrid(out, LEVEL, seed=1), rewards)
    return train(out, model, *settings, rollouts=8, mini_batch=mini_batch, lr=3e-4, steps=steps)


@pytest.fixture(scope="module")
def seeupo(model: Path, out: Path) -> Run:
    return play(out, model, "+turnkey=seeupo", mini_batch=4, steps=2)


@pytest.mark.parametrize("step", [1, 2])
def test_each_turn_is_an_update_weighed_by_what_the_later_ones_did(seeupo: Run, step: int) -> None:
    episodes = {e["episode"]: e["steps"] for e in seeupo.episodes("train") if e["global_step"] == step}
    rows = {key: row for key, row in seeupo.played().items() if row["global_step"] == step}
    expected = dict(zip(rows, naive.seeupo(list(rows.values())), strict=True))
    assert seeupo.metrics[step]["actor/phases"] == max(map(len, episodes.values()))
    seen = seeupo.seen(step)
    weighed = []
    for key, mask, before, after in seeupo.rows(step, "keys", "mask", "advantages", "advantages_after"):
        on = mask.bool()
        np.testing.assert_allclose(before[on], expected[key], atol=1e-5)
        if not expected[key]:
            continue
        ratio = (after[on] / before[on]).unique()
        assert ratio.max() - ratio.min() < 1e-5, "one weight for all tokens of a turn"
        assert 0.8 - 1e-5 <= ratio[0] <= 1.2 + 1e-5
        last = len(episodes[rows[key]["trajectory"]]) - 1
        if rows[key]["step"] == last:
            assert ratio[0] == pytest.approx(1.0, abs=1e-6)
        else:
            weighed.append(abs(float(ratio[0]) - 1))
    assert max(weighed) > 1e-3
    assert np.isfinite(seeupo.metrics[step]["actor/grad_norm"])
    assert seeupo.metrics[step]["actor/grad_norm"] > 0
    moved = torch.cat([(a - b).abs() for a, b in zip(seen["after"], seen["before"], strict=True)])
    assert moved.max() > 1e-4


def test_rebel_moves_log_ratios_towards_differences_of_outcomes(model: Path, tmp_path: Path) -> None:
    """Four optimizer steps on one batch: two epochs of two mini-batches, each of whole groups."""
    run = play(
        tmp_path,
        model,
        "+turnkey=grpo_steps",
        "+turnkey/loss=rebel",
        "turnkey.loss.eta=10",  # differences that four steps do not reach, let alone pass
        "actor_rollout_ref.actor.ppo_epochs=2",
        mini_batch=2,
        steps=1,
    )
    change: dict[str, float] = {}
    for key, mask, before, after in run.rows(1, "keys", "mask", "before", "after"):
        trajectory = key.rsplit("_", 1)[0]
        change[trajectory] = change.get(trajectory, 0.0) + ((after - before) * mask).sum().item()
    outcome = {e["episode"]: e["composed_return"] for e in run.episodes("train")}
    product = 0.0
    for group in {key.rsplit("_", 1)[0] for key in change}:
        members = [key for key in change if key.rsplit("_", 1)[0] == group]
        centre = [np.mean([values[key] for key in members]) for values in (change, outcome)]
        product += sum((change[key] - centre[0]) * (outcome[key] - centre[1]) for key in members)
    assert product > 0
    assert run.metrics[1]["actor/regression_error"] > 0
