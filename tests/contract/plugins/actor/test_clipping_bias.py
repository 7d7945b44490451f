"""The gradients of st_ppo and s_ppo under verl's engine: what autograd gives on the whole batch in float64, by hand."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from naive.common import turns_of

from verl_turnkey.plugins.actor import loss

pytestmark = pytest.mark.timeout(2000)  # the first test starts training processes

HERE = Path(__file__).parent
Case = dict[str, Any]


ROWS = 8


def make_case(model: Any, noise: float, which: Sequence[int] = range(ROWS), **settings: Any) -> Case:
    """Rows of one to three turns; in the rows ``which`` the policy has moved by ``noise`` since the batch was taken."""
    draw = torch.Generator().manual_seed(1)
    case: Case = {name: [] for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages")}
    for row in range(ROWS):
        prompt = torch.randint(3, 200, (3 + row % 3,), generator=draw)
        mask = torch.tensor(([1, 1, 0, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 0], [1] * (2 + row))[row % 3])
        response = torch.randint(3, 200, (len(mask),), generator=draw)
        case["prompts"].append(prompt)
        case["responses"].append(response)
        case["response_mask"].append(mask)
        old = log_probs(model, prompt, response).detach()
        moved = noise * torch.randn(len(mask), generator=draw) * (row in which)
        case["old_log_probs"].append((old + moved).float())
        case["advantages"].append(3.0 * torch.randn(len(mask), generator=draw))
    return {**case, "loss": "st_ppo", "params": {}, **settings}


def log_probs(model: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


def by_hand(model: Any, case: Case) -> dict[str, Any]:
    """Plain loops over rows, turns (or tokens) and their tokens."""
    surrogate, bias, tokens, clipped = 0.0, 0.0, 0, []
    for row, mask in enumerate(case["response_mask"]):
        now = log_probs(model, case["prompts"][row], case["responses"][row])
        turns = turns_of(mask.tolist())
        units = turns if case["loss"] == "st_ppo" else [[t] for turn in turns for t in turn]
        own = [1 + t % 2 if case["loss"] == "weighed" else 1 for t in range(len(mask))]
        for unit in units:
            ratio = torch.exp(sum(now[t] - case["old_log_probs"][row][t].double() for t in unit) / len(unit))
            for t in unit:
                advantage = case["advantages"][row][t].double()
                weight = own[t] * (case["rollout_is_weights"][row][t].double() if "rollout_is_weights" in case else 1)
                weight = weight * (3 * case["weights"][row][t].double() if "weights" in case else 1)
                surrogate = surrogate + weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8):
                    bias = bias + weight * ratio * advantage
                    clipped.append((row, t))
            tokens += sum(own[t] for t in unit)
    parameters = dict(model.named_parameters())

    def gradient(value: Any) -> dict[str, torch.Tensor]:
        if not isinstance(value, torch.Tensor):
            return {name: torch.zeros_like(p) for name, p in parameters.items()}
        divisor = 1 if "weights" in case else tokens  # three mini-batches, and weights that add up to 1
        slopes = torch.autograd.grad(value / divisor, list(parameters.values()), retain_graph=True)
        return dict(zip(parameters, slopes, strict=True))

    up, lost = gradient(surrogate), gradient(bias)
    norm = torch.sqrt(sum(g.square().sum() for g in lost.values())).item()
    divisor = norm if case["params"].get("divide") == "always" else max(1.0, norm)
    return {
        "norm": norm,
        "scale": 1 / divisor if clipped else 1.0,
        "clipped": clipped,
        "clipped_rows": {row for row, _ in clipped},
        # the loss is minimised
        "gradients": {name: -g / divisor if clipped else -g for name, g in up.items()},
    }


def make_cases(model: Any) -> dict[str, Case]:
    cases = {f"{tokens} tokens": make_case(model, 0.6, max_tokens=tokens) for tokens in (1000, 70, 25)}
    usual = cases["1000 tokens"]
    small = {**usual, "advantages": [a / 100 for a in usual["advantages"]]}
    weights = [torch.linspace(0.2, 2.0, len(mask)) for mask in usual["response_mask"]]
    own = sum(int((mask * (1 + torch.arange(len(mask)) % 2)).sum()) for mask in usual["response_mask"])
    share = sum(int(mask.sum()) for mask in usual["response_mask"]) / own
    tokens = 3 * sum(int(mask.sum()) for mask in usual["response_mask"])
    return {
        **cases,
        "weight_by": {**usual, "weights": [w / tokens for w in weights], "max_tokens": 70},
        "small bias": small,
        "small bias, always": {**small, "params": {"divide": "always"}},
        "token ratios": {**usual, "loss": "s_ppo"},
        "token ratios, always": {**small, "loss": "s_ppo", "params": {"divide": "always"}},
        "weights of its own": {**usual, "loss": "weighed", "weight_share": share, "max_tokens": 70},
        "importance weights": {**usual, "rollout_is_weights": weights},
        "nothing clipped": make_case(model, 0.0, max_tokens=1000),
        "nothing clipped, always": make_case(model, 0.0, max_tokens=1000, params={"divide": "always"}),
        "clipped on one rank": make_case(model, 0.9, range(1, ROWS, 2), max_tokens=25),
        "rows in pairs": make_case(model, 0.9, (0, 1, 3), micro_batch_size=2),
    }


def overflowing(model: Any, case: Case) -> Case:
    """The clipped tokens alone have advantages whose gradients' norm float32 cannot hold."""
    advantages = [a.clone() for a in case["advantages"]]
    for row, t in by_hand(model, case)["clipped"]:
        advantages[row][t] *= 1e30
    return {**case, "advantages": advantages}


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
    cases = make_cases(model)
    torch.save({**cases, "overflow": overflowing(model, cases["1000 tokens"])}, folder / "cases.pt")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for world in (1, 2):
        ranks = []
        for rank in range(world):
            command = [sys.executable, str(HERE / "clipping_bias_rank.py"), str(rank), str(world), str(folder)]
            with (folder / f"output{world}-{rank}").open("w") as out:  # a pipe that nobody reads yet may fill up
                ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
        for rank, process in enumerate(ranks):
            code = process.wait(timeout=1500)
            assert code == 0, (folder / f"output{world}-{rank}").read_text()[-4000:]
    done = {world: torch.load(folder / f"result{world}-0.pt", weights_only=False) for world in (1, 2)}
    return {name: by_hand(model, case) for name, case in cases.items()}, done


