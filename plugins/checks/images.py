"""Checks of a run whose environment gives images: model, processor, vLLM's limit, room in prompts.

They read the model's files alone (``config.json`` and those of its processor), and nothing if it is not on this
machine. Sizes are those of the first task's first images.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.resources import PROCESSORS
from verl_turnkey.plugins.checks.run import ROLLOUT
from verl_turnkey.plugins.config.machine import joins_cluster
from verl_turnkey.plugins.config.schema import TurnkeyConfig

TakesImages = Callable[[DictConfig, TurnkeyConfig, Sequence[Any]], None]
"""checks a run whose first observation has these images, arrays of (height, width, 3) bytes"""
PATCHED = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "Glm4vProcessor", "Glm46VProcessor")
"""cut images of any size into patches, one token per square of them; their video parts need torchvision"""
KNOWN = (*PATCHED, "MllamaProcessor", "Gemma4Processor")
"""those that verl's ``hf_processor`` takes; a contract test compares them with its code"""
LIMIT = f"{ROLLOUT}.engine_kwargs.vllm.limit_mm_per_prompt"


def check_images(config: DictConfig, turnkey: TurnkeyConfig, images: Sequence[Any]) -> None:
    """Refuse a model to which verl cannot show ``images``, those of a first prompt, and prompts without room for them.

    What only a long conversation would exceed is a warning, and so is a feature that passes over images.
    """
    model = config.actor_rollout_ref.model
    folder = Path(model.get("tokenizer_path") or model.path).expanduser()
    files = _files(folder)
    if folder.is_dir():
        if why := _without_images(files):
            refuse("images-model", path=model.path, why=why)
        if _class(files) in PATCHED and find_spec("torchvision") is None and not joins_cluster(config):
            refuse("images-torchvision", processor=_class(files))
    if (limit := _limit(config)) is not None:
        turns = turnkey.rollout.max_turns if turnkey.rollout.prompt == "conversation" else 1
        if len(images) > limit:
            refuse("images-limit", count=len(images), limit=limit, key=LIMIT)
        elif turns * len(images) > limit:
            warn("images-limit-conversation", turns=turns, count=turns * len(images), limit=limit, key=LIMIT)
    skipping = {
        "turnkey.groups.replay": turnkey.groups.replay,
        "turnkey.groups.buffer": turnkey.groups.buffer,
        "turnkey.mutual_information.every": turnkey.mutual_information.every,
    }
    for key, value in skipping.items():
        if value:
            warn("images-skipped", key=key)
    resized = bool(config.data.get("mm_processor_kwargs"))  # may bound the area in another way
    tokens = 0 if resized else sum(_tokens(files, *image.shape[:2]) for image in images)
    if tokens >= (room := config.actor_rollout_ref.rollout.prompt_length):
        refuse("images-room", tokens=tokens, room=room)


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """The JSON files of a model by name; without those that are absent or damaged."""
    files: dict[str, dict[str, Any]] = {}
    for name in ("config.json", *PROCESSORS, "tokenizer_config.json"):
        try:
            content = json.loads(read_text(folder / name))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            files[name] = content
    return files


def _without_images(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why verl's agent loops cannot show images to a model with these files; None if they can, as far as these say."""
    from verl_turnkey.plugins.verl_api.builders import IMAGES

    if "vision_config" not in files.get("config.json", {}) or not any(name in files for name in PROCESSORS):
        return "it is a text model (no vision_config in config.json, or no preprocessor_config.json)"
    if not IMAGES:
        return "prompts with images need verl 0.9.1"
    if (name := _class(files)) is not None and name not in KNOWN:
        return f"verl's hf_processor does not know {name}"
    return None


def _class(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The class of the processor; None: the files do not name it."""
    named = (
        files[name].get("processor_class") for name in (*PROCESSORS[::-1], "tokenizer_config.json") if name in files
    )
    return next((name for name in named if isinstance(name, str)), None)


def _limit(config: DictConfig) -> int | None:
    """How many images vLLM takes in a prompt; None: its default, which is far more than a prompt has."""
    limits = OmegaConf.select(config, LIMIT)
    if isinstance(limits, str):
        try:
            limits = json.loads(limits)
        except ValueError:
            return None
    images = limits.get("image") if isinstance(limits, Mapping | DictConfig) else None
    count = images.get("count") if isinstance(images, Mapping | DictConfig) else images
    return count if isinstance(count, int) else None


def _tokens(files: Mapping[str, Mapping[str, Any]], height: int, width: int) -> int:
    """Tokens of an image of a processor that cuts patches; 0: another, whose count is not known here.

    Both sides are rounded to multiples of a token's side, ``patch_size * merge_size`` pixels. Outside the bounds on the
    area the image is scaled first, so that its area is at the bound.
    """
    settings = {**files.get("preprocessor_config.json", {})}
    settings |= files.get("processor_config.json", {}).get("image_processor", {})
    size = settings.get("size") or {}
    low, high = (settings.get(name) or size.get(edge) for name, edge in _BOUNDS)
    patch, merge = settings.get("patch_size"), settings.get("merge_size")
    numbers = (patch, merge, low, high)
    if _class(files) not in PATCHED or not all(isinstance(number, int) and number > 0 for number in numbers):
        return 0
    assert isinstance(low, int)
    assert isinstance(high, int)
    side = patch * merge
    area = max(side, round(height / side) * side) * max(side, round(width / side) * side)
    if area > high:
        rows, columns = (max(1, math.floor(n / math.sqrt(height * width / high) / side)) for n in (height, width))
    elif area < low:
        rows, columns = (math.ceil(n * math.sqrt(low / (height * width)) / side) for n in (height, width))
    else:
        return area // side**2
    return rows * columns


_BOUNDS = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
