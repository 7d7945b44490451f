"""The gradient of an update is that of the whole batch in float64, on ranks and in parts of sequences.

Every shipped loss, with weights of tokens, importance, a teacher's columns and learned observations; on one rank and on
two data-parallel ranks, packed and padded, on two Ulysses ranks, and with LoRA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl_turnkey.losses import losses
from verl_turnkey.losses.registry import TEACHER, scales_gradient, token_loss, weight_share
from verl_turnkey.plugins.cli.tables import shipped_losses

HERE = Path(__file__).parent
Case = dict[str, Any]
ROWS, MINI_BATCHES = 8, 3
ENTROPY, OBSERVATION = 0.01, 0.5
LORA = 4
SETUPS = {
    "1 rank": (1, 1, True, 0),
    "2 ranks": (2, 1, True, 0),
    "2 ranks per sequence": (2, 2, True, 0),
    "1 rank, padded": (1, 1, False, 0),
    "2 ranks, padded": (2, 1, False, 0),
    "2 ranks, LoRA": (2, 1, True, LORA),
}
"""ranks, over how many a sequence is spread, whether rows are packed, and the rank of LoRA"""
SWITCHED = ("vanilla", "turn_ratio", "st_ppo", "sdar")
SWITCHES = ("a rank without a turn", "importance", "weights", "observations")
LOSSES = ("vanilla", *shipped_losses())
FEW = 24
"""tokens of a micro-batch: one or two rows; 1000 takes all"""


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """(B, L) float64, zero behind the end of a row."""
    return torch.nn.utils.rnn.pad_sequence([row.double() for row in rows], batch_first=True)


def forward(model: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) log-probabilities and entropies of the responses, each row by itself."""
    log_probs, entropies = [], []
    for prompt, response in zip(case["prompts"], case["responses"], strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1)
        log_probs.append(logp.gather(1, response[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return padded(log_probs), padded(entropies)


def make_cases(model: Any) -> dict[str, Case]:
    draw = torch.Generator().manual_seed(1)
    usual: Case = {"prompts": [], "responses": [], "response_mask": [], "mean": "token-mean", "params": {}}
    for row in range(ROWS):  # one to three turns, some rows with an observation before the first
        mask = ([1, 1, 0, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 0], [1] * (2 + row))[row % 3]
        usual["prompts"].append(torch.randint(3, 200, (3 + row % 3,), generator=draw))
        usual["responses"].append(torch.randint(3, 200, (len(mask),), generator=draw))
        usual["response_mask"].append(torch.tensor(mask))
    sizes = [len(mask) for mask in usual["response_mask"]]

    def numbers(scale: float = 1.0) -> list[torch.Tensor]:
        return [scale * torch.randn(size, generator=draw) for size in sizes]

    with torch.no_grad():
        now = [row[:size].float() for row, size in zip(forward(model, usual)[0], sizes, strict=True)]
    usual |= {"old_log_probs": [a + b for a, b in zip(now, numbers(0.5), strict=True)], "advantages": numbers(3.0)}
    columns = {
        "staleness": torch.arange(ROWS).float() % 3,
        "tool_advantages": [row * (i % 2) for i, row in enumerate(numbers())],
        "rewards": torch.randn(ROWS, generator=draw),
        "group_log_ratio": 0.3 * torch.randn(ROWS, generator=draw),
        "group_reward": torch.randn(ROWS, generator=draw),
        **dict(
            zip(
                TEACHER, ([a + b for a, b in zip(now, numbers(), strict=True)], torch.tensor([1.0, 0] * 4)), strict=True
            )
        ),
    }
    uniform = [row.abs() for row in numbers()]

    def case(loss: str, tokens: int = FEW, **more: Any) -> Case:
        made = {**usual, "loss": loss, "max_tokens": tokens, "packed": True, "entropy": ENTROPY, **more}
        if loss in losses():
            spec = losses()[loss]
            made["mean"] = "seq-mean-token-mean" if spec.per_row else "token-mean"
            made["columns"] = {name: columns[name] for name in spec.needs}
            if (share := weight_share(spec, spec.params(), *shared(made))) is not None:
                made["weight_share"] = float(share)
        return made

    cases = {f"{loss}, {tokens}": case(loss, tokens) for loss in LOSSES for tokens in (1000, FEW)}
    silent = [mask * (row % 2 == 0) for row, mask in enumerate(usual["response_mask"])]
    for loss in SWITCHED:
        cases[f"{loss}, a rank without a turn"] = case(loss, response_mask=silent)
        cases[f"{loss}, importance"] = case(loss, rollout_is_weights=uniform)
        cases[f"{loss}, weights"] = case(loss, weights=[row / 100 for row in uniform])
        observed = [(1 - mask) / 20 for mask in usual["response_mask"]]
        cases[f"{loss}, observations"] = case(loss, observed=observed, observation=OBSERVATION)
    return cases


def extra_of(case: Case) -> dict[str, torch.Tensor]:
    """The further inputs of the loss, (B, L) or (B,)."""
    columns = case.get("columns", {})
    return {name: column if isinstance(column, torch.Tensor) else padded(column) for name, column in columns.items()}


def shared(case: Case) -> tuple[Any, ...]:
    return (*(padded(case[name]) for name in ("old_log_probs", "advantages", "response_mask")), extra_of(case))


def twin(model: Any, case: Case) -> dict[str, torch.Tensor]:
    """The gradients of the whole batch at once, in float64."""
    log_prob, entropy = forward(model, case)
    old, advantages, mask, extra = shared(case)
    scale, bias = None, None
    if case["loss"] == "vanilla":  # PPO with a dual clip at 3
        ratio = (log_prob - old).exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = torch.where(advantages < 0, torch.minimum(loss, -3 * advantages), loss)
    else:
        spec = losses()[case["loss"]]
        params = spec.params()
        term = token_loss(spec, params, log_prob, old, advantages, mask, extra)
        loss, bias = term.loss, term.bias
        scale = params.gradient_scale if scales_gradient(params) else None
    importance = padded(case["rollout_is_weights"]) if "rollout_is_weights" in case else 1.0
    share = mask / mask.sum()
    if case["mean"] == "seq-mean-token-mean":
        share = mask / mask.sum(1, keepdim=True) / len(mask)
    if "weights" in case:
        share = mask * padded(case["weights"]) * MINI_BATCHES
    total = (loss * importance * share).sum() - ENTROPY * (entropy * share).sum()
    if "observed" in case:
        total = total - OBSERVATION * MINI_BATCHES * (padded(case["observed"]) * log_prob).sum()
    result = slopes(model, total)
    if scale is not None:
        assert bias is not None
        lost = slopes(model, (bias * importance * share).sum())
        norm = torch.cat([g.flatten() for g in lost.values()]).norm().item()
        result = {name: g * scale(norm) for name, g in result.items()} if norm else result
    return result


def slopes(model: Any, value: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(parameters, torch.autograd.grad(value, [*parameters.values()], retain_graph=True), strict=True))


@pytest.fixture(scope="module")
def results(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Any], dict[Any, Any]]:
    """The float64 gradients of each case by the rank of LoRA, and what each setup did."""
    folder = tmp_path_factory.mktemp("parallel")
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=259, tie_word_embeddings=True, **shape))
    with torch.no_grad():  # fresh weights are so small that nothing would move
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast.from_pretrained(model_dir).save_pretrained(folder / "model")
    model = model.double()
    cases = make_cases(model)
    torch.save(cases, folder / "cases.pt")
    (folder / "setups.json").write_text(json.dumps(SETUPS))
    command = [sys.executable, str(HERE / "parallel_ranks.py"), str(folder)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    loaded = {
        (setup, rank): torch.load(folder / f"{setup} {rank}.pt")
        for setup, (world, *_) in SETUPS.items()
        for rank in range(world)
    }
    expected = {0: {name: twin(model, case) for name, case in cases.items()}}
    adapted = get_peft_model(model, LoraConfig(r=LORA, lora_alpha=2 * LORA, target_modules="all-linear"))
    values = torch.load(folder / "adapter 0.pt")
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad:
                weight.copy_(values.pop(name))
    assert not values
    return expected | {LORA: {name: twin(adapted, case) for name, case in cases.items()}}, loaded


def names() -> list[str]:
    of_losses = [f"{loss}, {tokens}" for loss in LOSSES for tokens in (1000, FEW)]
    return of_losses + [f"{loss}, {switch}" for loss in SWITCHED for switch in SWITCHES]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", names())
def test_the_gradient_is_that_of_the_whole_batch(results, name, setup):
    expected, done = results[0][SETUPS[setup][-1]][name], results[1][setup, 0][name]["gradients"]
    assert done.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert largest > 1e-4
    for parameter, gradient in expected.items():
        torch.testing.assert_close(done[parameter].double(), gradient, rtol=0, atol=5e-5 * largest)


def test_the_cases_are_what_they_are_for(results):
    """Micro-batches cut the batch, ranks have other rows, and each switch changes the gradient."""
    (expected, adapters), done = results[0].values(), results[1]
    assert expected.keys() == adapters.keys() == {*names()}
    assert not expected[names()[0]].keys() & adapters[names()[0]].keys()

    def micro_batches(name: str, setup: str, rank: int = 0) -> list[list[int]]:
        return done[setup, rank][name]["tokens"]

    assert len(micro_batches("vanilla, 1000", "1 rank")) == 1
    assert len(micro_batches(f"vanilla, {FEW}", "1 rank")) > 3
    both = [micro_batches("vanilla, 1000", "2 ranks", rank) for rank in range(2)]
    assert both[0] != both[1]
    assert sum(len(rows) for parts in both for rows in parts) == ROWS
    same = [micro_batches("vanilla, 1000", "2 ranks per sequence", rank) for rank in range(2)]
    assert same[0] == same[1] == micro_batches("vanilla, 1000", "1 rank")
    first = {name: next(iter(gradients.values())) for name, gradients in expected.items()}
    for loss in SWITCHED:
        for switch in SWITCHES:
            assert not torch.allclose(first[f"{loss}, {switch}"], first[f"{loss}, {FEW}"], rtol=1e-2)
