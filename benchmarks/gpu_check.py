"""Does a node with GPUs compute what the CPU does, and what does our part of a training step cost there?

    python benchmarks/gpu_check.py                          # everything; what the machine lacks is skipped
    python benchmarks/gpu_check.py --part gradients         # one part
    python benchmarks/gpu_check.py --stack                  # and 8 more training runs, which compare costs
    python benchmarks/gpu_check.py --device cpu --tiny      # tiny models, to try the script itself

- ``costs``: seconds and memory of an update with ``st_ppo`` against PPO's loss, with a row per step and a row per
  conversation, and our share of them.
- ``gradients``: those of our losses on the device, in float32 and bfloat16, against float64 on the CPU.
- ``sleep``: vLLM with CUDA graphs sleeps, wakes and generates the same as before.
- ``tensor-parallel``: vLLM on two GPUs gives the log-probabilities of vLLM on one.
- ``sequence-parallel``: verl's FSDP2 with flash attention gives float64's gradients, with each sequence on one rank
  and on two.
- ``smollm2``, ``preset-7b``: four training steps of SmolLM2, and of Qwen2.5-7B with a preset's settings.

The first two need torch and transformers only, with random weights; the others are in gpu_stack.py. Writes
runs/gpu_check/report.md, which you can attach to a bug report, and result.json; the exit status is 1 if a part failed.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import resource
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.losses import turn_ids
from verl_turnkey.losses.registry import TokenLoss, loss_spec, scales_gradient, token_loss
from verl_turnkey.plugins.config.machine import git, versions

ROOT = Path(__file__).parents[1]
LOSSES = ("vanilla", "s_ppo", "st_ppo", "turn_ratio")
ON_DEVICE, ON_STACK = ("costs", "gradients"), ("sleep", "tensor-parallel", "sequence-parallel", "smollm2", "preset-7b")
OFF = {"float32": 1e-3, "bfloat16": 0.2}
"""largest relative error of a gradient; an H100 had at most 8.2e-5 and 0.091, against float32 on the CPU"""
Table = list[dict[str, Any]]
Shape = dict[str, int]


@dataclass(frozen=True)
class Sizes:
    """Models by name, and the lengths of episodes."""

    models: dict[str, Shape]
    prompt: int
    answer: int
    turns: int
    episodes: int
    checked: int  # episodes whose gradients are compared
    tokens: int  # of a micro-batch
    groups: int  # of eight episodes, for the credit


def _shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 151_936
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


FULL = Sizes(
    {"0.5B": _shape(896, 4864, 24, 14, 2), "1.5B": _shape(1536, 8960, 28, 12, 2)},
    prompt=400, answer=60, turns=20, episodes=8, checked=1, tokens=8192, groups=16,
)  # fmt: skip
TINY = Sizes(
    {"tiny": _shape(64, 128, 2, 2, 1, vocabulary=300)},
    prompt=12, answer=5, turns=4, episodes=2, checked=1, tokens=256, groups=2,
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Rows of one layout: token ids, mask of the model's tokens, advantages, log-ratio to the old policy."""

    ids: Tensor
    mask: Tensor
    advantages: Tensor
    noise: Tensor

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.ids[rows], self.mask[rows], self.advantages[rows], self.noise[rows])

    def to(self, device: torch.device) -> Rows:
        return Rows(*(part.to(device) for part in (self.ids, self.mask, self.advantages, self.noise)))


def conversation(sizes: Sizes, episodes: int, vocabulary: int) -> Rows:
    """A row per episode: a prompt, then turns of the model and observations of the same length."""
    draw = torch.Generator().manual_seed(0)
    length = sizes.prompt + 2 * sizes.turns * sizes.answer
    own = (torch.arange(length) - sizes.prompt) // sizes.answer % 2 == 0
    own &= torch.arange(length) >= sizes.prompt
    return _rows(own.expand(episodes, -1), vocabulary, draw)


