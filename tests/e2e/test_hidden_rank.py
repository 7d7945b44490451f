"""Credit from the hidden states of the actor on stock verl: two ranks, two steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launch import POLICY, minigrid, train
from logs import metrics_of, of_step

pytestmark = pytest.mark.long

LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": 6}


def test_credit_rises_by_the_rank_of_hidden_states(model: Path, tmp_path: Path) -> None:
    """Rows hold whole conversations, so that they have tokens enough; each step forward is paid."""
    run = train(
        tmp_path,
        model,
        "+turnkey=rloo_steps",
        *minigrid(tmp_path, LEVEL, seed=1),
        "turnkey.credit.modify=[{name: rank_shaping, stride: 2}]",
        f"turnkey.rewards=[{{name: step}}, {{name: '{POLICY}:forward', weight: 0.1}}]",
        "turnkey.rollout.prompt=conversation",
        "turnkey.rollout.max_tokens_per_turn=8",
        "data.max_response_length=1024",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=2",
        mini_batch=4,
    )
    for step in (1, 2):
        metrics = metrics_of(run, step)
        assert metrics["credit/rank_shaping/rank/mean"] > 2
        assert metrics["credit/rank_shaping/rank_velocity/mean"] != 0
        credit = of_step(run, "credit", step)
        phi, added = (credit[f"{kind}.{name}"].to_numpy() for kind, name in
                      (("level", "rank_shaping/phi"), ("part", "rank_shaping")))  # fmt: skip
        base = (credit["advantage"] - credit["part.penalty"]).to_numpy() - added
        np.testing.assert_allclose(added, np.minimum(np.maximum(phi, 0), np.abs(base) / 2), atol=1e-6)
        assert added.any() == (step == 2), "the first batch sets the running means alone"
        numbers = credit.groupby(["row_id"])["level.rank_shaping/phi"].nunique()
        assert (numbers == 1).all(), "turns of a row share its numbers"
