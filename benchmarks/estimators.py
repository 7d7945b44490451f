"""How long credit takes, and how much memory: every estimator, StepBatch built from Python lists included.

    python benchmarks/estimators.py                # about 6,000 and 61,000 steps; similarity grouping; verl's own GRPO
    python benchmarks/estimators.py --million      # one million steps

The yardstick is the bare write of the (steps x 512) float32 advantage tensor that a trainer needs anyway. *x write*,
*ns a step* and *peak/input* are of the larger batch; *growth* is the time per step there over that in the smaller one.
The naive twins of the tests run on one prompt of the smaller batch; their time is scaled up by its number of prompts.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
import naive

from verl_turnkey.advantage import StepBatch, compute_credit, estimators
from verl_turnkey.advantage.batch import OPTIONAL_COLUMNS
from verl_turnkey.advantage.methods._similarity import similar_states
from verl_turnkey.plugins.cli.tables import shipped

ROLLOUTS, TURNS, TOKENS = 8, (32, 66), 512
SHARED = 8
WORDS = "`loo_td` with words"
NAIVE_PROMPTS = 1
Columns = dict[str, list[Any]]


def columns(prompts: int, seed: int = 0) -> Columns:
    """Shuffled steps of ``prompts`` x 8 rollouts of 32 to 66 turns, string anchors, reward at the end.

    The rollouts of a prompt share their first turns in pairs, as those of a tree do.
    """
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
                        "task": f"task {prompt}",
                        "trajectory": f"prompt-{prompt:08d}_{rollout}",
                        "step": step,
                        "reward": 1.0 if won and step == turns - 1 else 0.0,
                        "penalty": 0.1 if draw.random() < 0.1 else 0.0,
                        "anchor": f"state-{draw.randrange(60):032x}",
                        "action": f"go to {draw.randrange(8)}",
                        "terminated": step == turns - 1,
                        "success": won,
                        "value": draw.gauss(5, 2),
                        "tokens": draw.randint(8, TOKENS),
                        "tool_calls": draw.randrange(3),
                        "turn_score": draw.random(),
                        "turn_value": draw.random(),
                        "potential": draw.random(),
                        "gold_probability": draw.uniform(0.01, 1.0),
                        "prior": 0.5,
                        "role": ("guesser", "setter")[step % 2],
                        "parent": f"{rollout // 2 if step < SHARED else rollout}-{step}",
                        "candidate_score": draw.random(),
                        "answer": f"answer {draw.randrange(4)}",
                        "entropy": draw.uniform(0.1, 2.0),
                        "log_prob": -draw.expovariate(0.1),
                        "switch": draw.randrange(2),
                        "value_low": draw.random(),
                        "value_high": draw.random(),
                        "value_term": draw.random(),
                    }
                )
    draw.shuffle(table)
    return {name: [row[name] for row in table] for name in table[0]}


def observation(draw: random.Random) -> str:
    """A room of about 400 characters."""
    things = [f"a {draw.choice(THINGS.split())} {draw.randrange(9)}" for _ in range(37)]
    return "You are in the middle of a room. You see " + ", ".join(things) + "."


THINGS = "lamp pen book mug plate apple egg vase bowl knife cloth box sofa shelf"


def described(anchors: Sequence[str], seed: int = 0) -> list[str]:
    """For each state its own room: the observation texts of steps."""
    draw = random.Random(seed)
    rooms = {anchor: observation(draw) for anchor in sorted(set(anchors))}
    return [rooms[anchor] for anchor in anchors]


def texts(rows: int, seed: int = 0) -> Columns:
    """Rows in groups of 400, each group over 40 rooms; every third text has a few characters changed."""
    draw = random.Random(seed)
    rooms: dict[int, list[str]] = {}
    group, text = [], []
    for row in range(rows):
        g = row // 400
        room = draw.choice(rooms.setdefault(g, [observation(draw) for _ in range(40)]))
        if draw.random() < 1 / 3:
            at = draw.randrange(len(room) - 4)
            room = room[:at] + draw.choice(("xxxx", "open", "1 on")) + room[at + 4 :]
        group.append(f"prompt-{g}")
        text.append(room)
    return {"group": group, "trajectory": list(range(rows)), "step": [0] * rows, "reward": [0.0] * rows, "anchor": text}


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


def needed(name: str, table: Columns) -> Columns:
    """The columns that an estimator reads: what a user of it would pass."""
    always = {"group", "trajectory", "step", "reward", "penalty"}
    more = {"turn_gae": {"terminated", "tokens"}, "vc_gae": {"terminated", "tokens"}, "proxmo": {"success"}}
    more["shrinkage"] = {"task"}
    more |= {method: {"tokens"} for method in ("dual_granularity", "step_potential")}
    spec = estimators()[name]
    names = always | {column.removeprefix("extra.") for column in spec.columns(spec.params())} | more.get(name, set())
    return {column: values for column, values in table.items() if column in names}


def credit(name: str, table: Columns) -> object:
    own = {*OPTIONAL_COLUMNS, "group", "trajectory", "step", "reward"}
    columns = {column: values for column, values in table.items() if column in own}
    extra = {column: values for column, values in table.items() if column not in own}
    return compute_credit(name, StepBatch(**columns, extra=extra))


def peak_over_input(name: str, table: Columns) -> float:
    """Peak of the memory allocated, over the size of the input lists and the objects in them."""
    size = sum(sys.getsizeof(column) + sum(map(sys.getsizeof, column)) for column in table.values())
    tracemalloc.start()
    credit(name, table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / size


def compare_estimators(sizes: Sequence[int] = (16, 156)) -> None:
    """A Markdown table. ``sizes``: numbers of prompts; the naive twins are compared with the first."""
    tables = [columns(prompts) for prompts in sizes]
    steps = [len(table["step"]) for table in tables]
    writes = [best(lambda n=n: write_tensor(np.linspace(-1, 1, n))) for n in steps]
    few = [row for row in as_rows(tables[0]) if int(row["group"].removeprefix("prompt-")) < NAIVE_PROMPTS]
    heads = ["what", "naive, ms", *(f"{n:,} steps, ms" for n in steps), "x write", "ns a step", "growth", "peak/input"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")

    def report(what: str, seconds: Sequence[float], naive: str = "", memory: str = "") -> None:
        per_step = np.array(seconds) / steps
        cells = [what, naive, *(f"{1e3 * value:.1f}" for value in seconds), f"{seconds[-1] / writes[-1]:.2f}"]
        cells += [f"{per_step[-1] * 1e9:.0f}", f"{per_step[-1] / per_step[0]:.2f}", memory]
        print(f"| {' | '.join(cells)} |", flush=True)

    report("write of the tensor", writes)
    took = {}
    for name in shipped():  # not those that a user registered
        inputs = [needed(name, table) for table in tables]
        slow = best(lambda name=name: getattr(naive, name)(few), 1) * sizes[0] / NAIVE_PROMPTS
        seconds = took[name] = [best(lambda name=name, table=table: credit(name, table)) for table in inputs]
        report(f"`{name}`", seconds, f"{slow * 1e3:,.0f}", f"{peak_over_input(name, inputs[-1]):.1f}")
    worded = [needed("loo_td", table) | {"text": described(table["anchor"])} for table in tables]
    words = [best(lambda table=table: credit("loo_td", table)) for table in worded]
    report(WORDS, words)
    report("verl's `grpo`, vectorized", [verls_grpo(table) for table in tables])
    plain, with_words = (times[-1] / took["gigpo"][-1] for times in (took["loo_td"], words))
    print(
        f"At {steps[-1]:,} steps loo_td takes {plain:.1f} times as long as gigpo, and {with_words:.1f} times with words"
    )


def as_rows(table: Columns) -> list[dict[str, Any]]:
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def verls_grpo(table: Columns) -> float:
    """verl's own GRPO on the same rows, its (steps x 512) inputs ready."""
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_vectorized_outcome_advantage

    n = len(table["step"])
    rewards, mask = torch.zeros(n, TOKENS), torch.ones(n, TOKENS)
    rewards[:, -1] = torch.tensor(table["reward"])
    index = np.array(table["group"], dtype=object)
    return best(lambda: compute_grpo_vectorized_outcome_advantage(rewards, mask, index), 3)


