"""The quickstart's two models, each with the game it is small enough to learn, and what a run of it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training import HISTORY, LEVEL, MAX_TURNS


@dataclass(frozen=True)
class Setup:
    """A game, the supervised start of a model that shall play it, and the size of a training step."""

    env: str
    kwargs: dict[str, Any]
    warm_start: tuple[str, ...]
    """script and arguments, without ``--out`` and ``--seed``"""
    steps: int
    n_val: int
    job: dict[str, Any] = field(default_factory=dict)
    """arguments of ``training.Job`` that differ from its defaults"""


TINY = Setup(
    env="turnkey/MiniGrid-v0",
    kwargs={"level": LEVEL, "max_steps": MAX_TURNS},
    warm_start=("warm_start.py", "--level", LEVEL, "--history", str(HISTORY), "--max-turns", str(MAX_TURNS)),
    steps=20,
    n_val=128,
)
"""0.14 M random parameters: nothing is downloaded, and nothing is known of any language"""


def errands(model: str) -> Setup:
    """A chat model, by its folder, on errands as the environment has them by default."""
    return Setup(
        env="turnkey/Errands-v0",
        kwargs={},
        warm_start=("imitation.py", "--model", model),
        steps=10,
        n_val=64,
        job={
            "recipe": "errands",
            "task": ("data.max_prompt_length=160", "data.max_response_length=400"),
            "groups": 4,
            "mini_batches": 1,
            "lr": 1e-5,
            "tokens": 2048,
        },
    )


def setup_of(model: str) -> Setup:
    """For ``smollm2`` (fetched when it is not here yet), ``tiny``, or a folder with a chat model.

    Raises:
        SystemExit: the weights are not to be had, or there is no such folder.
    """
    if model == "tiny":
        return TINY
    if model == "smollm2":
        from smollm import fetch  # imports torch and transformers

        return errands(str(fetch()))
    if not (Path(model).expanduser() / "config.json").is_file():
        raise SystemExit(f"--model {model}: expected smollm2, tiny, or a folder with a config.json")
    return errands(str(Path(model).expanduser().resolve()))
