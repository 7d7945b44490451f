"""Make the example's model: a tiny Qwen3-VL of random weights that has watched players look for things in pictures.

    python examples/vision/warm_start.py --out runs/vision/model --seed 0

Nothing is downloaded. The classes of model and processor are those of transformers, so verl and vLLM treat it as they
treat Qwen3-VL; only sizes and tokenizer are its own.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from minigrid.core.constants import OBJECT_TO_IDX
from minigrid.minigrid_env import MiniGridEnv
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))

from demos import Demo, collect_in
from grey import KWARGS, grey
from model import build_tokenizer, sizes

from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.minigrid import ACTIONS
from verl_turnkey.envs.prompting.prompts import build_messages, load_template
from verl_turnkey.envs.tasks import split_seeds

TILE = KWARGS["tile"]
WIDTH, LAYERS, SIGHT = 96, 3, 64
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
IGNORE, GREY_EVERY = -100, 8


class Looker:
    """Plays by what is in view: turns until it sees the thing, walks until it is beside it, and turns to it."""

    def __init__(self, env: MiniGridEnv) -> None:
        self._env = env

    def best(self) -> list[str]:
        view = self._env.gen_obs()["image"]
        right, ahead = view.shape[0] // 2, view.shape[1] - 1  # where the agent stands
        for x in range(view.shape[0]):
            for y in range(view.shape[1]):
                if int(view[x, y, 0]) in (OBJECT_TO_IDX["key"], OBJECT_TO_IDX["ball"], OBJECT_TO_IDX["box"]):
                    if y < ahead or x == right:
                        return ["go forward"]
                    return ["turn right" if x > right else "turn left"]
        return ["turn left", "turn right"]


def messages_of(demo: Demo) -> list[dict[str, Any]]:
    """The prompt as the agent loop writes it."""
    return build_messages(
        system=None,
        template=load_template("minigrid"),
        task=demo.task,
        history=(),
        observation=demo.observation,
        admissible=None,
        images=[Image.fromarray(image) for image in demo.images],
    )


def build(demos: Sequence[Demo]) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    """One token of a picture is one cell of the grid."""
    texts = [f"user\n{messages_of(demo)[0]['content'][-1]['text']}\nassistant\n" for demo in demos]
    tokenizer = build_tokenizer(texts, ACTIONS, special=VISION)
    tokenizer.chat_template = CHAT_TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    text = transformers.Qwen3VLTextConfig(rope_parameters=rope, **sizes(tokenizer, LAYERS, WIDTH))
    patches = {"patch_size": TILE // 2, "temporal_patch_size": 2}
    sight = {
        "depth": 1, "hidden_size": SIGHT, "intermediate_size": 2 * SIGHT, "num_heads": 2, "out_hidden_size": WIDTH,
        "spatial_merge_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 256, **patches,
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        # vLLM's CPU platform asks for the architecture of the text model, which transformers does not name.
        text_config={**text.to_dict(), "architectures": ["Qwen3ForCausalLM"]},
        vision_config=sight,
        tie_word_embeddings=True,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    size = {"shortest_edge": 4 * TILE**2, "longest_edge": 64 * TILE**2}
    processor = Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(merge_size=2, size=size, **patches),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(merge_size=2, size=size, **patches),
        chat_template=CHAT_TEMPLATE,
    )
    return Qwen3VLForConditionalGeneration(config), processor


def encode(processor: Qwen3VLProcessor, demos: Sequence[Demo]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the model reads of a batch, and the labels (batch, longest): action and end of turn alone."""
    tokenizer: PreTrainedTokenizerFast = processor.tokenizer
    conversations = [messages_of(demo) for demo in demos]
    prompts = [processor.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in conversations]
    answers = [demo.action + tokenizer.eos_token for demo in demos]
    inputs = processor(
        text=[prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        images=[part["image"] for [m] in conversations for part in m["content"] if part["type"] == "image"],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    labels = torch.full_like(inputs["input_ids"], IGNORE)
    for row, answer in enumerate(answers):
        stop = int(inputs["attention_mask"][row].sum())
        first = stop - len(tokenizer(answer).input_ids)
        labels[row, first:stop] = inputs["input_ids"][row, first:stop]
    return dict(inputs), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=1500, help="demonstrated episodes")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    # Seeds of their own: neither the training nor the validation tasks come from this stream.
    seeds, _ = split_seeds(args.episodes, 0, seed=10_000 + args.seed)
    env = make("turnkey/MiniGrid-v0", KWARGS)
    demos = collect_in(env, lambda env: Looker(env.unwrapped.grid_env), seeds, 0, KWARGS["max_steps"], args.seed)
    rng = random.Random(args.seed)
    rng.shuffle(demos.steps)
    # Some pictures are grey, so that the model knows how to act without seeing anything.
    steps = [grey(demo) if place % GREY_EVERY == 0 else demo for place, demo in enumerate(demos.steps)]
    model, processor = build(steps)
    starts = range(0, len(steps) - args.batch_size + 1, args.batch_size)
    batches = [encode(processor, steps[first : first + args.batch_size]) for first in starts]
    size = sum(p.numel() for p in model.parameters())
    seconds = time.perf_counter() - began
    print(f"{size} parameters, {len(steps)} steps; players won {demos.won} ({seconds:.0f} s)", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    updates = args.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=updates, pct_start=0.1)
    for epoch in range(args.epochs):
        rng.shuffle(batches)
        total = 0.0
        for inputs, labels in batches:
            logits = model(**inputs, use_cache=False).logits[:, :-1]
            answer = labels[:, 1:] != IGNORE
            loss = torch.nn.functional.cross_entropy(logits[answer], labels[:, 1:][answer])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() / len(batches)
        print(f"epoch {epoch + 1}: loss {total:.3f} ({time.perf_counter() - began:.0f} s)", flush=True)
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)


if __name__ == "__main__":
    main()
