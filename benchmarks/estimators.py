"""How long credit takes: every estimator at about 6,000 and 61,000 steps, StepBatch built from Python lists included.

    python benchmarks/estimators.py

The yardstick is the bare write of the (steps x 512) float32 advantage tensor that a trainer needs anyway. The naive
twins of the tests run on two prompts of the smaller size only, and their time is scaled up by the number of prompts.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
import naive

from verl_turnkey.advantage import StepBatch, compute_credit, estimators

ROLLOUTS, TURNS, TOKENS = 8, (32, 66), 512
NAIVE_PROMPTS = 2


def rows(prompts: int, seed: int = 0) -> list[dict[str, Any]]:
    """Shuffled steps of ``prompts`` x 8 rollouts of 32 to 66 turns, string anchors, reward at the end."""
    draw = random.Random(seed)
    table = []
    for prompt in range(prompts):
        for rollout in range(ROLLOUTS):
            turns = draw.randint(*TURNS)
            won = draw.random() < 0.5
            for step in range(turns):
                table.append(
                    {
                        "group": f"prompt-{prompt:08d}",
                        "trajectory": f"prompt-{prompt:08d}_{rollout}",
                        "step": step,
                        "reward": 10.0 if won and step == turns - 1 else 0.0,
                        "penalty": 0.1 if draw.random() < 0.1 else 0.0,
                        "anchor": f"state-{draw.randrange(60):032x}",
                    }
                )
    draw.shuffle(table)
    return table


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """Shortest of some runs, in seconds: what the machine can do when nobody else uses it."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def write_tensor(credit: np.ndarray) -> np.ndarray:
    tensor = np.empty((len(credit), TOKENS), dtype=np.float32)
    tensor[:] = credit[:, None]
    return tensor


def main() -> None:
    print(f"{'steps':>8}  {'what':<24}{'ms':>10}{'x write':>10}{'ns/step':>10}")
    for prompts in (16, 156):
        table = rows(prompts)
        n = len(table)
        columns = {name: [row[name] for row in table] for name in table[0]}
        credit = np.linspace(-1, 1, n)
        write = best(lambda credit=credit: write_tensor(credit))

        def report(what: str, seconds: float, n: int = n, write: float = write) -> None:
            print(f"{n:>8}  {what:<24}{seconds * 1e3:>10.1f}{seconds / write:>10.2f}{seconds / n * 1e9:>10.0f}")

        report("write of the tensor", write)
        report("StepBatch", best(lambda columns=columns: StepBatch(**columns)))
        for name in estimators():
            report(
                f"{name} + StepBatch",
                best(lambda name=name, columns=columns: compute_credit(name, StepBatch(**columns))),
            )
        if prompts == 16:
            few = [row for row in table if int(row["group"].removeprefix("prompt-")) < NAIVE_PROMPTS]
            for name in ("gigpo", "grpo_steps"):
                twin = getattr(naive, name)
                report(f"{name} naive, scaled", best(lambda twin=twin, few=few: twin(few), 1) * prompts / NAIVE_PROMPTS)


if __name__ == "__main__":
    main()
