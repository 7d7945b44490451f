"""Make the quickstart's model: a tiny Qwen3 that has watched good, mediocre and aimless players.

    python examples/quickstart/warm_start.py --out runs/quickstart/model --seed 0

Afterwards it knows every action and when it is useful, but far from reliably: what is left is for reinforcement
learning. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from demos import Demo, collect
from model import build_model, build_tokenizer
from play import play, render, summarize
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from verl_turnkey.envs.adapters.minigrid import ACTIONS
from verl_turnkey.envs.prompting.prompts import build_messages, load_template
from verl_turnkey.envs.tasks import split_seeds

IGNORE = -100
MOST_MORE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", default="MiniGrid-DoorKey-5x5-v0", help="a DoorKey level")
    parser.add_argument("--history", type=int, default=1, help="past steps in a prompt, as in turnkey.rollout.history")
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=650, help="demonstrated episodes")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--target", type=float, default=0.3, help="go on until this success in held-out episodes")
    parser.add_argument("--check", type=int, default=128, help="held-out episodes to play for that; 0: do not look")
    args = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    # Seeds of their own: neither the training nor the validation tasks come from this stream.
    seeds, held_out = split_seeds(args.episodes, args.check, seed=10_000 + args.seed)
    demos = collect(args.level, seeds, args.history, args.max_turns, args.seed)
    print(f"{len(demos.steps)} steps; players won {demos.won} ({time.perf_counter() - began:.0f} s)", flush=True)

    tokenizer = build_tokenizer((_text(demo) for demo in demos.steps), ACTIONS)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)  # what verl will load is what must be trained with
    model = build_model(tokenizer)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, demos.steps, epochs=args.epochs, lr=args.lr, seed=args.seed)
    for more in range(MOST_MORE if args.check else 0):
        # Seeds differ in how far the same training takes them; a model that never wins has nothing to learn from.
        players = play(model, tokenizer, args.level, held_out, history=args.history, max_turns=args.max_turns)
        found = summarize(players)
        print(f"{json.dumps(found)} ({time.perf_counter() - began:.0f} s)", flush=True)
        if found["success"] >= args.target:
            break
        train(model, tokenizer, demos.steps, epochs=1, lr=args.lr / 3, seed=args.seed + 1 + more)
    model.save_pretrained(args.out)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    demos: list[Demo],
    *,
    epochs: int,
    lr: float,
    seed: int,
    batch_size: int = 64,
) -> None:
    """Supervised learning: cross-entropy on the action and the end of turn, none on the prompt."""
    samples = _samples(tokenizer, demos)
    steps = epochs * (len(samples) // batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    rng = random.Random(seed)
    for epoch in range(epochs):
        rng.shuffle(samples)
        total = 0.0
        for first in range(0, len(samples) - batch_size + 1, batch_size):
            ids, labels = _batch(samples[first : first + batch_size], tokenizer.pad_token_id)
            # Padded on the right: a causal model needs no attention mask for that. Only labels need the output layer.
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            answer = labels[:, 1:] != IGNORE
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[answer]), labels[:, 1:][answer])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1} of {epochs}: loss {total * epochs / steps:.3f}", flush=True)


def _text(demo: Demo) -> str:
    """The prompt without its past: the words of the actions must not grow together into one token."""
    [message] = build_messages(
        system=None, template=load_template("minigrid"), task=demo.task, history=[], observation=demo.observation,
        admissible=None,
    )  # fmt: skip
    return f"user\n{message['content']}\nAction:\nassistant\n"


def _samples(tokenizer: PreTrainedTokenizerBase, demos: list[Demo]) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of every step, as token ids."""
    template = load_template("minigrid")
    return [
        (
            render(tokenizer, template, demo.task, demo.history, demo.observation),
            [*tokenizer(demo.action).input_ids, tokenizer.eos_token_id],
        )
        for demo in demos
    ]


def _batch(samples: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both (batch, longest)."""
    width = max(len(prompt) + len(answer) for prompt, answer in samples)
    ids = torch.full((len(samples), width), pad)
    labels = torch.full((len(samples), width), IGNORE)
    for row, (prompt, answer) in enumerate(samples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


if __name__ == "__main__":
    main()
