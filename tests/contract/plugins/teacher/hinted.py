"""A policy that reads hints, a rollout of it as steps and as conversations, and what transformers says of any row."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from contract_tools import EOS, PARTITION, batch_of, put
from row_layouts import row
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from verl_turnkey.advantage import make_step

LETTERS = "ABCD"
TEMPLATE = " hint {text}"


def chat(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
    )


def with_text(tokenizer: Any, prompt: str, text: str | None) -> list[int]:
    """The prompt as it would be if the text had been part of the message: rendered, not spliced."""
    return chat(tokenizer, prompt + (TEMPLATE.replace("{text}", text) if text else ""))


def taught(source: Path, folder: Path, tokenizer: Any) -> Path:
    """The model of ``source``, taught to answer the letter of a hint, and any letter without one."""
    from transformers import Qwen3ForCausalLM

    shutil.copytree(source, folder, dirs_exist_ok=True)
    prompts = {hint: [with_text(tokenizer, f"task {k}", hint) for k in range(10)] for hint in (*LETTERS, "x", None)}
    right = torch.tensor([tokenizer.encode(letter)[0] for letter in LETTERS])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32)
        for name, p in model.named_parameters():
            p.data.mul_(1 if "norm" in name else 4)
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        for step in range(200):
            hinted = torch.tensor([prompts[letter][step % 10] for letter in LETTERS])
            loss = torch.nn.functional.cross_entropy(model(hinted).logits[:, -1], right)
            for hint in ("x", None):
                any_letter = model(torch.tensor([prompts[hint][step % 10]])).logits[0, -1].log_softmax(-1)
                loss = loss - any_letter[right].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def log_probs(model: Any, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the response's tokens, by transformers alone."""
    ids = torch.tensor([[*prompt, *response]])
    every = model(ids).logits[0].log_softmax(-1)
    return every[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


def played(tokenizer: Any, prompt: list[int], answers: Sequence[str], success: bool, **extra: Any) -> list[Any]:
    """An episode as a row per step; each prompt is the one before, the turn, and an observation."""
    rows, end = [], tokenizer.encode("<|im_end|>\n<|im_start|>user\nseen<|im_end|>\n<|im_start|>assistant\n")
    for t, answer in enumerate(answers):
        ids = tokenizer.encode(answer)
        last = t == len(answers) - 1
        step = make_step(
            step=t,
            reward=float(success and last),
            anchor="s",
            action=answer,
            terminated=last,
            success=success,
            extra=dict(extra) | {"text": f"observation {t}"},
        )
        rows.append(row(prompt, ids, [1] * len(ids), [-1.0] * len(ids), [step]))
        prompt = [*prompt, *ids, *end]
    return rows


def put_all(episodes: dict[tuple[str, int], list[Any]], data: dict[str, dict[str, Any]]) -> None:
    """Into the queue; ``data``: fields of the data row, by group."""
    for (group, session), outputs in episodes.items():
        put(group, session, [output.model_copy(deep=True) for output in outputs], {"turnkey_task": "{}"} | data[group])


@contextmanager
def batch(episodes: dict[tuple[str, int], list[Any]], data: dict[str, Any], rows: int = 1) -> Iterator[Any]:
    """In the queue until the end, filled with padding rows to a multiple of ``rows``."""
    put_all(episodes, data)
    made = upsample_batch_to_divisible_size(batch_of(tq.kv_list(PARTITION)[PARTITION]), rows, EOS)
    made.extra_info["temperature"] = 1.0
    try:
        yield made
    finally:
        tq.kv_clear(keys=list(tq.kv_list(PARTITION)[PARTITION]), partition_id=PARTITION)