CASES = [
    *("1000 tokens", "70 tokens", "25 tokens", "small bias", "small bias, always", "token ratios"),
    *("token ratios, always", "importance weights", "nothing clipped", "nothing clipped, always"),
    *("weights of its own", "weight_by", "clipped on one rank", "rows in pairs"),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("name", CASES)
def test_the_update_is_the_scaled_gradient(results, name, strategy, world):
    expected, done = results[0][name], results[1][world][f"{strategy}/{name}"]
    metrics = {key: values[0] for key, values in done["metrics"].items() if key.startswith("actor/clipping_bias/")}
    assert metrics["actor/clipping_bias/norm"] == pytest.approx(expected["norm"], rel=1e-4, abs=1e-7)
    assert metrics["actor/clipping_bias/scale"] == pytest.approx(expected["scale"], rel=1e-4)
    assert metrics["actor/clipping_bias/rows"] == len(expected["clipped_rows"])
    assert set(done["gradients"]) == set(expected["gradients"])
    largest = max(g.abs().max().item() for g in expected["gradients"].values())
    assert largest > 1e-4
    for parameter, gradient in expected["gradients"].items():
        torch.testing.assert_close(done["gradients"][parameter].double(), gradient, rtol=0, atol=2e-5 * largest)
    assert done["stepped"]


def test_the_cases_are_what_they_are_for(results):
    expected = results[0]
    assert set(expected) == set(CASES)
    assert expected["1000 tokens"]["norm"] > 1.5
    assert expected["importance weights"]["norm"] != pytest.approx(expected["1000 tokens"]["norm"], rel=0.05)
    assert expected["token ratios"]["norm"] != pytest.approx(expected["1000 tokens"]["norm"], rel=0.05)
    assert expected["token ratios"]["norm"] != pytest.approx(expected["weights of its own"]["norm"], rel=0.02)
    assert 0 < expected["small bias"]["norm"] < 1
    assert expected["small bias"]["scale"] == 1
    assert expected["small bias, always"]["scale"] > 1
    assert expected["nothing clipped"]["norm"] == 0
    assert 0 < len(expected["1000 tokens"]["clipped_rows"]) < ROWS
    assert len(expected["clipped on one rank"]["clipped_rows"]) >= 3
    assert all(row % 2 for row in expected["clipped on one rank"]["clipped_rows"])
    assert len(expected["rows in pairs"]["clipped_rows"]) == 3


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_no_step_is_made_when_the_norm_is_not_finite(results, strategy, world):
    done = results[1][world][f"{strategy}/overflow"]
    assert done["metrics"]["actor/clipping_bias/norm"] == [math.inf]
    assert all(g.isnan().all() for g in done["gradients"].values())
    assert not done["stepped"]


@pytest.mark.parametrize(("world", "expected"), [(1, [1, 2, 4]), (2, [1, 1, 2])])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_the_split_is_what_it_is_said_to_be(results, strategy, world, expected):
    done = results[1][world]
    counts = [len(done[f"{strategy}/{tokens} tokens"]["passes"][0]) for tokens in (1000, 70, 25)]
    assert counts == expected


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_the_second_pass_sees_only_rows_with_clipped_tokens(results, strategy):
    """On one rank; of several each takes as many as the one with the most, and fixed micro-batches are filled up."""
    expected, done = results
    for name, case in expected.items():
        rows = len(case["clipped_rows"]) + (name == "rows in pairs")
        second = [rows] if rows else []
        assert [sum(sizes) for sizes in done[1][f"{strategy}/{name}"]["passes"]] == [ROWS, *second], name
    assert done[1][f"{strategy}/rows in pairs"]["passes"] == [[2, 2, 2, 2], [2, 2]]
    on_rank = len(expected["clipped on one rank"]["clipped_rows"])
    assert [sum(sizes) for sizes in done[2][f"{strategy}/clipped on one rank"]["passes"]] == [ROWS // 2, on_rank]
    assert len(done[2][f"{strategy}/clipped on one rank"]["passes"][1]) == 2


def test_the_norm_of_offloaded_gradients_is_exchanged_on_the_accelerator(monkeypatch):
    """With FSDP2's offload parameters and gradients are on the CPU, and a group of ranks may know the GPU alone."""
    monkeypatch.setattr(loss, "get_device_name", lambda: "meta")  # there is no other one here
    module = torch.nn.Linear(2, 2)
    module(torch.ones(2)).sum().backward()
    with pytest.raises(RuntimeError, match="meta"):  # which holds no number
        loss._total_norm(SimpleNamespace(module=module))
