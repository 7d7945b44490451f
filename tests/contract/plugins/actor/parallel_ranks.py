"""verl's FSDP2 engine in the setups of test_parallel_matrix.py: ranks, sequences spread over them, packed rows, LoRA.

python parallel_ranks.py FOLDER      (FOLDER holds `model` and `cases.pt`)

verl is imported once, and every rank is a fork. Flash attention needs a GPU: its place is taken by an attention with
the same contract, verl's all-to-all around scaled dot products whose mask follows from the packed positions.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clipping_bias_rank import data_of, gradients, make_engine

import torch  # isort: skip - the module above sets variables that verl reads when it is imported
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from transformers import AttentionInterface, AttentionMaskInterface
from verl.utils import ulysses
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from verl_turnkey.losses import losses
from verl_turnkey.plugins.actor import loss_inputs, weighing
from verl_turnkey.plugins.register import configure


def all_to_all(local: Any, scatter_dim: int, gather_dim: int, group: Any = None, async_op: bool = False) -> Any:
    """verl's ``all_to_all_tensor``, by the one operation that gloo has."""
    group = ulysses.get_ulysses_sequence_parallel_group() if group is None else group
    parts = torch.tensor_split(local, dist.get_world_size(group), scatter_dim)
    sent = torch.stack([part.contiguous() for part in parts])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), dim=gather_dim).contiguous()


def attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, position_ids: Any = None, **_: Any
) -> tuple[Any, None]:
    """Query, key, value: (1, heads, tokens of this rank, width); a token sees those before it in its row."""
    parts = [part.transpose(1, 2) for part in (query, key, value)]
    if spread := ulysses.get_ulysses_sequence_parallel_world_size() > 1:
        parts = [ulysses.gather_seq_scatter_heads(part, seq_dim=1, head_dim=2) for part in parts]
        shards = [torch.empty_like(position_ids) for _ in range(ulysses.get_ulysses_sequence_parallel_world_size())]
        dist.all_gather(shards, position_ids.contiguous(), group=ulysses.get_ulysses_sequence_parallel_group())
        position_ids = torch.cat(shards, -1)
    row = (position_ids[0] == 0).cumsum(0)
    seen = (row[:, None] == row).tril()
    q, k, v = (part.transpose(1, 2) for part in parts)
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling).transpose(1, 2)
    return (ulysses.gather_heads_scatter_seq(out.contiguous(), head_dim=2, seq_dim=1) if spread else out), None


def update(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """One optimizer step as a run configures it; its gradients."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        entropy_coeff=case["entropy"],
        loss_agg_mode=case["mean"],
        policy_loss=PolicyLossConfig(loss_mode=case["loss"]),
    )
    actor = SimpleNamespace(engine=engine, loss_fn=partial(ppo_loss, config=config))
    actor.set_loss_fn = partial(setattr, actor, "loss_fn")
    worker = SimpleNamespace(actor=actor)
    vars(engine).pop("train_batch", None)  # where the loss before has taken hold of it
    if case["loss"] in losses():
        configure(worker, (), case["loss"], losses()[case["loss"]].params(**case["params"]))
    if "weights" in case:
        weighing.weigh_actor(worker)
    if "observed" in case:
        loss_inputs.learn_observations(worker, case["observation"])
    taken: dict[str, Any] = {"tokens": []}
    step, forward = engine.optimizer_step, engine.forward_step

    def keep() -> Any:
        taken["gradients"] = gradients(engine)
        return step()

    def count(data: Any, *args: Any, **more: Any) -> Any:
        taken["tokens"].append(data["responses"].offsets().diff().tolist())
        return forward(data, *args, **more)

    engine.optimizer_step, engine.forward_step = keep, count
    try:
        with engine.train_mode():
            data = data_of(case, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
            engine.train_batch(data, loss_function=actor.loss_fn)
    finally:
        del engine.optimizer_step, engine.forward_step
    return taken


def fill_adapter(module: Any) -> dict[str, torch.Tensor]:
    """Give each weight of an adapter, half of which begin at zero, values that follow from its name and place.

    Returns:
        The whole values by name.
    """
    filled = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            values = 0.2 * torch.cos(len(name) + torch.arange(weight.numel(), dtype=torch.float64))
            filled[name] = values.reshape(weight.shape).to(weight.dtype)
            with torch.no_grad():
                weight.copy_(distribute_tensor(filled[name], weight.device_mesh, weight.placements))
    return filled


def main(folder: Path, world: int, rank: int) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    cases = torch.load(folder / "cases.pt")
    for name, (ranks, spread, packed, lora) in json.loads((folder / "setups.json").read_text()).items():
        if ranks == world:
            engine = make_engine(folder / "model", "fsdp2", packed=packed, spread=spread, lora=lora)
            if lora:
                torch.save(fill_adapter(engine.module), folder / f"adapter {rank}.pt")
            results = {case: update(engine, {**settings, "packed": packed}) for case, settings in cases.items()}
            torch.save(results, folder / f"{name} {rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    ulysses.all_to_all_tensor = all_to_all
    AttentionInterface.register("packed", attention)
    AttentionMaskInterface.register("packed", lambda *_, **__: None)
    children = []
    for world, rank in ((1, 0), (2, 0), (2, 1)):
        if not (child := os.fork()):
            try:
                main(Path(sys.argv[1]), world, rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:  # the other rank would wait for this one
            for other in children:
                os.kill(other, 9)
            sys.exit(1)
