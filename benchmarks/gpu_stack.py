"""Seconds of whole training steps of stock verl (FSDP2, vLLM) with random weights, by part; see gpu_check.py.

The model writes 60 tokens in each turn, none of them an action, and the game answers with text, so that episodes are as
long as those of text games. Each run has two steps; the second is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from verl_turnkey.plugins.view.runs import read

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples" / "quickstart"))

LAYOUTS = ("row per step", "conversation")
ON_STACK = ("vanilla", "st_ppo")
PARTS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")
SECOND = "actor/clipping_bias/seconds"
LONGEST = 32_768
"""tokens of prompt and responses that the model and the tokenizer allow"""


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """A model with random weights, and a tokenizer of bytes, which uses the first part of its vocabulary."""
    from model import build_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer([], [], pieces=r"\s+")  # of no texts: a token for each byte
    tokenizer.model_max_length = LONGEST
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=LONGEST,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)


def overrides(layout: str, loss: str, turns: int, answer: int, groups: int) -> list[str]:
    """Overrides of the launch line for a layout and a loss."""
    observation = 2 * answer + 100  # with the marks of a message
    length = turns * (answer + observation)
    prompts = {
        "row per step": ["turnkey.rollout.prompt=template", f"data.max_response_length={answer}"],
        "conversation": [
            "turnkey.rollout.prompt=conversation",
            f"turnkey.rollout.max_tokens_per_turn={answer}",
            f"data.max_response_length={length}",
        ],
    }
    return [
        f"+turnkey/loss={loss}",
        *prompts[layout],
        "turnkey.rollout.action_format=plain",
        f"turnkey.rollout.max_turns={turns}",
        f"++turnkey.env.kwargs={{turns: {turns}, length: {answer}}}",
        "data.max_prompt_length=4096",
        f"data.train_batch_size={groups}",
        # Two optimizer steps; with so narrow a clip the second pass of st_ppo has most rows, which is its worst case.
        f"actor_rollout_ref.actor.ppo_mini_batch_size={max(1, groups // 2)}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *(["turnkey.loss.clip_low=0.001", "turnkey.loss.clip_high=0.001"] if loss == "st_ppo" else []),
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.rollout.enforce_eager=true",  # graphs take minutes to capture
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]


def command(model: Path, folder: Path, device: str, launch: list[str]) -> list[str]:
    """``turnkey train``, which checks the launch line and becomes verl's program."""
    turnkey = [
        str(Path(sys.executable).with_name("turnkey")),
        "train",
        f"{HERE / 'text_game.py'}:benchmarks/TextGame-v0",
    ]
    what = ["--model", str(model), "--device", "gpu" if device == "cuda" else device, "--steps", "2"]
    return [*turnkey, *what, "--out", str(folder), "--train", "64", "--val", "8", *launch]


def stack(
    name: str, shape: dict[str, int], turns: int, answer: int, groups: int, device: str, out: Path, more: list[str]
) -> list[dict[str, Any]]:
    """A row for each layout and loss; finished runs are not repeated. ``more``: further overrides."""
    model = out / name / "model"
    if not (model / "config.json").is_file():
        write_model(model, shape)
    table = []
    for layout, loss in product(LAYOUTS, ON_STACK):
        folder = out / name / f"{layout} {loss}".replace(" ", "-")
        if not (folder / "measured.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            line = command(model, folder, device, [*overrides(layout, loss, turns, answer, groups), *more])
            with (folder / "train.log").open("w") as log:
                print(f"{name}, {layout}, {loss}: {log.name}", file=sys.stderr, flush=True)
                subprocess.run(line, check=True, stdout=log, stderr=subprocess.STDOUT)
            (folder / "measured.json").write_text(json.dumps(measured(folder), indent=1))
        row = {"model": name, "layout": layout, "loss": loss}
        table.append(row | json.loads((folder / "measured.json").read_text()))
    return table


def measured(folder: Path) -> dict[str, Any]:
    """Tokens, seconds by part, our share of them, and the device's peak memory in the last step of a run."""
    last = {metric: float(values[-1]) for metric, values in read(folder).metrics.items()}
    parts = {part: last[f"timing_s/{part}"] for part in PARTS if f"timing_s/{part}" in last}
    ours = parts["adv"] + last.get(SECOND, 0.0)
    return {
        "tokens": int(last["perf/total_num_tokens"]),
        "seconds": parts["step"],
        "share": ours / parts["step"],
        "gib": last.get("perf/max_memory_allocated_gb"),
        "parts": {part: seconds for part, seconds in parts.items() if part != "step"}
        | ({"second pass": last[SECOND]} if SECOND in last else {}),
    }
