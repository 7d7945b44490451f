"""Does a tiny model learn the customer service by playing it? A warm start, then turn-level RL, without verl and vLLM.

    python benchmarks/service_learning.py --method gigpo grpo_steps --seeds 0 1 2

A Qwen3 with random weights imitates careless clerks, who skip parts of the policy, and is then trained by the loop of
examples/minimal_loop.py: each turn writes one call as text, in a conversation. To win, the model must copy ids that it
has hardly seen: that takes more imitation than the defaults of a quick look. All methods of a seed start from the same
model and are compared on the same validation cases; each difference has a 95 % bootstrap interval over those.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "quickstart")]

from imitation import encode, imitate  # noqa: E402
from minimal_loop import Episode, Game, Sampler, train  # noqa: E402
from model import build_model, build_tokenizer  # noqa: E402
from page_tables import cell, table  # noqa: E402
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase  # noqa: E402

from verl_turnkey.envs import make  # noqa: E402
from verl_turnkey.envs.adapters.service.cases import COLOURS  # noqa: E402
from verl_turnkey.envs.adapters.service.env import ServiceText  # noqa: E402

ENV = "turnkey/Service-v0"
KWARGS = {"kinds": ["cancel", "return"], "orders": 1, "details": True, "max_steps": 10}
NAMES = r"[A-Z]\d+|[a-z]+(?=\.[a-z])|(?:{colours}) (?:desk lamp|[a-z]+)".format(colours="|".join(COLOURS))
PIECES = (
    r'"[a-z_]+": |[a-z_]+\((?:[a-z_]+=)?"?|", [a-z_]+="?|"?\)|(?:{verbs})\b|'
    rf"{NAMES}| ?\d+| ?(?!{NAMES})[A-Za-z]+(?: (?!{NAMES})[a-z]+)*|[^ A-Za-z0-9]| +"
)
"""what merges stay inside: keys of JSON, the beginning of a call, names of orders, items and people, numbers, words"""
CARELESS = 0.25
"""probability of an action of later on, at each step of a demonstration"""
MOST_TOKENS = 24
"""of a response"""


@dataclass(frozen=True)
class Conversation(Game):
    """Prompts that hold all turns so far, as messages. The policy, the same in every episode, is left out."""

    def prompt(self, tokenizer: PreTrainedTokenizerBase, episode: Episode) -> tuple[int, ...]:
        messages = messages_of([(turn.observation, turn.action) for turn in episode.past], episode.observation)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return tuple(ids)


def messages_of(past: Sequence[tuple[str, str]], observation: str) -> list[dict[str, str]]:
    """The past observations and actions, and the last observation."""
    spoken = [(role, text) for turn in past for role, text in zip(("user", "assistant"), turn, strict=True)]
    return [{"role": role, "content": text} for role, text in (*spoken, ("user", observation))]


def demonstrations(seeds: Sequence[int], seed: int, won: list[bool]) -> Iterator[list[dict[str, str]]]:
    """A conversation per seed, which ends with an action; ``won`` gets whether it solved the case."""
    rng = random.Random(seed)
    env: Any = make(ENV, KWARGS)
    clerk: ServiceText = env.unwrapped
    for env_seed in seeds:
        observation, info = env.reset(seed=env_seed)
        past: list[tuple[str, str]] = []
        over = False
        while not over:
            plan = clerk.oracle() or ["close_case()"]
            action = rng.choice(plan) if rng.random() < CARELESS else plan[0]
            past.append((observation, action))
            observation, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        won.append(bool(info["success"]))
        yield messages_of(past, "")[:-1]


def tokenizer_of(conversations: Sequence[list[dict[str, str]]], folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer in which every id and number is a token, as the trainer would load it."""
    texts = [message["content"] for messages in conversations for message in messages]
    ids = " ".join(f"{letter}{number}" for letter in "OI" for number in range(100, 1000))
    ids += " ".join(f"C{number} {number}" for number in range(1, 100))
    tools = [tool["function"]["name"] for tool in ServiceText.tools()]
    build_tokenizer([*texts, ids, ids], tools, vocab_size=4096, pieces=PIECES).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def validate(
    game: Game, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seeds: Sequence[int]
) -> tuple[list[int], str]:
    """Play one sampled episode of each seed: which were solved; success, policy violations and customer turns."""
    counts = {"policy_violations": 0, "user_turns": 0}

    class Counted(Conversation):
        def _act(self, episode: Episode, *args: Any, **kwargs: Any) -> None:
            turn = len(episode.turns)
            super()._act(episode, *args, **kwargs)
            if episode.turns[turn].action is not None:
                for name in counts:
                    counts[name] += episode.info["extra"][name]

    torch.manual_seed(0)
    episodes = Counted(**vars(game)).play(Sampler(model, tokenizer, MOST_TOKENS), tokenizer, seeds, 1)
    solved = [int(episode.info["success"]) for episode in episodes]
    per_episode = ", ".join(f"{name} {count / len(episodes):.2f}" for name, count in counts.items())
    return solved, f"success {np.mean(solved):.3f}, {per_episode} ({len(episodes)} episodes)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=["gigpo"], help="estimators: turnkey methods")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--demos", type=int, default=800, help="demonstrated episodes")
    parser.add_argument("--epochs", type=int, default=8, help="of imitation")
    parser.add_argument("--steps", type=int, default=10, help="training steps")
    parser.add_argument("--groups", type=int, default=8, help="tasks per step, each played 8 times")
    parser.add_argument("--val", type=int, default=128, help="validation episodes, the same before and after")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    runs = [(seed, *run) for seed in args.seeds for run in compare(seed, args)]
    print(results_table(args.method, runs))


