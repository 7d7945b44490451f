"""Seconds and memory of the driver's part of a training step, compared with stock verl.

    python benchmarks/advantage_step.py                                                 # 6,000 to 100,000 short rows
    python benchmarks/advantage_step.py --rows 1000 --rows 4000 --tokens 4096 --whole 100000
    python benchmarks/advantage_step.py --rows 20000 --extras
    python benchmarks/advantage_step.py --rows 100000 --ranks 64 --log
    python benchmarks/advantage_step.py --credit --rows 20000 --tokens 1024

The same rows in a real TransferQueue go through verl's own trainer with grpo and through ours with gigpo, in turn:
``_balance_batch``, which pads the rows and deals them to ranks, and ``_compute_advantage``, from the queue and back.
``CPU``: CPU seconds of the driver and of the queue's processes, which vary less than wall time on a shared machine.
``memory``: the driver's peak memory above its memory at the start. ``--extras``: ours with weights per episode and a
loss that reads columns. ``--log``: ours with the trajectory log, whose files are written when the CPU is read; verl's
writes nothing. ``--whole``: a batch of so many rows, extrapolated from the last two sizes. ``--credit``: only
what this package computes, from jagged rows to padded advantages; most rows are much shorter than the longest.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

# When other programs fill the memory, Ray would kill the queue.
os.environ.update(TURNKEY_DEVICE="cpu", VERL_LOGGING_LEVEL="ERROR", TQ_LOGGING_LEVEL="ERROR")
os.environ.update(RAY_memory_monitor_refresh_ms="0")

import numpy as np
import psutil
import ray
import torch
import transfer_queue as tq
import typer
import verl  # noqa: F401  loads the plugin
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_turnkey.advantage import estimators, make_record, make_step
from verl_turnkey.plugins.credit.estimator import CreditStep
from verl_turnkey.plugins.trainer.trainer import TurnkeyTrainerSync

ROLLOUTS, RANKS, PUT_AT_ONCE, EOS = 8, 8, 2000, 2
FINISH_SECONDS = 600.0
"""how long the log may take to write the rest of a step"""
PARTS = {"balance": "_balance_batch", "advantage": "_compute_advantage"}
QUEUE = ("TransferQueueController", "SimpleStorageUnit")
COLUMNS = {"response_mask": 1, "rm_scores": 0.0, "rollout_log_probs": -1.0, "old_log_probs": -1.0}
EXTRAS = ["turnkey.update.weight_by=episode", "+turnkey/loss=segment_mask"]


def configuration(method: str, rows: int, extras: Sequence[str] = ()) -> DictConfig:
    prompts = max(2, rows // 400)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"+turnkey={method}" if method != "grpo" else "algorithm.adv_estimator=grpo",
                f"actor_rollout_ref.rollout.n={ROLLOUTS}",
                f"data.train_batch_size={prompts}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={max(1, prompts // 4)}",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
                *extras,
            ],
        )
    with open_dict(config):
        config.transfer_queue.enable = True
    return config


def make_trainer(kind: type, config: DictConfig, ranks: int = RANKS) -> Any:
    """A trainer without workers: the driver needs only their number."""
    trainer = kind(config)
    trainer.global_steps = 1
    trainer.tokenizer = SimpleNamespace(eos_token_id=EOS)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
    return trainer


def fill(rows: int, tokens: int, seed: int = 0) -> KVBatchMeta:
    """Put rows into the queue: episodes of 32 to 66 steps, 8 per prompt, up to ``tokens`` tokens per row."""
    draw = random.Random(seed)
    keys: list[str] = []
    fields: list[dict[str, Any]] = []
    lengths: list[int] = []
    rollout = 0
    while len(keys) < rows:
        group, session = f"prompt{rollout // ROLLOUTS:06d}", rollout % ROLLOUTS
        steps = min(draw.randint(32, 66), rows - len(keys))
        for t in range(steps):
            anchor, action = f"state-{draw.randrange(60):032x}", f"go to {draw.randrange(8)}"
            step = make_step(
                step=t, reward=float(t + 1 == steps), anchor=anchor, action=action, terminated=t + 1 == steps
            )
            keys.append(f"{group}_{session}_{t}")
            fields.append({"uid": group, "extra_fields": {"turnkey": make_record([step])}})
            lengths.append(draw.randint(tokens // 2, tokens))
        rollout += 1
    for i in range(0, rows, PUT_AT_ONCE):
        part = slice(i, i + PUT_AT_ONCE)
        put(keys[part], lengths[part], COLUMNS, fields[part])
    tags = [{"response_len": n, "seq_len": n} for n in lengths]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


def put(
    keys: list[str], lengths: list[int], columns: Mapping[str, float], fields: Sequence[dict[str, Any]] = ()
) -> None:
    table = list_of_dict_to_tensordict([*fields]) if fields else {}
    for name, value in columns.items():
        rows = [torch.full((n,), value) for n in lengths]
        table[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(table, batch_size=len(keys)))


def peak() -> float:
    """Largest resident memory of this process since :func:`forget_peak`, in GB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e6


