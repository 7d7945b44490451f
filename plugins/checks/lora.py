"""Checks of LoRA: what verl would reject after loading the models, or train wrongly without a message."""

from __future__ import annotations

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.run import MODE, MODEL, Run
from verl_turnkey.plugins.config.checkpoint_files import FSDP


def check_lora(run: Run) -> None:
    """Refuse adapters that verl would not build, train or generate with."""
    model, strategy = run.config.actor_rollout_ref.model, run.actor.strategy
    rank, path = model.get("lora_rank", 0), model.get("lora_adapter_path")
    of_megatron = model.get("lora") or {}
    megatron_rank = of_megatron.get("rank", 0)
    if strategy == "megatron" and rank and not megatron_rank:
        problem = f"{MODEL}.lora_rank={rank} is not read by Megatron, which would train the whole model without"
        refuse("lora-megatron", f"{problem} a reference policy of its own: set {MODEL}.lora.rank={rank}")
    # verl's trainer uses the actor without its adapter as the reference, and here the actor has no adapter.
    whole = "the whole model would be trained, with itself as the reference policy"
    if strategy in FSDP and not rank and megatron_rank:
        problem = f"{MODEL}.lora.rank={megatron_rank} is read only with Megatron; with FSDP {whole}"
        refuse("lora-rank-key", f"{problem}: set {MODEL}.lora_rank={megatron_rank}")
    if strategy in FSDP and not rank and path:
        problem = f"{MODEL}.lora_adapter_path={path} is read only with {MODEL}.lora_rank above 0; without it {whole}"
        refuse("lora-adapter-without-rank", f"{problem}: set the rank of that adapter")
    if rank and run.mode.endswith("separate_async") and not of_megatron.get("merge", False):
        problem = f"{MODEL}.lora_rank={rank} with {MODE}={run.mode}: verl never sends the adapter to separate servers"
        refuse("lora-trainer", f"{problem}: set {MODEL}.lora.merge=true")
    if run.use_critic and (rank := run.config.critic.model.get("lora_rank", 0)) and not _builds_critic():
        problem = f"critic.model.lora_rank={rank}: verl builds adapters only for generative models, and a critic of"
        refuse("lora-critic", f"{problem} this version of transformers is not one: set critic.model.lora_rank=0")


def _builds_critic() -> bool:
    """Whether peft can build verl's kind of adapter for a token classifier; it cannot since transformers 4.50."""
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "prepare_inputs_for_generation")