def compare(seed: int, args: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """Warm-start a model and train it with each method: "before" or a method, and the validation cases it solved."""
    began = time.perf_counter()
    torch.manual_seed(seed)

    def say(text: str) -> None:
        print(f"seed {seed}  {text} ({time.perf_counter() - began:.0f} s)", flush=True)

    won: list[bool] = []
    # Training seeds of the loop lie below 2**31.
    first = 2**31 + seed * 100_000
    conversations = list(demonstrations(range(first, first + args.demos), seed, won))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizer_of(conversations, Path(folder))
    samples = [encode(tokenizer, messages) for messages in conversations]
    model = build_model(tokenizer, layers=2, width=args.width)
    length = np.mean([len(ids) for ids, _ in samples])
    say(f"{len(samples)} demonstrations of {length:.0f} tokens, {np.mean(won):.2f} won")
    rng, game = random.Random(seed), Conversation(ENV, KWARGS, "", 0, KWARGS["max_steps"])
    for epoch in range(args.epochs):
        rng.shuffle(samples)
        lr = 3e-3 * (1 - epoch / args.epochs)
        losses = list(imitate(model, samples, lr=lr, batch_size=16, pad=tokenizer.pad_token_id, bf16=False))
        say(f"imitation, epoch {epoch + 1}: loss {np.mean(losses):.3f}")
    validation = range(first + 50_000, first + 50_000 + args.val)
    solved, text = validate(game, model, tokenizer, validation)
    say(f"before: {text}")
    yield "before", solved
    sizes = {"steps": args.steps, "groups": args.groups, "rollouts": 8, "max_tokens": MOST_TOKENS, "lr": args.lr}
    for method in args.method:
        trained = copy.deepcopy(model)
        for metrics in train(trained, tokenizer, game, method=method, params={}, seed=seed, **sizes):
            say(f"{method}  " + "  ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
        solved, text = validate(game, trained, tokenizer, validation)
        say(f"after {method}: {text}")
        yield method, solved


def results_table(methods: Sequence[str], runs: Sequence[tuple[int, str, list[int]]]) -> str:
    """Success of each seed before and after, and the difference from the first method's, case by case, in Markdown."""
    solved = {(seed, name): np.array(cases) for seed, name, cases in runs}
    seeds = list(dict.fromkeys(seed for seed, *_ in runs))
    rows = []
    for name in ("before", *methods):
        rates = " ".join(f"{solved[seed, name].mean():.2f}" for seed in seeds)
        differences = np.concatenate([solved[seed, name] - solved[seed, methods[0]] for seed in seeds])
        rows.append([f"`{name}`", rates, "" if name == methods[0] else cell(differences.tolist(), sign="+")])
    return table(["method", f"success, seeds {' '.join(map(str, seeds))}", f"minus that of {methods[0]}"], rows)


if __name__ == "__main__":
    main()
