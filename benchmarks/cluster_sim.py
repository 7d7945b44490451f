"""Estimate by arithmetic what a cluster needs to run thousands of episodes at once, and its bottleneck.

    python benchmarks/cluster_sim.py                                             # 64 GPUs, turns of 200 tokens
    python benchmarks/cluster_sim.py --turn-tokens 20 --env-seconds 0.2          # short tool calls, slow tools
    python benchmarks/cluster_sim.py --check                                     # compared with measured waves
    python benchmarks/cluster_sim.py --grpo                                      # a step against stock GRPO, 7 B

Episodes wait for the model, for the agent loop's Python, for the environment or not at all, so a step of N episodes
takes as long as the busiest of these or, with few episodes, as long as one episode alone (the bounds of a closed
queueing network). ``rollout_scale.py`` measured what a turn costs, and ``advantage_step.py`` what a row costs, on the
CPU named in ``results/README.md``. You say how fast GPUs generate: ``--tokens-per-second`` for a full GPU, ``--alone``
for one episode. Prompts are assumed to be cached, and an episode to be one row, as with
``turnkey.rollout.prompt=conversation``. Workers, hosts and cores are those with which they are not the bottleneck.

``--grpo``: a step of 64 episodes per GPU on 8 and 64 GPUs, a conversation or a row per step, whose prompt repeats the
last two turns. Seconds of passes are operations divided by :data:`SPEED`; memory is what ``turnkey check`` estimates,
with the smallest micro-batch that holds a row.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from unittest import mock

import typer

from verl_turnkey.plugins.cli.tables import table

LOOP, HOSTS = 1.8e-3, 1.2e-3
"""CPU seconds per turn, with 512 episodes or more: of the agent loop, of the hosts"""
OF_VERL = 4.4e-3
"""CPU seconds per episode: verl creates an agent loop for each"""
ROW, TOKEN = 6.6e3, 99.5
"""bytes of the driver's memory per row and per token: 1.14 GB for 100,000 rows of 48 tokens on average,
31.22 GB for 100,000 of 3,072"""
DRIVER = 0.72e-3, 0.246e-6
"""CPU seconds of the advantage step per row and per token, from the same two measurements: 72.9 and 147.4 s"""
QUEUED = 48
"""bytes per response token in the queue: eight each for ids, attention mask, positions, response and its mask, four
each for log-probabilities and scores"""
CALLS = 16
"""calls at once per host by default"""
STOCK = 78.51 / 72.87
"""verl's own advantage step with ``grpo``, as a multiple of ours; measured with 100,000 rows"""
SPEED = 400e12
"""operations per second of a GPU in forward and backward passes, assumed: 40 % of an H100's 989e12"""
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
}
"""Qwen2.5-7B"""
PARAMETERS = 7.616e9
PER_GPU, PROMPT, HISTORY = 64, 800, 2
"""of ``--grpo``: episodes; tokens of a first prompt; turns that the prompt of a row per step repeats"""
MEASURED = {(32, 1): (38.5, 39.1), (512, 1): (60.0, 62.8), (1024, 1): (60.4, 64.2), (2048, 2): (70.1, 75.2)}
"""(episodes, workers) -> seconds of the slowest episode alone and of the wave, by ``rollout_scale.py``; eight turns"""
HEADS = (
    "episodes",
    "rollout, s",
    "turns/s",
    "bottleneck",
    "workers needed",
    "hosts needed",
    "cores of both",
    "driver, GB",
    "driver, CPU s",
    "queue, GB",
)


GRPO_HEADS = (
    "",
    "GPUs",
    "rows",
    "trained tokens",
    "tokens in a pass, per GPU",
    "rollout, s",
    "log-probs and update, s",
    "driver, s",
    "update, GB per GPU",
)


def step(
    episodes: int, turns: int, turn_seconds: float, most_turns: float, env_seconds: float, workers: int, hosts: int
) -> tuple[float, str]:
    """Seconds that a step's rollouts take, and the bottleneck.

    Args:
        turn_seconds: the model's time per turn, for one episode alone.
        most_turns: turns per second that all GPUs can generate.
        workers, hosts: each has one core for its Python; a host runs ``CALLS`` calls at once.
    """
    seconds = {
        "nothing": turns * (turn_seconds + LOOP + HOSTS + env_seconds) + OF_VERL,
        "GPUs": episodes * turns / most_turns,
        "agent-loop workers": episodes * (turns * LOOP + OF_VERL) / workers,
        "hosts": episodes * turns * max(HOSTS, env_seconds / CALLS) / hosts,
    }
    bottleneck = max(seconds, key=lambda name: seconds[name])
    return seconds[bottleneck], bottleneck


