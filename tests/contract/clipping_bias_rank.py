"""One rank of a training group: optimizer steps of st_ppo by verl's engine, their gradients written to a file.

python clipping_bias_rank.py RANK WORLD FOLDER      (FOLDER holds `model` and `cases.pt`)
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(TURNKEY_DEVICE="cpu", HF_HUB_OFFLINE="1", VERL_LOGGING_LEVEL="ERROR", TRANSFORMERS_VERBOSITY="error")

import torch
import torch.distributed as dist
import torch.distributed.fsdp._init_utils as fsdp_init
import verl  # noqa: F401 - loads the plugin
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from verl_turnkey.losses import losses
from verl_turnkey.plugins import loss

# FSDP1 refuses to broadcast the weights of a model on the CPU, which gloo can do.
fsdp_init._check_module_states_for_sync_module_states = lambda states: None

TRUE_FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def make_engine(model: Path, strategy: str) -> Any:
    model_config = HFModelConfig(
        path=str(model),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine_config = FSDPEngineConfig(
        strategy=strategy,
        model_dtype="fp32",
        dtype="float32",
        mixed_precision=TRUE_FP32,
        use_torch_compile=False,
        use_orig_params=True,
        use_dynamic_bsz=True,
    )
    engine = EngineRegistry.new(
        model_type="language_model",
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
    return {name: p.grad.full_tensor().detach().clone() for name, p in engine.module.named_parameters()}


def data_of(case: dict[str, Any], rank: int, world: int) -> Any:
    rows = range(rank, len(case["responses"]), world)

    def nested(columns: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([columns[i] for i in rows], layout=torch.jagged)

    prompts, responses = case["prompts"], case["responses"]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [
        torch.cat([torch.zeros_like(prompt), mask]) for prompt, mask in zip(prompts, case["response_mask"], strict=True)
    ]
    tensors = {
        name: nested(case[name]) for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
    }
    tensors |= {
        "input_ids": nested(whole),
        "position_ids": nested([torch.arange(len(row)) for row in whole]),
        "loss_mask": nested(masks),
    }
    settings = {
        "temperature": 1.0,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": case["max_tokens"],
        "use_remove_padding": False,
        "global_batch_size": len(responses),
        "pad_token_id": 0,
    }
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def main(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    spec = losses()["st_ppo"]
    results: dict[str, Any] = {}
    for strategy in ("fsdp2", "fsdp"):
        engine = make_engine(folder / "model", strategy)
        loss.configure(SimpleNamespace(actor=SimpleNamespace(engine=engine)), (), "st_ppo", spec.params())
        chosen = PolicyLossConfig(loss_mode="st_ppo")
        config = FSDPActorConfig(strategy=strategy, rollout_n=1, use_dynamic_bsz=True, policy_loss=chosen)
        for name, case in torch.load(folder / "cases.pt").items():
            taken: dict[str, torch.Tensor] = {}
            passes = []
            step, forward_backward = engine.optimizer_step, engine.forward_backward_batch

            def keep(taken: dict[str, torch.Tensor] = taken, step: Any = step, engine: Any = engine) -> Any:
                taken.update(gradients(engine))
                return step()

            def count(
                data: Any, *args: Any, passes: list[int] = passes, run: Any = forward_backward, **more: Any
            ) -> Any:
                passes.append(len(data))
                return run(data, *args, **more)

            engine.optimizer_step, engine.forward_backward_batch = keep, count
            with engine.train_mode():
                out = engine.train_batch(data_of(case, rank, world), loss_function=partial(ppo_loss, config=config))
            del engine.optimizer_step, engine.forward_backward_batch
            results[f"{strategy}/{name}"] = {"gradients": taken, "metrics": out["metrics"], "passes": passes}
    torch.save(results, folder / f"result{world}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
