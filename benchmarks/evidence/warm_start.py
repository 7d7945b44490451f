"""Make the model of a task: a tiny Qwen3 that imitates good, mediocre and random players.

    python benchmarks/evidence/warm_start.py rooms --out runs/evidence/rooms/model --seed 0

DoorKey's is the quickstart's. Nothing is downloaded; TextWorld compiles its games on first use.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tasks import QUICKSTART, TASKS, Task

# isort: split
# Importing ``tasks`` puts the quickstart's modules on the path.
from demos import Demos, Expert, collect_in
from experts import Accompanied, RoomsPlanner
from model import build_tokenizer
from play import Player, play_in, summarize
from teaching import teach, text_of
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from verl_turnkey.envs import make
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.tasks import split_seeds

GROUP = 8
CHECKED = 16
"""further games, each played by a group"""

# Words of commands and names of things are tokens of their own everywhere; phrases are between them.
_NAMES = r" ?(?:{names})\b| ?[A-Za-z]+(?: (?!(?:{names})\b)[A-Za-z]+)*|[^ A-Za-z0-9]| +|\d+"


@dataclass(frozen=True)
class Teaching:
    """How the model of a task is made."""

    environment: Callable[[Task], Any]
    expert: Callable[[Any], Expert]
    games: int
    """number of demonstrated games, each ``rounds`` times"""
    quality: tuple[tuple[float, float], ...]
    """share of the episodes, probability of a random action at each step"""
    rounds: int = 1
    epochs: int = 2
    lr: float = 3e-3
    target: float = 0.2
    vocab_size: int = 1024
    names: bool = False
    """whether the names of things are tokens"""


def environment(task: Task) -> Any:
    return make(task.env_id, dict(task.kwargs))


TEACHING = {
    "rooms": Teaching(
        environment,
        lambda env: RoomsPlanner(env.unwrapped.grid_env),
        games=300,
        quality=((0.5, 0.0), (0.4, 0.3), (0.1, 1.0)),
    ),
    "kitchen": Teaching(
        lambda task: Accompanied(environment(task)),
        lambda env: env,
        games=48,
        rounds=10,
        epochs=5,
        quality=((0.5, 0.0), (0.5, 0.3)),
        vocab_size=1536,
        names=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    task = TASKS[args.task]
    if task.name == "doorkey":
        script = [str(QUICKSTART / "warm_start.py"), "--out", str(args.out), "--seed", str(args.seed)]
        sys.exit(subprocess.run([sys.executable, *script], check=False).returncode)
    make_model(task, TEACHING[task.name], args.out, args.seed)


def make_model(task: Task, teaching: Teaching, out: Path, seed: int) -> None:
    """Demonstrate, train and check until the model is good enough; prints the checks."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    demos, checked = demonstrate(task, teaching, seed)
    print(f"{len(demos.steps)} steps; players won {demos.won} ({time.perf_counter() - began:.0f} s)", flush=True)

    def check(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        return summary_of(play_groups(task, model, tokenizer, checked))

    teach(
        out,
        demos.steps,
        tokenizer_of(task, teaching, demos),
        check,
        epochs=teaching.epochs,
        lr=teaching.lr,
        target=teaching.target,
        seed=seed,
        began=began,
        template=task.template,
        line=task.line,
    )


def demonstrate(task: Task, teaching: Teaching, seed: int) -> tuple[Demos, list[int]]:
    """Demonstrations, and the seeds of further games for the checks."""
    # Seeds of their own: neither the training nor the validation tasks come from this stream.
    stream = 10_000 + (seed if task.task_seed is None else task.task_seed)
    seeds, checked = split_seeds(teaching.games, CHECKED, stream)
    env = teaching.environment(task)
    games = [game for game in seeds for _ in range(teaching.rounds)]  # loading a game takes longer than playing it
    return collect_in(env, teaching.expert, games, task.history, task.max_turns, seed, teaching.quality), checked


def tokenizer_of(task: Task, teaching: Teaching, demos: Demos) -> PreTrainedTokenizerBase:
    """A tokenizer for the prompts and actions of the demonstrations."""
    actions = sorted({demo.action for demo in demos.steps})
    texts = (text_of(demo, task.template) for demo in demos.steps)
    if not teaching.names:
        return build_tokenizer(texts, actions, teaching.vocab_size)
    names = {word for action in actions for word in split_command(action)}
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name)))
    return build_tokenizer(texts, actions, teaching.vocab_size, _NAMES.replace("{names}", longest_first))


def split_command(command: str) -> list[str]:
    """The verb, things and prepositions of a command: ``put``, ``half of a bag of chips``, ``on``, ``stove``."""
    verb, *rest = command.split(" ", 1)
    return [verb, *(part for text in rest for part in re.split(r" (from|on|with|into) ", text))]


def play_groups(
    task: Task, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, seeds: Sequence[int]
) -> list[Player]:
    """A group of episodes per seed, one group after the other."""
    repeated = [seed for seed in seeds for _ in range(GROUP)]
    return play_in(
        [environment(task) for _ in repeated],
        model,
        tokenizer,
        repeated,
        template=load_template(task.template),
        history=task.history,
        max_turns=task.max_turns,
        max_new_tokens=task.response_tokens,
        line=task.line,
    )


def summary_of(players: Sequence[Player]) -> dict[str, float]:
    """The quickstart's summary, turns of the winners, and the share of steps whose state occurs twice in its group."""
    won = [len(player.responses) for player in players if player.info["success"]]
    steps = shared = 0
    for first in range(0, len(players), GROUP):
        counts = Counter(key for player in players[first : first + GROUP] for key in player.keys)
        steps += counts.total()
        shared += sum(count for count in counts.values() if count > 1)
    return {
        **summarize(players),
        "turns_won": sum(won) / max(1, len(won)),
        "longest_response": max(len(response) for player in players for response in player.responses),
        "shared": shared / steps,
    }


if __name__ == "__main__":
    main()
