"""Real workers of verl in processes of their own, and a rollout to train them on; see row_layouts.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from row_layouts import SETTINGS, Rollout, sample, start
from training_ranks import Processes, Ranks


@pytest.fixture(scope="module")
def model(strong_model_dir: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(strong_model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def rollout(model: Any) -> Rollout:
    return sample(model)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Ranks]]:
    processes = Processes(tmp_path_factory.mktemp("ranks"), (1, 2))
    yield processes.groups
    processes.stop()


@pytest.fixture
def ready(ray_queue, trainer, ranks, monkeypatch, strong_model_dir) -> Callable[..., Any]:
    """A trainer whose workers have started."""

    def build(world: int, *overrides: str, recipe: str = "turn_gae") -> Any:
        paths = [f"{at}.path={strong_model_dir}" for at in ("actor_rollout_ref.model", "critic.model")]
        made = trainer(*SETTINGS, *paths, *overrides, recipe=recipe)
        made.global_steps = 5  # whose rollout may have seen the weights of four steps
        start(made, ranks[world], monkeypatch)
        return made

    return build
