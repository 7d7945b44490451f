"""The quickstart's two models, each with the game it is small enough to learn, and what a run of it takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from training import HISTORY, LEVEL, MAX_TURNS

from verl_turnkey.plugins.config.machine import choose


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
"""0.14M random parameters: nothing is downloaded, and nothing is known of any language"""


JOB = {"recipe": "errands", "groups": 4, "mini_batches": 1, "lr": 1e-5, "tokens": 2048}
# One update a step: the policy that wrote the tokens is the one that is updated, and the server has computed their
# log-probabilities already.
BYPASS = "algorithm.rollout_correction.bypass_mode=true"


def errands(model: str) -> Setup:
    """A chat model, by its folder, on errands as the environment has them by default: about five turns an episode.

    Without bfloat16 a step takes about twice as long, so there are fewer steps, with half as many episodes each.
    """
    bf16 = choose("param_dtype", model) == "bf16"
    task = ("data.max_prompt_length=160", "data.max_response_length=400", BYPASS)
    return Setup(
        env="turnkey/Errands-v0",
        kwargs={},
        warm_start=("imitation.py", "--model", model),
        steps=10 if bf16 else 8,
        n_val=64 if bf16 else 32,
        # Two rows a micro-batch: the trainer takes a third less memory than with four.
        job={**JOB, "groups": 4 if bf16 else 2, "tokens": 1024, "task": task},
    )


def house(model: str, *, errands: int, hint: bool, turns: int, demonstrations: int, response: int) -> Setup:
    """Several errands, and every cupboard is closed: up to ``turns`` actions of six kinds."""
    kwargs = {"errands": errands, "hint": hint, "cupboards": True, "max_steps": turns}
    settings = [f"turnkey.env.kwargs.{key}={str(value).lower()}" for key, value in kwargs.items()]
    sizes = (f"turnkey.rollout.max_turns={turns}", "data.max_prompt_length=200", f"data.max_response_length={response}")
    # 64 conversations of 1,300 tokens: with the 1 GB of the device's default, the server computes them again and again.
    cache = "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE='2'"
    start = ("--episodes", str(demonstrations), "--kwargs", json.dumps(kwargs))
    return Setup(
        env="turnkey/Errands-v0",
        kwargs=kwargs,
        warm_start=("imitation.py", "--model", model, *start),
        steps=18,
        n_val=64,
        job={**JOB, "lr": 2e-5, "task": (*settings, *sizes, cache, BYPASS)},
    )


# 9 to 13 turns at best, of which some are spent on looking into the wrong room.
two_errands = partial(house, errands=2, hint=False, turns=16, demonstrations=110, response=800)
# 15 turns at best
three_errands = partial(house, errands=3, hint=True, turns=24, demonstrations=110, response=1100)


def service(model: str) -> Setup:
    """The return of an item that the policy allows: five calls, of which four copy from what the agent has read."""
    kwargs = {"kinds": ["return"], "orders": 1, "details": True, "forbid": 0, "max_steps": 10}
    shop = [f"turnkey.env.kwargs.{key}={json.dumps(value)}" for key, value in kwargs.items()]
    turns = ("turnkey.rollout.max_turns=10", "turnkey.rollout.max_tokens_per_turn=32")
    sizes = ("turnkey.rollout.action_format=plain", "data.max_prompt_length=512", "data.max_response_length=1200")
    start = ("--env", "turnkey/Service-v0", "--template", "service", "--kwargs", json.dumps(kwargs))
    return Setup(
        env="turnkey/Service-v0",
        kwargs=kwargs,
        warm_start=("imitation.py", "--model", model, *start),
        steps=10,
        n_val=64,
        job={**JOB, "recipe": "service", "groups": 2, "task": (*shop, *turns, *sizes, BYPASS)},
    )


GAMES = {"errands": errands, "two_errands": two_errands, "three_errands": three_errands, "service": service}


def setup_of(model: str, game: str = "errands") -> Setup:
    """For ``smollm2`` (fetched when it is not here yet), ``tiny``, or a folder with a chat model.

    ``game``: of :data:`GAMES`, for a chat model.

    Raises:
        SystemExit: the weights cannot be fetched, or there is no such folder or game.
    """
    if game not in GAMES or (model == "tiny" and game != "errands"):
        raise SystemExit(f"--game {game}: expected one of {', '.join(GAMES)}; the tiny model has a game of its own")
    if model == "tiny":
        return TINY
    if model == "smollm2":
        from smollm import fetch  # imports torch and transformers

        return GAMES[game](str(fetch()))
    if not (Path(model).expanduser() / "config.json").is_file():
        raise SystemExit(f"--model {model}: expected smollm2, tiny, or a folder with a config.json")
    return GAMES[game](str(Path(model).expanduser().resolve()))