def forget_peak() -> float:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()


def credit_alone(rows: int, longest: int, seed: int = 0) -> None:
    """Time and memory of the credit of episodes of 32 to 66 steps; lengths are exponential, one row has the longest."""
    draw = random.Random(seed)
    keys: list[str] = []
    fields: list[dict[str, Any]] = []
    while len(keys) < rows:
        episode, steps = len(keys), min(draw.randint(32, 66), rows - len(keys))
        for t in range(steps):
            step = make_step(step=t, reward=draw.random(), anchor=draw.randrange(60), terminated=t + 1 == steps)
            keys.append(f"prompt{episode % 50}_{episode}_{t}")
            fields.append({"turnkey": make_record([step])})
    lengths = [longest, *(min(longest, 1 + int(draw.expovariate(1 / 70))) for _ in range(rows - 1))]
    tags = [{"seq_len": n} for n in lengths]
    mask = torch.nested.as_nested_tensor([torch.ones(n, dtype=torch.int64) for n in lengths], layout=torch.jagged)
    columns = torch.nested.as_nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)
    rewards, padded = torch.zeros(rows, longest), mask.to_padded_tensor(0)
    print(f"{rows} rows of up to {longest} tokens, {sum(lengths) / rows:.0f} on average: credit with KL and a critic")
    for name in ("gigpo", "turn_gae"):
        times, memory = [], []
        for _ in range(5):
            params = estimators()[name].params()
            step = CreditStep(params, keys, tags, fields, mask, scores=columns, values=columns)
            before, started = forget_peak(), time.perf_counter()
            step.run(name, rewards, padded)
            times.append(time.perf_counter() - started)
            memory.append(peak() - before)
        print(f"{name:9} {min(times):.2f} s, {max(memory):.2f} GB", flush=True)


@dataclass
class Took:
    """Measurements of one trainer, one per repeat."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    """by part"""
    cpu: list[float] = field(default_factory=list)
    """seconds of this process and of the queue's, both parts"""
    memory: list[float] = field(default_factory=list)
    """peak memory of this process above its memory at the start, in GB; the larger of the two parts"""

    def row(self) -> np.ndarray:
        """Minimum seconds of each part and of both, minimum of the CPU, maximum of the memory."""
        both = map(sum, zip(*self.seconds.values(), strict=True))
        return np.array([*map(min, self.seconds.values()), min(both), min(self.cpu), max(self.memory)])


def queue_processes() -> list[psutil.Process]:
    processes = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended, and may still be there as a zombie
            if any(name in process.name() + "".join(process.cmdline()) for name in QUEUE):
                processes.append(process)
    return processes


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in (psutil.Process(), *processes))


