"""Updates in phases through stock verl: turn after turn from the last (SeeUPO), and with carried log-ratios (REBEL)."""

from __future__ import annotations

from pathlib import Path

import naive
import numpy as np
import pytest
import torch
from launch import Run, minigrid, train

pytestmark = pytest.mark.long

POLICY = Path(__file__).with_name("word_policy.py")
LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": 8}


def play(out: Path, model: Path, *overrides: str) -> Run:
    return train(
        out,
        *overrides,
        "+turnkey/device=cpu",
        *minigrid(out, LEVEL, train=8, val=4, seed=1),
        f"turnkey.rewards=[{{name: step}}, {{name: '{POLICY}:forward', weight: 0.1}}]",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=3e-4",
    )


@pytest.fixture(scope="module")
def seeupo(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps; each step ahead is paid, so that hardly any group is constant."""
    return play(
        tmp_path_factory.mktemp("seeupo"),
        model,
        "+turnkey=seeupo",
        "+turnkey/env=babyai",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=2",
    )


@pytest.mark.parametrize("step", [1, 2])
def test_each_turn_is_an_update_weighed_by_what_the_later_ones_did(seeupo: Run, step: int) -> None:
    episodes = {e["episode"]: e["steps"] for e in seeupo.episodes("train") if e["global_step"] == step}
    rows = {key: row for key, row in seeupo.played().items() if row["global_step"] == step}
    expected = dict(zip(rows, naive.seeupo(list(rows.values())), strict=True))
    assert seeupo.metrics[step]["actor/phases"] == max(map(len, episodes.values()))
    seen = seeupo.seen(step)
    weighed = []
    columns = (seen[name] for name in ("keys", "padding", "mask", "advantages", "advantages_after"))
    for key, padding, mask, before, after in zip(*columns, strict=True):
        if padding:
            continue
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
        "+turnkey/env=babyai",
        "+turnkey/loss=rebel",
        "turnkey.loss.eta=10",  # differences that four steps do not reach, let alone pass
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=1",
    )
    seen = run.seen(1)
    change: dict[str, float] = {}
    for key, padding, mask, before, after in zip(
        *(seen[name] for name in ("keys", "padding", "mask", "before", "after")), strict=True
    ):
        if not padding:
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