def compare_similarity(rows: int = 6400, threshold: float = 0.9, naive_rows: int = 400) -> None:
    table = texts(rows)
    batch = StepBatch(**table)
    fast = best(lambda: similar_states(batch, threshold), 1)
    few = {name: column[:naive_rows] for name, column in table.items()}
    expected: list[int] = []
    slow = best(lambda: expected.extend(naive_similarity(few["anchor"], threshold)), 1) * rows / naive_rows
    codes, _ = similar_states(StepBatch(**few), threshold)
    assert codes.tolist() == expected, "not the clusters of the greedy rule"
    length = np.mean([len(text) for text in table["anchor"]])
    distinct = len(set(zip(table["group"], table["anchor"], strict=True)))
    print(f"similarity >= {threshold} at {rows} rows of {length:.0f} characters, {distinct} distinct: {fast:.2f} s; "
          f"greedy difflib {slow:.0f} s (scaled from {naive_rows} rows): {slow / fast:.0f} x")  # fmt: skip


def naive_similarity(rows: list[str], threshold: float) -> list[int]:
    """The greedy rule on the rows of one group."""
    opened: list[str] = []
    codes = []
    for text in rows:
        matches = (k for k, first in enumerate(opened) if SequenceMatcher(None, text, first).ratio() >= threshold)
        code = next(matches, len(opened))
        if code == len(opened):
            opened.append(text)
        codes.append(code)
    return codes


def a_million() -> None:
    table = columns(2560)
    print(f"{len(table['step'])} steps; peak memory of the process, inputs included, after each")
    for name in shipped():  # not those that a user registered
        seconds = best(lambda name=name: credit(name, needed(name, table)), 1)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{name:<18}{seconds:>8.2f} s{peak:>8.2f} GiB", flush=True)


def main(million: bool = False) -> None:
    if million:
        a_million()
    else:
        compare_estimators()
        for threshold in (0.9, 0.95):
            compare_similarity(threshold=threshold)


if __name__ == "__main__":
    typer.run(main)
