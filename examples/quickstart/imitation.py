"""Let a language model imitate players of a text environment, as conversations.

    python examples/quickstart/imitation.py --model FOLDER --out runs/quickstart/model --seed 0
    python examples/quickstart/imitation.py --model FOLDER --out runs/warm --env my_env.py

The players of Errands are noisy; those of another environment play the actions of its ``oracle``.

Afterwards it writes valid actions most of the time and wins now and then: what is left is for reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.errands import HALL, ErrandsText
from verl_turnkey.envs.prompting.actions import INSTRUCTIONS
from verl_turnkey.envs.prompting.prompts import build_messages, later_template, load_template
from verl_turnkey.plugins.cli.launch import environment
from verl_turnkey.plugins.config.machine import choose

IGNORE, ERRANDS = -100, "turnkey/Errands-v0"
Message = dict[str, Any]


class Searcher:
    """Plays well with what a player can know: the task's hints and what it has seen so far."""

    def __init__(self, env: ErrandsText, hint: bool) -> None:
        self._env, self._seen = env, set(env.rooms) if hint else set()

    def best(self) -> str:
        env = self._env
        if env.place != HALL:
            if env.hand:
                return f"go {HALL}" if env.hand in env.wanted else f"drop {env.hand}"
            if "open cupboard" in env.actions():
                wanted_here = any(env.location.get(thing) == env.place for thing in env.wanted)
                return "open cupboard" if wanted_here or env.place not in self._seen else f"go {HALL}"
            self._seen.add(env.place)
            return next((f"take {thing}" for thing in env.visible() if thing in env.wanted), f"go {HALL}")
        if env.hand:
            return f"give {env.hand}" if env.hand in env.wanted else f"go {env.rooms[0]}"
        known = (env.location[thing] for thing in env.wanted if env.location[thing] in self._seen)
        return f"go {next(known, None) or next(room for room in env.rooms if room not in self._seen)}"


def player_of(env: Any, kwargs: dict[str, Any]) -> Iterator[str] | None:
    """A good player's actions in an environment that was just reset, each chosen in the state it is played in.

    None: the environment's ``oracle`` knows no solution of this task.
    """
    if isinstance(env, ErrandsText):
        return iter(Searcher(env, kwargs.get("hint", True)).best, None)
    actions = env.oracle() if hasattr(env, "oracle") else ()
    return None if actions is None else iter(actions)


def demonstrations(
    kwargs: dict[str, Any], seeds: range, noise: float, seed: int, env_id: str = ERRANDS, template: str = "errands"
) -> Iterator[list[Message]]:
    """One conversation per seed, with the prompts of training; an action is random with probability ``noise``.

    Seeds whose tasks ``oracle`` cannot solve are left out.

    Raises:
        SystemExit: the environment has no ``oracle``, or its actions do not end an episode.
    """
    rng, text = random.Random(seed), load_template(template)
    env = make(env_id, kwargs)
    for env_seed in seeds:
        observation, info = env.reset(seed=env_seed)
        if (player := player_of(env.unwrapped, kwargs)) is None:
            continue
        task, messages, over = info.get("task", ""), [], False
        while not over:
            messages += build_messages(
                system=None,
                template=later_template(text) if messages else text,
                task=task,
                history=(),
                observation=observation,
                admissible=info.get("admissible"),
                step=len(messages) // 2 + 1,
                instruction=INSTRUCTIONS["plain"],
            )
            if (best := next(player, None)) is None:
                raise SystemExit("--env: its method oracle() must return the actions that solve and end an episode")
            action = rng.choice(info["admissible"]) if rng.random() < noise else best
            observation, _, terminated, truncated, info = env.step(action)
            messages += [{"role": "assistant", "content": action}]
            over = terminated or truncated
        yield messages


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Ids and labels of a conversation, encoded piece by piece as in training; labels of the actions alone."""
    ids: list[int] = []
    labels: list[int] = []
    before, end = "", turn_end(tokenizer, messages[:2])
    for turn in range(1, len(messages), 2):
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, tokenize=False)
        action = messages[turn]["content"] + end
        for text, learned in ((prompt[len(before) :], False), (action, True)):
            piece = tokenizer(text, add_special_tokens=False).input_ids
            ids += piece
            labels += piece if learned else [IGNORE] * len(piece)
        before = prompt + action
    return ids, labels


def turn_end(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str:
    """The token that ends the last message in the chat template, which need not be the tokenizer's end of sequence."""
    after = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(messages[-1]["content"])[2]
    first = tokenizer(after, add_special_tokens=False).input_ids[:1]
    return tokenizer.decode(first) if first and first[0] in tokenizer.added_tokens_decoder else tokenizer.eos_token


def imitate(
    model: PreTrainedModel,
    samples: list[tuple[list[int], list[int]]],
    *,
    lr: float,
    batch_size: int,
    pad: int,
    bf16: bool,
) -> Iterator[float]:
    """One pass over ``samples``: cross-entropy on the labels. Yields the loss of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for first in range(0, len(samples), batch_size):
        batch = samples[first : first + batch_size]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in batch])
        labels = torch.tensor([row + [IGNORE] * (width - len(row)) for _, row in batch])[:, 1:]
        learned = labels != IGNORE
        # Padded on the right, a causal model needs no attention mask. The output layer, a fifth of a small model with a
        # large vocabulary, runs on the labelled positions alone.
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[learned])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--env", default=ERRANDS, help="an environment with a method oracle: my_env.py, or its id")
    parser.add_argument("--module", action="append", default=[], help="module that registers the id")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="of the environment, as JSON")
    parser.add_argument(
        "--template", help="turnkey.rollout.template of the training; default: default, of Errands errands"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--noise", type=float, default=0.3, help="probability of a random action; Errands only")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    logging.disable_progress_bar()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    # Houses of their own: tasks of training and validation have seeds below 2**31.
    first = 2**31 + args.seed * 10_000
    seeds = range(first, first + args.episodes)
    played = environment(args.env, args.module)
    template = args.template or ("errands" if played.id == ERRANDS else "default")
    noise, kwargs = args.noise if played.id == ERRANDS else 0.0, {**played.kwargs, **args.kwargs}
    conversations = demonstrations(kwargs, seeds, noise, args.seed, played.id, template)
    samples = [encode(tokenizer, messages) for messages in conversations]
    if not samples:
        raise SystemExit(f"--env: oracle() of {played.id} gave None, no solution, for all {len(seeds)} tasks")
    if unsolved := len(seeds) - len(samples):
        print(f"left out: {unsolved} tasks for which oracle() gave None")
    print(f"{len(samples)} demonstrations, {sum(len(ids) for ids, _ in samples)} tokens", flush=True)
    model.train()
    bf16 = choose("param_dtype", args.model) == "bf16"  # as in training: without the hardware it is slower than fp32
    losses = imitate(model, samples, lr=args.lr, batch_size=args.batch_size, pad=tokenizer.pad_token_id, bf16=bf16)
    for batch, loss in enumerate(losses, 1):
        print(f"batch {batch}: loss {loss:.3f} ({time.perf_counter() - began:.0f} s)", flush=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
