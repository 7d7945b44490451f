"""Micro-batches of a fixed size (``use_dynamic_bsz=false``): their sizes, and how many rows they ask of each rank.

verl cuts the rows of a rank into micro-batches of equal size and stops when they do not divide. A batch of episodes has
as many rows as it has, so the batch is padded to fit, with rows of two tokens that count nowhere.
"""

from __future__ import annotations

from omegaconf import DictConfig


def update_rows(config: DictConfig) -> int:
    """Rows of a micro-batch of the actor's update; 1: they are cut by tokens, or none is needed."""
    actor = config.actor_rollout_ref.actor
    return 1 if actor.use_dynamic_bsz else int(actor.ppo_micro_batch_size_per_gpu)


def forward_rows(config: DictConfig, use_reference_policy: bool) -> list[int]:
    """Rows of a micro-batch of each forward pass with a fixed size: log-probabilities of the actor, of the reference.

    The critic has none: verl cuts its rows by tokens whatever ``critic.use_dynamic_bsz`` says.
    """
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    sizes = [] if rollout.log_prob_use_dynamic_bsz else [int(rollout.log_prob_micro_batch_size_per_gpu)]
    if use_reference_policy and not ref.log_prob_use_dynamic_bsz:
        sizes.append(int(ref.log_prob_micro_batch_size_per_gpu))
    return sizes
