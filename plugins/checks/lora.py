"""Checks of LoRA: what verl would reject after loading the models, or train wrongly without a message."""

from __future__ import annotations

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.run import Run
from verl_turnkey.plugins.config.checkpoint_files import FSDP


def check_lora(run: Run) -> None:
    """Refuse adapters that verl would not build, train or generate with."""
    model, strategy = run.config.actor_rollout_ref.model, run.actor.strategy
    rank, path = model.get("lora_rank", 0), model.get("lora_adapter_path")
    of_megatron = model.get("lora") or {}
    megatron_rank = of_megatron.get("rank", 0)
    if strategy == "megatron" and rank and not megatron_rank:
        refuse("lora-megatron", rank=rank)
    # verl's trainer uses the actor without its adapter as the reference, and here the actor has no adapter.
    if strategy in FSDP and not rank and megatron_rank:
        refuse("lora-rank-key", megatron_rank=megatron_rank)
    if strategy in FSDP and not rank and path:
        refuse("lora-adapter-without-rank", path=path)
    if rank and run.mode.endswith("separate_async") and not of_megatron.get("merge", False):
        refuse("lora-trainer", rank=rank, mode=run.mode)
    if run.use_critic and (rank := run.config.critic.model.get("lora_rank", 0)) and not _builds_critic():
        refuse("lora-critic", rank=rank)


def _builds_critic() -> bool:
    """Whether peft can build verl's kind of adapter for a token classifier; it cannot since transformers 4.50."""
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "prepare_inputs_for_generation")