def drive(trainer: Any, batch: KVBatchMeta, took: Took) -> None:
    """Both parts of one step, without what verl does between them."""
    batch = KVBatchMeta(keys=list(batch.keys), tags=list(batch.tags), partition_id="train")
    processes, cpu, memory = queue_processes(), 0.0, 0.0
    padding: list[str] = []
    for part, run in PARTS.items():
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed but kept would hide new allocations
        before, busy, started = forget_peak(), cpu_seconds(processes), time.perf_counter()
        batch = getattr(trainer, run)(batch, {})
        took.seconds[part].append(time.perf_counter() - started)
        cpu += cpu_seconds(processes) - busy
        memory = max(memory, peak() - before)
        if part == "balance" and (padding := [key for key in batch.keys if key.startswith("pad")]):
            put(padding, [1] * len(padding), {"old_log_probs": -1.0})
    if isinstance(trainer, TurnkeyTrainerSync) and (tables := trainer.log.tables):
        busy = cpu_seconds(processes)
        assert tables.drain(FINISH_SECONDS)
        cpu += cpu_seconds(processes) - busy
    took.cpu.append(cpu)
    took.memory.append(memory)
    if padding:
        tq.kv_clear(keys=padding, partition_id="train")


def compared(
    rows: int, tokens: int, extras: Sequence[str], repeats: int, ranks: int = RANKS
) -> tuple[np.ndarray, np.ndarray]:
    """:meth:`Took.row` of verl's and of ours on the same rows, in turn."""
    batch = fill(rows, tokens)
    stock, ours = Took(), Took()
    trainers = (
        (make_trainer(PPOTrainerSync, configuration("grpo", rows), ranks), stock),
        (make_trainer(TurnkeyTrainerSync, configuration("gigpo", rows, extras), ranks), ours),
    )
    for _ in range(repeats):
        for trainer, took in trainers:
            drive(trainer, batch, took)
    tq.kv_clear(keys=batch.keys, partition_id="train")
    return stock.row(), ours.row()


def show(rows: int, stock: np.ndarray, ours: np.ndarray) -> None:
    ratio = ours / stock
    cells = [f"{a:.2f} | {b:.2f}" for a, b in zip(stock, ours, strict=True)]
    cells[2] += f" | **{ratio[2]:.2f}**"
    cells[3] += f" | **{ratio[3]:.2f}**"
    print(f"| {rows:,} | {' | '.join(cells)} |", flush=True)


HEAD = (
    "| rows | balance, s: verl | ours | advantage, s: verl | ours | both, s: verl | ours | ratio "
    "| CPU, s: verl | ours | ratio | memory, GB: verl | ours |\n" + "|---" * 13 + "|"
)


def main(
    rows: list[int] = [6000, 20000, 60000, 100000],  # noqa: B006  typer reads it
    tokens: int = 64,
    repeats: int = 3,
    whole: int = 0,
    ranks: int = RANKS,
    extras: bool = False,
    log: bool = False,
    credit: bool = False,
) -> None:
    if credit:
        credit_alone(rows[0], tokens)
        return
    folder = tempfile.mkdtemp(prefix="tkb", dir="/tmp")
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    logging.getLogger("verl").setLevel(logging.ERROR)
    try:
        tq.init(configuration("gigpo", rows[0]).transfer_queue)
        print(f"rows of up to {tokens} tokens for {ranks} ranks, least of {repeats} repeats\n\n{HEAD}", flush=True)
        options = [*(EXTRAS if extras else ()), *([f"turnkey.log.trajectories={folder}/log"] if log else ())]
        took = []
        for number in rows:
            took.append(np.stack(compared(number, tokens, options, repeats, ranks)))
            show(number, *took[-1])
        if whole:
            show(whole, *(took[-1] + (took[-1] - took[-2]) * (whole - rows[-1]) / (rows[-1] - rows[-2])))
            print("\nThe last row was not run: it extrapolates the two before it.")
        tq.close()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
