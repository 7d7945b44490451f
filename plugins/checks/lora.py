"""Driver checks of LoRA: what verl would reject after loading the models, or train wrongly without a message."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.checkpoint_files import FSDP

MODEL = "actor_rollout_ref.model"


def check_lora(config: DictConfig, mode: str, *, use_critic: bool) -> None:
    """Refuse adapters that verl would not build, train or generate with; ``mode``: ``trainer.v1.trainer_mode``.

    Raises:
        ConfigError: names the key to change.
    """
    model = config.actor_rollout_ref.model
    rank, path = model.get("lora_rank", 0), model.get("lora_adapter_path")
    of_megatron = model.get("lora") or {}
    if config.actor_rollout_ref.actor.strategy == "megatron" and rank and not of_megatron.get("rank", 0):
        refuse(
            "lora-megatron",
            f"{MODEL}.lora_rank={rank} is not read by Megatron, which would train the whole model, while the trainer "
            f"uses the actor without its adapter as the reference policy: set {MODEL}.lora.rank={rank}",
        )
    if config.actor_rollout_ref.actor.strategy in FSDP and not rank:
        # verl's trainer uses the actor without its adapter as the reference, and here the actor has no adapter.
        consequence = "the whole model would be trained, and the reference policy would be the actor itself: set"
        if megatron_rank := of_megatron.get("rank", 0):
            refuse(
                "lora-rank-key",
                f"{MODEL}.lora.rank={megatron_rank} is read only with Megatron; with FSDP {consequence} "
                f"{MODEL}.lora_rank={megatron_rank}",
            )
        if path:
            refuse(
                "lora-adapter-without-rank",
                f"{MODEL}.lora_adapter_path={path} is read only where {MODEL}.lora_rank is above 0; without it "
                f"{consequence} the rank of that adapter",
            )
    if rank and mode.endswith("separate_async") and not of_megatron.get("merge", False):
        refuse(
            "lora-trainer",
            f"{MODEL}.lora_rank={rank} with trainer.v1.trainer_mode={mode}: verl sends separate servers only the base "
            "weights, under names that they do not know, and never the adapter: set "
            f"{MODEL}.lora.merge=true",
        )
    if use_critic and (rank := config.critic.model.get("lora_rank", 0)) and not _builds_critic():
        refuse(
            "lora-critic",
            f"critic.model.lora_rank={rank}: verl builds adapters only for generative models, and with this version of "
            "transformers a critic is not one: set critic.model.lora_rank=0",
        )


def _builds_critic() -> bool:
    """Whether peft can build verl's kind of adapter for a token classifier; it cannot since transformers 4.50."""
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "prepare_inputs_for_generation")