def against_grpo(
    turns: int, turn: int, observation: int, tokens_per_second: float, alone: float, env_seconds: float
) -> Iterator[tuple[object, ...]]:
    """The rows of :data:`GRPO_HEADS`."""
    prompt, whole = PROMPT + HISTORY * (turn + observation), PROMPT + turns * (turn + observation)
    layouts = {
        # rows, tokens of a row, of a row's response, and to read in each turn where the rest of the prompt is cached
        "conversation": (1, whole, whole - PROMPT, observation),
        "row per step": (turns, prompt + turn, turn, prompt),
    }
    for name, layout in (("stock `grpo`", "conversation"), ("`gigpo`", "conversation"), ("`gigpo`", "row per step")):
        rows, tokens, response, read = layouts[layout]
        for gpus in (8, 64):
            episodes = PER_GPU * gpus
            turn_seconds = turn / tokens_per_second + 2 * PARAMETERS * read / SPEED
            rollout, _ = step(episodes, turns, turn / alone, gpus / turn_seconds, env_seconds, 10**9, 10**9)
            passed = PER_GPU * rows * tokens
            update = 10 * PARAMETERS * passed / SPEED  # 2 forward; again, and 6 with gradients and recomputation
            driver = episodes * rows * (DRIVER[0] + response * DRIVER[1])
            yield (
                f"{name}, {layout}",
                gpus,
                f"{episodes * rows:,}",
                f"{episodes * turns * turn:,}",
                f"{passed:,}",
                round(rollout),
                round(update),
                f"{driver * (STOCK if name.startswith('stock') else 1):.1f}",
                f"{update_memory(gpus, tokens):.1f}",
            )


def update_memory(gpus: int, tokens: int) -> float:
    """GB of a GPU in an update of the 7 B model by ``turnkey check``, with a micro-batch of ``tokens``."""
    import verl  # noqa: F401  loads the plugin
    from hydra import compose, initialize_config_module

    from verl_turnkey.plugins.checks import memory
    from verl_turnkey.plugins.config import machine

    composing = initialize_config_module("verl.trainer.config", version_base=None)
    with mock.patch.dict(os.environ, {machine.GPU: "h100:8"}), tempfile.TemporaryDirectory() as folder, composing:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        words = ["+turnkey=gigpo", f"actor_rollout_ref.model.path={folder}", "trainer.device=cuda"]
        words += ["trainer.n_gpus_per_node=8", f"trainer.nnodes={gpus // 8}", "data.train_batch_size=512"]
        words += [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}"]
        words += ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]
        return memory.as_dict(compose("ppo_trainer", overrides=words))["phases"]["update"]["total"] / 1e9


def main(
    episodes: Annotated[str, typer.Option(help="numbers of episodes at once")] = "1000,3000,10000",
    gpus: int = 64,
    tokens_per_second: Annotated[float, typer.Option(help="of a GPU with a full batch")] = 2500.0,
    alone: Annotated[float, typer.Option(help="tokens per second of one episode")] = 60.0,
    turns: int = 20,
    turn_tokens: int = 200,
    observation_tokens: int = 300,
    env_seconds: Annotated[float, typer.Option(help="the environment's own work per turn")] = 0.02,
    workers: Annotated[int, typer.Option(help="agent-loop workers, verl's default")] = 8,
    hosts: Annotated[int, typer.Option(help="turnkey.env.hosts, over all workers")] = 32,
    check: Annotated[bool, typer.Option(help="compare with the measured waves")] = False,
    grpo: Annotated[bool, typer.Option(help="compare a step with stock GRPO's")] = False,
) -> None:
    """Print what a training step needs, a row per number of episodes."""
    if check:
        rows = []
        for (number, of_loop), (slowest, took) in MEASURED.items():
            # There the environment's 26 ms a turn are part of the slowest episode, and 1,024 calls run at once.
            seconds, full = step(number, 8, slowest / 8, float("inf"), 0.0, of_loop, of_loop)
            rows.append((number, of_loop, slowest, f"{seconds:.1f}", full, took, f"{took / seconds:.2f}"))
        heads = ("episodes", "workers", "slowest episode, s", "arithmetic, s", "bottleneck", "measured, s", "ratio")
        print(table(heads, rows), end="")
        return
    if grpo:
        sizes = (turns, turn_tokens, observation_tokens, tokens_per_second, alone, env_seconds)
        print(table(GRPO_HEADS, [*against_grpo(*sizes)]), end="")
        return
    most_turns, needed = gpus * tokens_per_second / turn_tokens, []
    for number in map(int, episodes.split(",")):
        seconds, full = step(number, turns, turn_tokens / alone, most_turns, env_seconds, workers, hosts)
        unhindered, _ = step(number, turns, turn_tokens / alone, most_turns, env_seconds, 10**9, 10**9)
        rate = number * turns / unhindered
        tokens = number * turns * (turn_tokens + observation_tokens)
        loops, calls = rate * LOOP + number * OF_VERL / unhindered, rate * max(HOSTS, env_seconds / CALLS)
        driver = (number * ROW + tokens * TOKEN) / 1e9
        cpu = number * DRIVER[0] + tokens * DRIVER[1]
        needed.append(
            (
                number,
                round(seconds),
                round(number * turns / seconds),
                full,
                f"{loops:.1f}",
                f"{calls:.1f}",
                f"{rate * (LOOP + HOSTS + env_seconds):.0f}",
                f"{driver:.1f}",
                f"{cpu:.0f}",
                f"{tokens * QUEUED / 1e9:.1f}",
            )
        )
    print(table(HEADS, needed), end="")


if __name__ == "__main__":
    typer.run(main)
