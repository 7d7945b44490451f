"""verl's FSDP2 engines in the setups of test_parallel_matrix.py: ranks, sequences spread over them, packed rows, LoRA.

python parallel_ranks.py FOLDER      (FOLDER holds `model`, `heads.pt`, `cases.pt` and `setups.json`)

verl is imported once, and every rank is a fork. Flash attention needs a GPU: its place is taken by an attention with
the same contract, verl's all-to-all around scaled dot products whose mask follows from the packed positions. With
``TURNKEY_DEVICE=cuda`` each rank is a process of its own on its GPU, and nothing is replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clipping_bias_rank import ON_GPU, data_of, gradients, make_engine

import torch  # isort: skip - the module above sets variables that verl reads when it is imported
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from transformers import AttentionInterface, AttentionMaskInterface
from verl.utils import ulysses
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, value_loss

from verl_turnkey.advantage.methods.hae import HEADS
from verl_turnkey.losses import losses
from verl_turnkey.plugins.actor import loss_inputs, weighing
from verl_turnkey.plugins.critic.worker import MODEL_TYPE, heads_loss, register_engine
from verl_turnkey.plugins.prm.worker import SHIFT, linear_loss, model_type, register
from verl_turnkey.plugins.register import configure

KINDS = {"critic": "value_model", "heads": MODEL_TYPE, **{kind: model_type(kind) for kind in SHIFT}}
"""verl's name of the engine of each scorer; all others are losses of the actor"""


def kind_of(case: dict[str, Any]) -> str:
    return KINDS.get(case["loss"], "language_model")


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


def loss_of_actor(engine: Any, case: dict[str, Any]) -> Any:
    """The loss as a run configures it."""
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
    return actor.loss_fn


def loss_of_scorer(case: dict[str, Any]) -> Any:
    if case["loss"] in SHIFT:
        return partial(linear_loss, shift=SHIFT[case["loss"]])
    config: Any = SimpleNamespace(cliprange_value=case["clip"], loss_agg_mode="token-mean", loss_scale_factor=None)
    if case["loss"] == "heads":
        return partial(heads_loss, config=config, heads=HEADS)
    critic = SimpleNamespace(loss_fn=partial(value_loss, config=config))
    critic.set_loss_fn = partial(setattr, critic, "loss_fn")
    if "weights" in case:
        weighing.weigh_critic(critic)
    return critic.loss_fn


def update(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """One optimizer step: its gradients, and the responses of each micro-batch. Of a scorer its outputs before, too."""
    is_scorer = case["loss"] in KINDS
    loss = loss_of_scorer(case) if is_scorer else loss_of_actor(engine, case)
    data = data_of(case, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
    taken: dict[str, Any] = {"responses": []}
    if is_scorer:
        with engine.eval_mode():
            outputs = engine.infer_batch(data.copy())["model_output"]
        taken["outputs"] = {name: [row.clone() for row in column.unbind()] for name, column in outputs.items()}
    step, forward = engine.optimizer_step, engine.forward_step

    def keep() -> Any:
        taken["gradients"] = gradients(engine)
        return step()

    def count(data: Any, *args: Any, **more: Any) -> Any:
        taken["responses"].append([response.tolist() for response in data["responses"].unbind()])
        return forward(data, *args, **more)

    engine.optimizer_step, engine.forward_step = keep, count
    try:
        with engine.train_mode():
            engine.train_batch(data, loss_function=loss)
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
            assign(weight, filled[name])
    return filled


def assign(parameter: Any, whole: torch.Tensor) -> None:
    """Give a sharded parameter its part of the ``whole``."""
    with torch.no_grad():
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def main(folder: Path, world: int, rank: int) -> None:
    torch.manual_seed(0)
    if ON_GPU:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    cases, heads = torch.load(folder / "cases.pt"), torch.load(folder / "heads.pt")
    for name, (ranks, spread, packed, lora, without) in json.loads((folder / "setups.json").read_text()).items():
        if ranks != world:
            continue
        results, here = {}, {case: settings for case, settings in cases.items() if settings["loss"] not in without}
        for kind in dict.fromkeys(map(kind_of, here.values())):
            engine = make_engine(folder / "model", "fsdp2", packed=packed, spread=spread, lora=lora, kind=kind)
            if lora:
                torch.save(fill_adapter(engine.module), folder / f"adapter {rank}.pt")
            for part, parameter in getattr(engine.module, "score", torch.nn.Module()).named_parameters():
                assign(parameter, heads[len(parameter)][part])
            of_kind = {case: settings for case, settings in here.items() if kind_of(settings) == kind}
            results |= {case: update(engine, {**settings, "packed": packed}) for case, settings in of_kind.items()}
        torch.save(results, folder / f"{name} {rank}.pt")
    dist.destroy_process_group()


def start(folder: str, world: int, rank: int) -> int:
    """Start a rank; returns its process."""
    if ON_GPU:  # a fork could not use CUDA
        return subprocess.Popen([sys.executable, __file__, folder, str(world), str(rank)]).pid
    if child := os.fork():
        return child
    try:
        main(Path(folder), world, rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    register_engine(HEADS, "fsdp2")
    for kind in SHIFT:
        register(kind, "fsdp2")
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
        sys.exit()
    if not ON_GPU:
        ulysses.all_to_all_tensor = all_to_all
        AttentionInterface.register("packed", attention)
        AttentionMaskInterface.register("packed", lambda *_, **__: None)
    children = [start(sys.argv[1], world, rank) for world, rank in ((1, 0), (2, 0), (2, 1))]
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:  # the other rank would wait for this one
            for other in children:
                os.kill(other, 9)
            sys.exit(1)
