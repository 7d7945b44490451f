"""How long the whole advantage step takes: rows from a real TransferQueue, credit, and back.

    python benchmarks/advantage_step.py --rows 61000
    python benchmarks/advantage_step.py --credit --rows 20000 --tokens 1024

``--credit``: only what this package computes, from jagged rows to padded advantages, most rows much shorter than the
longest. Otherwise the same rows go through verl's own step (its trainer with grpo) and through ours (gigpo, which also
fetches the records of the steps). Compare with the time of a training step of yours: the methods' papers report about
300 s for batches of this size.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import time
from typing import Any

os.environ.update(TURNKEY_DEVICE="cpu", VERL_LOGGING_LEVEL="ERROR", TQ_LOGGING_LEVEL="ERROR")

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

ROLLOUTS, PUT_AT_ONCE = 8, 2000


def configuration(method: str, rows: int) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"+turnkey={method}" if method != "grpo" else "algorithm.adv_estimator=grpo",
                f"actor_rollout_ref.rollout.n={ROLLOUTS}",
                f"data.train_batch_size={max(1, rows // 400)}",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
            ],
        )
    with open_dict(config):
        config.transfer_queue.enable = True
    return config


def fill(rows: int, tokens: int, seed: int = 0) -> KVBatchMeta:
    """Episodes of 32 to 66 steps, 8 per prompt, a row per step; up to ``tokens`` tokens a row."""
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
        table = list_of_dict_to_tensordict(fields[part])
        for name, value in (
            ("response_mask", 1),
            ("rm_scores", 0.0),
            ("rollout_log_probs", -1.0),
            ("old_log_probs", -1.0),
        ):
            table[name] = torch.nested.as_nested_tensor(
                [torch.full((n,), value) for n in lengths[part]], layout=torch.jagged
            )
        tq.kv_batch_put(keys=keys[part], partition_id="train", fields=TensorDict(table, batch_size=len(keys[part])))
    tags = [{"response_len": n, "seq_len": n} for n in lengths]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


def peak() -> float:
    """Largest resident memory of this process since :func:`forget_peak`, in GB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e6


def forget_peak() -> float:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()


def credit_alone(rows: int, longest: int, seed: int = 0) -> None:
    """Episodes of 32 to 66 steps, a row per step, with exponentially distributed lengths; one row has the longest."""
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
    mask = torch.nested.as_nested_tensor([torch.ones(n, dtype=torch.int64) for n in lengths], layout=torch.jagged)
    columns = torch.nested.as_nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)
    rewards, padded = torch.zeros(rows, longest), mask.to_padded_tensor(0)
    print(f"{rows} rows of up to {longest} tokens, {sum(lengths) / rows:.0f} on average: credit with KL and a critic")
    for name in ("gigpo", "turn_gae"):
        times, memory = [], []
        for _ in range(5):
            params = estimators()[name].params()
            step = CreditStep(params, keys, [{}] * rows, fields, mask, scores=columns, values=columns)
            before, started = forget_peak(), time.perf_counter()
            step.run(name, rewards, padded)
            times.append(time.perf_counter() - started)
            memory.append(peak() - before)
        print(f"{name:9} {min(times):.2f} s, {max(memory):.2f} GB", flush=True)


def seconds(trainer: Any, batch: KVBatchMeta, repeats: int = 3) -> float:
    trainer.global_steps = 1
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        trainer._compute_advantage(KVBatchMeta(keys=batch.keys, tags=batch.tags, partition_id="train"), {})
        times.append(time.perf_counter() - started)
    return min(times)


def main(rows: int = 61000, tokens: int = 64, credit: bool = False) -> None:
    if credit:
        credit_alone(rows, tokens)
        return
    folder = tempfile.mkdtemp(prefix="tkb", dir="/tmp")
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    logging.getLogger("verl").setLevel(logging.ERROR)
    try:
        stock, ours = configuration("grpo", rows), configuration("gigpo", rows)
        tq.init(ours.transfer_queue)
        batch = fill(rows, tokens)
        stock_seconds = seconds(PPOTrainerSync(stock), batch)
        print(f"{rows} rows of up to {tokens} tokens: verl's step with grpo {stock_seconds:.2f} s", flush=True)
        our_seconds = seconds(TurnkeyTrainerSync(ours), batch)
        print(f"ours with gigpo {our_seconds:.2f} s, {our_seconds / stock_seconds:.2f} times as long")
        tq.close()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
