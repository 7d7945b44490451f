"""What the trajectory log costs a rollout process: a step of 256 episodes of 30 turns.

    python benchmarks/trajectory_log.py

The caller is the event loop of the rollouts, which hands an episode over; the thread decodes prompts, makes tables and
writes files. Words are drawn from a skewed distribution: 600 characters per response, 470 per observation.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.update(TURNKEY_DEVICE="cpu", VERL_LOGGING_LEVEL="ERROR")

import numpy as np
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_turnkey.advantage import make_step
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.config.training import LogConfig
from verl_turnkey.plugins.rollout.episode import Episode, Generated, PlayedStep, Prompt
from verl_turnkey.plugins.rollout.trajectory_log import TrajectoryLog

WORDS = [f"word{i}" for i in range(5000)]
STEP_SECONDS = 60


def episodes(count: int, turns: int, rng: np.random.Generator) -> list[Episode]:
    def ids(number: int) -> list[int]:
        return np.minimum(rng.zipf(1.3, number) - 1, len(WORDS) - 1).tolist()

    def text(number: int) -> str:
        return " ".join(WORDS[i] for i in ids(number))

    played = []
    for _ in range(count):
        steps = []
        for t in range(turns):
            record = make_step(
                step=t, reward=0.0, anchor=f"state {rng.integers(40)}", action=text(3), composed_reward=0.0
            )
            turn = Generated(ids(150), None, text(90), {"min_global_steps": 1, "max_global_steps": 1}, 0, 1.0)
            steps.append(
                PlayedStep(Prompt(ids(1500)), turn, record, text(70), "", None, False, 0.1, extra={}, next_extra={})
            )
        played.append(Episode(steps, parts={"step": [0.0] * turns}))
    return played


def main(count: int = 256, turns: int = 30, per_group: int = 8) -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    decode = PreTrainedTokenizerFast(tokenizer_object=words).decode
    played = episodes(count, turns, np.random.default_rng(0))
    task = Task("turnkey/MiniGrid-v0", 1, {"level": "MiniGrid-DoorKey-5x5-v0"})
    rollout = {
        "data": {"train_batch_size": count // per_group},
        "actor_rollout_ref": {"rollout": {"n": per_group, "val_kwargs": {"n": 1}}},
    }
    with tempfile.TemporaryDirectory() as folder:
        node = LogConfig(trajectories=f"{folder}/log", episodes_per_step=None)
        log = TrajectoryLog({**rollout, "turnkey": {"log": vars(node)}}, node)
        caller, cpu = [], time.process_time()
        for number, episode in enumerate(played):
            row = {"uid": f"group{number // per_group}", "session_id": number % per_group, "global_steps": 1}
            rows = [SimpleNamespace(extra_fields={"turnkey": {"steps": [step.record]}}) for step in episode.steps]
            began = time.perf_counter()
            log.write(row, task, episode, rows, None, decode)
            caller.append(time.perf_counter() - began)
            time.sleep(0.01)  # episodes end one after another
        assert log.tables is not None
        assert log.drain(600)
        cpu = time.process_time() - cpu
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.parquet"))
        assert (log.tables.written, log.tables.lost) == (count * (1 + 2 * turns), 0)
    print(f"{count} episodes of {turns} turns, {size / 1e6:.1f} MB")
    print(f"caller: {1e6 * np.median(caller):.0f} µs an episode, {1e3 * sum(caller):.1f} ms a step")
    print(f"which is {100 * sum(caller) / STEP_SECONDS:.3f} % of a step of {STEP_SECONDS} s in one process")
    print(f"caller and thread: {cpu:.2f} s of CPU a step")


if __name__ == "__main__":
    typer.run(main)
