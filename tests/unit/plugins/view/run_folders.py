"""Run folders as ``turnkey train`` leaves them, with invented numbers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

VAL = "val-core/doorkey/acc/mean@1"


def write(
    folder: Path,
    curve: Mapping[int, float],
    *,
    method: str = "gigpo",
    seed: int = 0,
    more: Mapping[str, Any] | None = None,
    start: str = "1",
    files: Mapping[str, str] | None = None,
) -> Path:
    """A run with the validation ``curve``: 32 episodes of 10 turns and 20 seconds a step.

    ``files``: name -> digit of the hash of each file of the user's at its only start; None: not on record.
    """
    lines = []
    for step in range(min(curve), max(curve) + 1):
        data: dict[str, float] = {VAL: curve[step]} if step in curve else {}
        if step:
            data |= {"episode/count": 33.0, "episode/failed": 1.0, "episode/length/mean": 10.0}
            data["rows/trained_tokens"] = 5000.0
            data |= {"episode/success_rate": 0.5, "timing_s/step": 20.0, "timing_s/gen": 12.0, "timing_s/adv": 0.25}
        lines.append(json.dumps({"step": step, "data": data}, separators=(",", ":")))
    path = folder / "metrics" / start / "doorkey" / f"{method}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    config: dict[str, Any] = {
        "algorithm": {"adv_estimator": method},
        "actor_rollout_ref": {
            "model": {"path": f"{folder}/model"},
            "actor": {"policy_loss": {"loss_mode": "vanilla"}},
            "rollout": {"seed": seed, "n": 8},
        },
        "data": {"seed": seed, "train_files": f"{folder}/tasks/train.parquet"},
        "trainer": {"default_local_dir": f"{folder}/checkpoints", "experiment_name": method},
        "turnkey": {"env": {"id": "turnkey/MiniGrid-v0"}, "credit": {"gamma": 0.95}},
    }
    for key, value in (more or {}).items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    hydra = folder / "hydra" / ".hydra"
    hydra.mkdir(parents=True, exist_ok=True)
    (hydra / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    if files is not None:
        facts = {name: {"path": f"{folder}/{name}", "sha256": digit * 64} for name, digit in files.items()}
        segment = folder / "turnkey_log" / "segments" / "20260102T030405_00ff.json"
        segment.parent.mkdir(parents=True, exist_ok=True)
        segment.write_text(json.dumps({"resumed_from": 0, "sources": {"turnkey.modules": facts}}))
    return folder


def example(out: Path) -> list[Path]:
    """Two methods with five seeds each."""
    rng = np.random.default_rng(0)
    made = []
    for method, speed, ceiling in (("gigpo", 6.0, 0.96), ("grpo_steps", 10.0, 0.9)):
        for seed in range(5):
            curve = {
                step: round(min(1.0, 0.3 + (ceiling - 0.3) * (1 - math.exp(-step / speed)) + rng.normal(0, 0.05)), 3)
                for step in range(0, 31, 5)
            }
            made.append(write(out / f"{method}-{seed}", curve, method=method, seed=seed))
    return made
