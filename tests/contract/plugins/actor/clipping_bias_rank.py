"""One rank of a training group: optimizer steps of st_ppo or s_ppo by verl's engine, their gradients in a file.

python clipping_bias_rank.py RANK WORLD FOLDER      (FOLDER holds `model` and `cases.pt`)
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(TURNKEY_DEVICE=os.environ.get("TURNKEY_DEVICE", "cpu"), HF_HUB_OFFLINE="1")
os.environ.update(VERL_LOGGING_LEVEL="ERROR", TRANSFORMERS_VERBOSITY="error")

import torch
import torch.distributed as dist
import torch.distributed.fsdp._init_utils as fsdp_init
import verl  # noqa: F401 - loads the plugin
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from verl_turnkey.losses import LossInputs, TokenLoss, losses, register_loss
from verl_turnkey.losses.registry import WEIGHT_SHARE
from verl_turnkey.losses.st_ppo import StPpoParams, s_ppo
from verl_turnkey.plugins.actor import weighing
from verl_turnkey.plugins.actor.loss_inputs import queue_name
from verl_turnkey.plugins.credit.metrics import LEARNED
from verl_turnkey.plugins.register import configure

# FSDP1 refuses to broadcast the weights of a model on the CPU, which gloo can do.
fsdp_init._check_module_states_for_sync_module_states = lambda states: None


def every_other(inputs: LossInputs, params: StPpoParams) -> torch.Tensor:
    return inputs.mask * (1 + torch.arange(inputs.mask.shape[1]) % 2)


@register_loss("weighed", params=StPpoParams, weight=every_other)
def weighed(inputs: LossInputs, params: StPpoParams) -> TokenLoss:
    """s_ppo with weights: those of a user's loss that has both a bias and a mean of its own."""
    term = s_ppo(inputs, params)
    assert term.bias is not None
    return replace(term, loss=inputs.weight * term.loss, bias=inputs.weight * term.bias)


ON_GPU = os.environ["TURNKEY_DEVICE"] == "cuda"
"""with NCCL, flash attention and bfloat16, which benchmarks/gpu_check.py tries"""
WIDTH = "bf16" if ON_GPU else "fp32"
PRECISION = {"param_dtype": WIDTH, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
PACKED = "flash_attention_2" if ON_GPU else "packed"
"""attention over packed rows"""


def make_engine(
    model: Path, strategy: str, packed: bool = False, spread: int = 1, lora: int = 0, kind: str = "language_model"
) -> Any:
    model_config = HFModelConfig(
        model_type=kind,
        lora_rank=lora,
        lora_alpha=2 * lora,
        path=str(model),
        use_remove_padding=packed,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": PACKED if packed else "sdpa"},
    )
    engine_config = FSDPEngineConfig(
        strategy=strategy,
        model_dtype="fp32",
        dtype="bfloat16" if ON_GPU else "float32",
        mixed_precision=PRECISION,
        use_torch_compile=False,
        use_orig_params=True,
        use_dynamic_bsz=True,
        ulysses_sequence_parallel_size=spread,
    )
    engine = EngineRegistry.new(
        model_type=kind,
        backend=strategy,
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10),
        checkpoint_config=None,
    )
    engine.initialize()
    return engine


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Whole gradients by parameter name, on every rank."""
    if isinstance(engine.module, FSDP):
        with FSDP.summon_full_params(engine.module, with_grads=True):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.grad.detach().clone()
                for name, p in engine.module.named_parameters()
            }
    trained = ((name, p) for name, p in engine.module.named_parameters() if p.requires_grad)
    return {name: p.grad.full_tensor().detach().cpu().clone() for name, p in trained}


def data_of(case: dict[str, Any], rank: int, world: int) -> Any:
    rows = range(rank, len(case["responses"]), world)

    def nested(columns: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([columns[i] for i in rows], layout=torch.jagged)

    prompts, responses = case["prompts"], case["responses"]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    columns = ("prompts", "responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights")
    tensors = {name: nested(case[name]) for name in columns if name in case}
    if "weight_share" in case:
        tensors[queue_name(WEIGHT_SHARE)] = torch.full((len(rows),), case["weight_share"])
    for name, column in case.get("columns", {}).items():
        tensors[queue_name(name)] = column[rows] if isinstance(column, torch.Tensor) else nested(column)
    tensors |= {
        "input_ids": nested(whole),
        "position_ids": nested([torch.arange(len(row)) for row in whole]),
        "loss_mask": nested(case["response_mask"]),
    }
    if "weights" in case:
        tensors[weighing.COLUMN] = nested(case["weights"])
    if "observed" in case:
        tensors[LEARNED] = nested(case["observed"])
    tensors |= {name: nested(column) for name, column in case.get("fields", {}).items()}
    settings = {
        "temperature": 1.0,
        "use_dynamic_bsz": "max_tokens" in case,
        "max_token_len_per_gpu": case.get("max_tokens"),
        "micro_batch_size_per_gpu": case.get("micro_batch_size"),
        "use_remove_padding": case.get("packed", False),
        "calculate_entropy": "entropy" in case,
        "global_batch_size": len(responses),
        "pad_token_id": 0,
        weighing.MINI_BATCHES: 3,
    }
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def main(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for strategy in ("fsdp2", "fsdp"):
        engine = make_engine(folder / "model", strategy)
        stepped: list[bool] = []
        engine.optimizer.register_step_post_hook(lambda *_, stepped=stepped: stepped.append(True))
        for name, case in torch.load(folder / "cases.pt").items():
            chosen = PolicyLossConfig(loss_mode=case["loss"])
            config = FSDPActorConfig(strategy=strategy, rollout_n=1, use_dynamic_bsz=True, policy_loss=chosen)
            actor = SimpleNamespace(engine=engine, loss_fn=partial(ppo_loss, config=config))
            actor.set_loss_fn = partial(setattr, actor, "loss_fn")
            params = losses()[case["loss"]].params(**case["params"])
            configure(SimpleNamespace(actor=actor), (), case["loss"], params)
            if "weights" in case:
                weighing.weigh_actor(SimpleNamespace(actor=actor))
            taken: dict[str, torch.Tensor] = {}
            passes: list[list[int]] = []  # rows of each micro-batch
            step, forward_backward, forward = engine.optimizer_step, engine.forward_backward_batch, engine.forward_step

            def keep(taken: dict[str, torch.Tensor] = taken, step: Any = step, engine: Any = engine) -> Any:
                taken.update(gradients(engine))
                return step()

            def begin(*args: Any, passes: list[list[int]] = passes, run: Any = forward_backward, **more: Any) -> Any:
                passes.append([])
                return run(*args, **more)

            def count(data: Any, *args: Any, passes: list[list[int]] = passes, run: Any = forward, **more: Any) -> Any:
                passes[-1].append(len(data))
                return run(data, *args, **more)

            engine.optimizer_step, engine.forward_backward_batch, engine.forward_step = keep, begin, count
            stepped.clear()
            with engine.train_mode():
                out = engine.train_batch(data_of(case, rank, world), loss_function=actor.loss_fn)
            del engine.optimizer_step, engine.forward_backward_batch, engine.forward_step
            done = {"gradients": taken, "metrics": out["metrics"], "passes": passes, "stepped": bool(stepped)}
            results[f"{strategy}/{name}"] = done
    torch.save(results, folder / f"result{world}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
