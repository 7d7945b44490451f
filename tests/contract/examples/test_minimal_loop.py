"""The loop in one file: its loss is verl's, its updates follow the credit, and it learns."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import ActorConfig

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def loop() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("minimal_loop")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's tiny model after a short warm start."""
    import subprocess

    out = tmp_path_factory.mktemp("tiny") / "model"
    script = [sys.executable, str(EXAMPLES / "quickstart" / "warm_start.py"), "--out", str(out), "--check", "0"]
    subprocess.run(script, check=True, capture_output=True)
    return out


def test_the_loss_is_verls(loop: Any) -> None:
    torch.manual_seed(0)
    old, new = torch.randn(4, 30), torch.randn(4, 30)
    advantage, mask = torch.randn(4, 1).expand(4, 30), torch.ones(4, 30)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=loop.CLIP)
    verls, _ = compute_policy_loss_vanilla(old, new, advantage, mask, "token-mean", config)
    ours = loop.policy_loss((new - old).exp(), advantage).mean()
    torch.testing.assert_close(ours, verls)


def test_an_update_follows_the_credit_and_the_loop_learns(loop: Any, trained: Path) -> None:
    tokenizer = loop.AutoTokenizer.from_pretrained(trained)
    model = loop.AutoModelForCausalLM.from_pretrained(trained)
    level = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 20}
    game = loop.Game("turnkey/MiniGrid-v0", level, loop.load_template("minigrid"), history=1, max_turns=20)
    sizes = {"groups": 4, "rollouts": 8, "max_tokens": 4, "lr": 1e-3, "seed": 0}
    metrics = list(loop.train(model, tokenizer, game, method="gigpo", params={}, steps=8, **sizes))
    success = [step["success"] for step in metrics]
    assert sum(success[-3:]) / 3 > sum(success[:2]) / 2 + 0.1, success

    good, bad = game.play(loop.Sampler(model, tokenizer, 4), tokenizer, [1], rollouts=2)
    rows = [loop.Row(turn.prompt, turn.response.ids) for turn in (good.turns[0], bad.turns[-1])]
    before = loop.log_probs(model, rows)[0].sum(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loop.update(model, optimizer, [good.turns[0], bad.turns[-1]], [1.0, -1.0])
    after = loop.log_probs(model, rows)[0].sum(dim=1)
    assert after[0] - after[1] > before[0] - before[1]
