"""Supervised learning from demonstrations, until the model plays well enough to be trained further by playing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from demos import Demo
from model import build_model
from play import render
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from verl_turnkey.envs.prompting.prompts import LINE, build_messages, load_template

IGNORE = -100
MOST_MORE = 4


def teach(
    out: Path,
    demos: list[Demo],
    tokenizer: PreTrainedTokenizerBase,
    check: Callable[[Qwen3ForCausalLM, PreTrainedTokenizerBase], dict[str, float]] | None,
    *,
    epochs: int,
    lr: float,
    target: float,
    seed: int,
    began: float,
    template: str = "minigrid",
    line: str = LINE,
) -> None:
    """Train a new model and save it; ``check`` gives its ``success``, after which it goes on while below ``target``.

    ``began`` is the time on ``time.perf_counter`` that the printed seconds count from.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)  # what verl will load is what must be trained with
    model = build_model(tokenizer)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, demos, epochs=epochs, lr=lr, seed=seed, template=template, line=line)
    for more in range(MOST_MORE if check else 0):
        # Seeds differ in how far the same training takes them; a model that never wins has nothing to learn from.
        metrics = check(model, tokenizer)
        print(f"{json.dumps(metrics)} ({time.perf_counter() - began:.0f} s)", flush=True)
        if metrics["success"] >= target:
            break
        train(model, tokenizer, demos, epochs=1, lr=lr / 3, seed=seed + 1 + more, template=template, line=line)
    model.save_pretrained(out)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    demos: list[Demo],
    *,
    epochs: int,
    lr: float,
    seed: int,
    batch_size: int = 64,
    template: str = "minigrid",
    line: str = LINE,
) -> None:
    """Supervised learning: cross-entropy on the action and the end of turn, none on the prompt."""
    samples = samples_of(tokenizer, demos, template, line)
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


def text_of(demo: Demo, template: str = "minigrid") -> str:
    """The prompt without its past: the words of the actions must not grow together into one token."""
    [message] = build_messages(
        system=None, template=load_template(template), task=demo.task, history=[], observation=demo.observation,
        admissible=None,
    )  # fmt: skip
    return f"user\n{message['content']}\nAction:\nassistant\n"


def samples_of(
    tokenizer: PreTrainedTokenizerBase, demos: list[Demo], template: str = "minigrid", line: str = LINE
) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of every step, as token ids."""
    text = load_template(template)
    return [
        (
            render(tokenizer, text, demo.task, demo.history, demo.observation, line),
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
