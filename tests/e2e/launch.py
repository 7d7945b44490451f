"""Start stock verl as a user does, and read what it left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_turnkey.envs.tasks import Task, split_seeds, write_parquet

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """A finished run: metrics by step, what the spy saw, and the episodes that the agent loop logged."""

    out: Path
    metrics: dict[int, dict[str, float]]

    def seen(self, step: int, update: int = 0) -> dict[str, Any]:
        """What the spy saw at an update of the actor; ``update``: which one, where a step has several."""
        return torch.load(self.out / "spy" / f"step{step}.{update}.pt", weights_only=False)

    def episodes(self, split: str) -> list[dict[str, Any]]:
        lines = [
            json.loads(line) for path in self.out.glob("episodes/*.jsonl") for line in path.read_text().splitlines()
        ]
        return [line for line in lines if line["split"] == split]

    def played(self) -> dict[str, dict[str, Any]]:
        """The steps of all training episodes that went well, as the estimators see them, by the key of their row.

        An episode that was asked for again, after a resume, is the one that was trained on.
        """
        newest = {e["key"]: e for e in sorted(self.episodes("train"), key=lambda e: e["global_step"])}
        return {
            f"{key}_{index}": {
                "group": key.rsplit("_", 1)[0],
                "trajectory": key,
                "global_step": episode["global_step"],
                **(step := record["steps"][0]),
                "reward": step["composed_reward"],
            }
            for key, episode in newest.items()
            for index, record in enumerate(episode["records"])
        }

    def agrees_with(self, naive: Callable[[list[dict[str, Any]]], Sequence[float]], step: int, update: int = 0) -> None:
        """Assert that the advantages in the queue are those of a naive twin on what the agent loop logged."""
        seen, played = self.seen(step, update), self.played()
        columns = zip(seen["keys"], seen["advantages"], seen["mask"], seen["padding"], strict=True)
        queue = {key: advantage[mask.bool()] for key, advantage, mask, padding in columns if not padding}
        keys = [key for key in played if key in queue]
        assert len(keys) == len(queue) > 0
        for key, value in zip(keys, naive([played[key] for key in keys]), strict=True):
            assert len(queue[key])
            np.testing.assert_allclose(queue[key].numpy(), value, atol=1e-5, err_msg=key)


def minigrid(out: Path, *levels: dict[str, Any], train: int, val: int, seed: int) -> tuple[str, ...]:
    """Write tasks that go through ``levels`` in turn; the overrides that play them as the quickstart's model can."""
    out.mkdir(parents=True, exist_ok=True)
    for split, seeds in zip(("train", "val"), split_seeds(train, val, seed=seed), strict=True):
        tasks = [Task("turnkey/MiniGrid-v0", seed, levels[i % len(levels)]) for i, seed in enumerate(seeds)]
        write_parquet(out / f"{split}.parquet", tasks, "doorkey", split)
    return (
        "turnkey.rollout.template=minigrid",
        "turnkey.rollout.action_format=plain",
        f"turnkey.rollout.max_turns={max(level['max_steps'] for level in levels)}",
        f"data.train_files={out}/train.parquet",
        f"data.val_files={out}/val.parquet",
        "data.train_batch_size=4",
    )


def train(out: Path, *overrides: str, modules: tuple[Path, ...] = (), env: dict[str, str] | None = None) -> Run:
    """``python -m verl.trainer.main_ppo +turnkey=... +turnkey/device=cpu ...`` in a process and a Ray of its own."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "spy").mkdir(exist_ok=True)
    ray_dir = tempfile.mkdtemp(prefix="tk-")
    metrics = out / "metrics.jsonl"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"turnkey.modules=[{','.join(str(path) for path in (*modules, HERE / 'spy.py'))}]",
        f"turnkey.log.trajectories={out}/episodes",
        "data.max_prompt_length=256",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        f"hydra.run.dir={out}/hydra",
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        *overrides,  # the last word
    ]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics), "TURNKEY_SPY": str(out / "spy"), **(env or {})}
    try:
        with (out / "log.txt").open("w") as log:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=900, check=False
            ).returncode
    finally:
        shutil.rmtree(ray_dir, ignore_errors=True)
    assert code == 0, f"verl exited with {code}:\n{(out / 'log.txt').read_text()[-6000:]}"
    found: dict[int, dict[str, float]] = {}
    for line in metrics.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], {}).update(entry["data"])
    return Run(out, found)
