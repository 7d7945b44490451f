"""The gradient of st_ppo under verl's engine: what autograd gives on the whole batch at once, in float64, by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
Case = dict[str, Any]


def make_case(model: Any, noise: float, max_tokens: int, rows: int = 8) -> Case:
    """Rows of one to three turns; the policy has moved by ``noise`` since the batch was taken."""
    draw = torch.Generator().manual_seed(1)
    case: Case = {name: [] for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages")}
    for row in range(rows):
        prompt = torch.randint(3, 200, (3 + row % 3,), generator=draw)
        mask = torch.tensor(([1, 1, 0, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 0], [1] * (2 + row))[row % 3])
        response = torch.randint(3, 200, (len(mask),), generator=draw)
        case["prompts"].append(prompt)
        case["responses"].append(response)
        case["response_mask"].append(mask)
        old = log_probs(model, prompt, response).detach()
        case["old_log_probs"].append((old + noise * torch.randn(len(mask), generator=draw)).float())
        case["advantages"].append(3.0 * torch.randn(len(mask), generator=draw))
    case["max_tokens"] = max_tokens
    return case


def log_probs(model: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


def by_hand(model: Any, case: Case) -> dict[str, Any]:
    """Plain loops over rows, turns and tokens."""
    surrogate, bias, tokens, clipped_rows = 0.0, 0.0, 0, set()
    for row, mask in enumerate(case["response_mask"]):
        now = log_probs(model, case["prompts"][row], case["responses"][row])
        turn: list[int] = []
        for t in range(len(mask) + 1):
            if t < len(mask) and mask[t]:
                turn.append(t)
                continue
            if turn:
                ratio = torch.exp(sum(now[u] - case["old_log_probs"][row][u].double() for u in turn) / len(turn))
                for u in turn:
                    advantage = case["advantages"][row][u].double()
                    surrogate = surrogate + torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    if (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8):
                        bias = bias + ratio * advantage
                        clipped_rows.add(row)
                tokens += len(turn)
            turn = []
    parameters = dict(model.named_parameters())

    def gradient(value: Any) -> dict[str, torch.Tensor]:
        if not isinstance(value, torch.Tensor):
            return {name: torch.zeros_like(p) for name, p in parameters.items()}
        found = torch.autograd.grad(value / tokens, list(parameters.values()), retain_graph=True)
        return dict(zip(parameters, found, strict=True))

    up, lost = gradient(surrogate), gradient(bias)
    norm = torch.sqrt(sum(g.square().sum() for g in lost.values())).item()
    return {
        "norm": norm,
        "scale": 1 / max(1.0, norm),
        "clipped_rows": len(clipped_rows),
        "gradients": {name: -g / max(1.0, norm) for name, g in up.items()},  # the loss is minimised
    }


@pytest.fixture(scope="module")
def results(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is right, and what one and two ranks did."""
    from transformers import Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("clipping")
    (folder / "model").symlink_to(model_dir)
    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():  # fresh weights are so small that nothing would move
        for p in model.parameters():
            p.mul_(4)
    model.float().save_pretrained(folder / "strong")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (model_dir / name).exists():
            (folder / "strong" / name).write_bytes((model_dir / name).read_bytes())
    (folder / "model").unlink()
    (folder / "strong").rename(folder / "model")
    model = model.double()
    cases = {f"{tokens} tokens": make_case(model, 0.6, tokens) for tokens in (1000, 70, 35)}
    cases["small bias"] = {
        **make_case(model, 0.6, 1000),
        "advantages": [a / 100 for a in cases["70 tokens"]["advantages"]],
    }
    cases["nothing clipped"] = make_case(model, 0.0, 1000)
    torch.save(cases, folder / "cases.pt")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for world in (1, 2):
        ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "clipping_bias_rank.py"), str(rank), str(world), str(folder)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        for process in ranks:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out[-4000:]
    done = {world: torch.load(folder / f"result{world}-0.pt", weights_only=False) for world in (1, 2)}
    return {name: by_hand(model, case) for name, case in cases.items()}, done


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("name", ["1000 tokens", "70 tokens", "35 tokens", "small bias", "nothing clipped"])
def test_the_update_is_the_scaled_gradient(results, name, strategy, world):
    expected, done = results[0][name], results[1][world][f"{strategy}/{name}"]
    metrics = {key: values[0] for key, values in done["metrics"].items() if key.startswith("actor/clipping_bias/")}
    assert metrics["actor/clipping_bias/norm"] == pytest.approx(expected["norm"], rel=1e-4, abs=1e-7)
    assert metrics["actor/clipping_bias/scale"] == pytest.approx(expected["scale"], rel=1e-4)
    assert metrics["actor/clipping_bias/rows"] == expected["clipped_rows"]
    assert set(done["gradients"]) == set(expected["gradients"])
    largest = max(g.abs().max().item() for g in expected["gradients"].values())
    assert largest > 1e-4
    for parameter, gradient in expected["gradients"].items():
        torch.testing.assert_close(done["gradients"][parameter].double(), gradient, rtol=0, atol=2e-5 * largest)


def test_the_cases_are_what_they_are_for(results):
    expected = results[0]
    assert expected["1000 tokens"]["norm"] > 1.5
    assert 0 < expected["small bias"]["norm"] < 1
    assert expected["small bias"]["scale"] == 1
    assert expected["nothing clipped"]["norm"] == 0


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_the_second_pass_sees_only_rows_with_clipped_tokens(results, strategy):
    expected, done = results[0], results[1][1]
    for name, case in expected.items():
        second = [case["clipped_rows"]] if case["clipped_rows"] else []
        assert done[f"{strategy}/{name}"]["passes"] == [8, *second], name
    assert 0 < expected["1000 tokens"]["clipped_rows"] < 8