def per_step(sizes: Sizes, episodes: int, vocabulary: int) -> Rows:
    """A row per step, whose prompt is rendered anew with the last two turns."""
    draw = torch.Generator().manual_seed(0)
    length = sizes.prompt + 5 * sizes.answer
    own = torch.arange(length) >= length - sizes.answer
    return _rows(own.expand(episodes * sizes.turns, -1), vocabulary, draw)


def _rows(mask: Tensor, vocabulary: int, draw: torch.Generator) -> Rows:
    turn = turn_ids(mask).clamp(min=0)
    of_turn = torch.randn(len(mask), int(turn.max()) + 1, generator=draw)
    ids = torch.randint(vocabulary, mask.shape, generator=draw)
    noise = 0.3 * torch.randn(mask.shape, generator=draw) + 0.3 * torch.randn(of_turn.shape, generator=draw).gather(
        1, turn
    )
    return Rows(ids, mask.clone(), of_turn.gather(1, turn) * mask, noise * mask)


def log_probs(model: Any, ids: Tensor) -> Tensor:
    """(B, L): log-probability of each token given those before it; 0 for the first."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_prob = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return torch.nn.functional.pad(log_prob.view(len(ids), -1), (1, 0))


def term_of(name: str, log_prob: Tensor, old: Tensor, rows: Rows) -> TokenLoss:
    """The loss ``name`` per token; ``vanilla`` is PPO's."""
    if name == "vanilla":
        ratio = (log_prob - old).exp()
        surrogate = torch.minimum(ratio * rows.advantages, ratio.clamp(0.8, 1.2) * rows.advantages)
        return TokenLoss(-surrogate * rows.mask)
    spec = loss_spec(name)
    tensors = {"log_prob": log_prob, "old_log_prob": old, "advantages": rows.advantages, "response_mask": rows.mask}
    return token_loss(spec, spec.params(), **tensors, extra={}, finite=False)


def update(
    model: Any, rows: Rows, old: Tensor, name: str, micro: int, watch: Callable[[str], None]
) -> dict[str, float]:
    """Gradients of one mini-batch, with the second pass where the loss scales its gradient."""
    model.zero_grad(set_to_none=True)
    tokens, loss, clipped = rows.mask.sum(), 0.0, []
    parts = [slice(i, i + micro) for i in range(0, len(rows.ids), micro)]
    for part in parts:
        now = log_probs(model, rows[part].ids)
        watch("forward")
        term = term_of(name, now, old[part], rows[part])
        mean = term.loss.sum() / tokens
        watch("loss")
        mean.backward()
        watch("backward")
        loss += float(mean.detach())
        clipped.append(term.bias is not None and bool((term.bias != 0).any()))
    metrics = {"loss": loss, "norm": norm(model)}
    params = None if name == "vanilla" else loss_spec(name).params()
    if params is not None and scales_gradient(params):
        first = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        for part, again in zip(parts, clipped, strict=True):
            if again:
                term = term_of(name, log_probs(model, rows[part].ids), old[part], rows[part])
                (term.bias.sum() / tokens).backward()
        metrics["bias_norm"] = norm(model)
        scale = params.gradient_scale(metrics["bias_norm"])
        for p, gradient in zip(model.parameters(), first, strict=True):
            p.grad = gradient.mul_(scale)
        watch("second pass")
    return metrics


