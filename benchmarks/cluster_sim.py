"""What does a cluster need to run thousands of episodes at once, and what is its bottleneck? By arithmetic.

    python benchmarks/cluster_sim.py                                             # 64 GPUs, turns of 200 tokens
    python benchmarks/cluster_sim.py --turn-tokens 20 --env-seconds 0.2          # short tool calls, slow tools
    python benchmarks/cluster_sim.py --check                                     # compared with measured waves

Episodes wait for the model, for the agent loop's Python, for the environment or not at all, so a step of N episodes
takes as long as the busiest of these or, with few episodes, as long as one episode alone (the bounds of a closed
queueing network). ``rollout_scale.py`` measured what a turn costs, and ``advantage_step.py`` what a row costs, on the
CPU named in ``results/README.md``. You say how fast GPUs generate: ``--tokens-per-second`` for a full GPU, ``--alone``
for one episode. Prompts are assumed to be cached, and an episode to be one row, as with
``turnkey.rollout.prompt=conversation``. Workers, hosts and cores are those with which they are not the bottleneck.
"""

from __future__ import annotations

from typing import Annotated

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