def cast(model: Any, kind: torch.dtype) -> Any:
    """Cast the parameters only: as with FSDP's mixed precision, rotary frequencies stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(kind)
    return model


def norm(model: Any) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def numerics(name: str, model: Any, sizes: Sizes, device: torch.device) -> Table:
    """Gradients on the device against those in float64 on the CPU."""
    model = model.cpu().double()
    rows = conversation(sizes, sizes.checked, model.config.vocab_size)
    with torch.no_grad():
        old = (log_probs(model, rows.ids) - rows.noise).float()
    table: Table = []
    quiet: Callable[[str], None] = lambda part: None  # noqa: E731
    for loss in LOSSES:
        expected = update(model, rows, old, loss, len(rows.ids), quiet)
        gradients = [p.grad.clone() for p in model.parameters()]
        for kind in (torch.float32, torch.bfloat16):
            there = cast(copy.deepcopy(model).to(device), kind)
            there.zero_grad(set_to_none=True)
            actual = update(there, rows.to(device), old.to(device), loss, len(rows.ids), quiet)
            off = sum(
                (p.grad.double().cpu() - g).square().sum().item()
                for p, g in zip(there.parameters(), gradients, strict=True)
            )
            size = sum(g.square().sum().item() for g in gradients)
            dtype, bias = str(kind).removeprefix("torch."), expected.get("bias_norm")
            table.append(
                {"model": name, "loss": loss, "dtype": dtype, "ok": (off / size) ** 0.5 < OFF[dtype]}
                | {"loss_cpu": expected["loss"], "loss_device": actual["loss"], "gradient_off": (off / size) ** 0.5}
                | {"second_cpu": bias, "second_device": actual.get("bias_norm")}
            )
            del there
        model.zero_grad(set_to_none=True)
    return table


class Watch:
    """Seconds by part; waits for the device at each mark."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device, self._last = device, time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def __call__(self, part: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    @property
    def gib(self) -> float:
        """Peak memory: of the device, or of this process so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def credit_seconds(sizes: Sizes) -> float:
    """``gigpo`` on groups of eight episodes, on the CPU, as in training."""
    draw = random.Random(0)
    count = sizes.groups * 8 * sizes.turns
    trajectory = [f"{i // sizes.turns:06d}" for i in range(count)]
    started = time.perf_counter()
    batch = StepBatch(
        group=[str(i // sizes.turns // 8) for i in range(count)],
        trajectory=trajectory,
        step=[i % sizes.turns for i in range(count)],
        reward=[float(i % sizes.turns == sizes.turns - 1 and draw.random() < 0.5) for i in range(count)],
        anchor=[f"state-{draw.randrange(60)}" for _ in range(count)],
    )
    assert np.isfinite(compute_credit("gigpo", batch).advantage).all()
    return time.perf_counter() - started


def costs(name: str, model: Any, sizes: Sizes, device: torch.device) -> Table:
    """Old log-probabilities and an update in bfloat16, by layout and loss."""
    model = cast(model, torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()
    credit = credit_seconds(sizes) * sizes.episodes / (8 * sizes.groups)
    table: Table = []
    for layout, make in (("conversation", conversation), ("row per step", per_step)):
        rows = make(sizes, sizes.episodes, model.config.vocab_size).to(device)
        micro = max(1, sizes.tokens // rows.ids.shape[1])
        for loss in ("vanilla", "vanilla", "st_ppo") if not table else ("vanilla", "st_ppo"):  # the first warms up
            watch = Watch(device)
            with torch.no_grad():
                parts = [log_probs(model, rows.ids[i : i + micro]) for i in range(0, len(rows.ids), micro)]
            old = torch.cat(parts) - rows.noise
            watch("old log-probs")
            update(model, rows, old, loss, micro, watch)
            parts_of = {"credit": credit, **watch.seconds}
            total = sum(parts_of.values())
            ours = credit + parts_of.get("second pass", 0.0) + (parts_of["loss"] if loss != "vanilla" else 0.0)
            table.append(
                {"model": name, "layout": layout, "loss": loss, "tokens": rows.ids.numel(), "seconds": total}
                | {"share": ours / total, "gib": watch.gib, "parts": parts_of}
            )
    model.zero_grad(set_to_none=True)
    return table[1:]


def markdown(table: Table) -> str:
    """A Markdown table of one dictionary per row; inner dictionaries become text."""

    def rendered(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {number:.3g}" for key, number in value.items())
        return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    head = [*dict.fromkeys(key for row in table for key in row)]
    lines = [head, ["---"] * len(head), *([rendered(row.get(key)) for key in head] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass
class Report:
    """What each part measured, or why it was skipped or failed; on the disk after each part."""

    out: Path
    facts: dict[str, Any]
    tables: dict[str, Table] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    """part -> passed, or failed or skipped with the reason"""

    def run(self, part: str, lacks: str | None, measure: Callable[[], Table]) -> None:
        """Run a part, unless the machine ``lacks`` something; an exception is recorded, and the next part runs."""
        if lacks:
            self.outcomes[part] = f"skipped: {lacks}"
        else:
            try:
                table = self.tables[part] = measure()
                wrong = [row for row in table if not row.get("ok", True)]
                self.outcomes[part] = f"failed: {len(wrong)} of {len(table)} rows are not ok" if wrong else "passed"
            except Exception as error:
                traceback.print_exc()
                reason = (str(error).strip().splitlines() or [""])[-1]
                self.outcomes[part] = f"failed: {type(error).__name__}: {reason}"
        print(f"\n{part}: {self.outcomes[part]}", flush=True)
        self.write()
        gc.collect()
        with suppress(RuntimeError):  # some errors of a GPU are raised by each later call, too
            torch.cuda.empty_cache()  # the next part may be another process on this GPU

    def write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.facts, "outcomes": self.outcomes, **self.tables}
        self.out.write_text(json.dumps(content, indent=1))
        facts = [f"- {name}: {value}" for name, value in self.facts.items()]
        outcomes = markdown([{"part": part, "outcome": outcome} for part, outcome in self.outcomes.items()])
        tables = [f"## {part}\n\n{markdown(table)}" for part, table in self.tables.items()]
        self.out.with_name("report.md").write_text(
            "\n\n".join(["# gpu_check", "\n".join(facts), outcomes, *tables]) + "\n"
        )


def main(
    device: Annotated[str, typer.Option(help="of torch")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="a model of 0.1 M and short episodes")] = False,
    part: Annotated[list[str] | None, typer.Option(help="only this part; may be repeated")] = None,
    stack: Annotated[bool, typer.Option("--stack", help="costs of whole training steps of verl as well")] = False,
    override: Annotated[list[str] | None, typer.Option(help="one more override of the launch lines")] = None,
    out: Annotated[Path, typer.Option(help="file for the numbers")] = ROOT / "runs" / "gpu_check" / "result.json",
) -> None:
    """Compare with the CPU, and measure."""
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU that torch sees; --device cpu --tiny tries the script", param_hint="--device")
    if unknown := {*(part or ())} - {*ON_DEVICE, *ON_STACK}:
        expected = ", ".join((*ON_DEVICE, *ON_STACK))
        raise typer.BadParameter(f"expected one of {expected}, got {min(unknown)}", param_hint="--part")
    from transformers import Qwen2Config, Qwen2ForCausalLM  # takes seconds

    sizes, where = (TINY if tiny else FULL), torch.device(device)
    what = torch.cuda.get_device_name() if where.type == "cuda" else device
    gpus = torch.cuda.device_count() if where.type == "cuda" else 0
    facts = {"device": what, "gpus": gpus, "cuda": torch.version.cuda, **versions(), "commit": git("rev-parse", "HEAD")}
    report = Report(out, facts)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)

    def of_models(measure: Callable[..., Table], shapes: dict[str, Shape]) -> Table:
        table: Table = []
        for name, shape in shapes.items():
            torch.manual_seed(0)
            with where:  # weights are drawn where it is fast
                model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True, attn_implementation="sdpa"))
            model.config.use_cache = False
            table += measure(name, model.float(), sizes, where)
            del model
        return table

    chosen = part or [*ON_DEVICE, *ON_STACK]
    first = dict([*sizes.models.items()][:1])  # in float64 on the CPU the others take an hour
    for name, measure, shapes in (("costs", costs, sizes.models), ("gradients", numerics, first)):
        if name in chosen:
            report.run(name, None, lambda measure=measure, shapes=shapes: of_models(measure, shapes))
    if stack or {*chosen} & {*ON_STACK}:
        import gpu_stack

        node = gpu_stack.Node(device, gpus, out.parent.resolve(), sizes, override or [])
        for name in (*(name for name in ON_STACK if name in chosen), *(["stack"] if stack else [])):
            report.run(name, node.lacks(name), lambda name=name: node.measure(name))
    print(f"\n{out.with_name('report.md')}")
    if any(outcome.startswith("failed") for outcome in report.outcomes.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
