"""Micro-batches of a fixed size (``use_dynamic_bsz=false``): their sizes, which the rows of a rank must fill.

verl cuts the rows of a rank into micro-batches of equal size and raises an error if their number does not divide. The
number of rows varies with the episodes, so the batch is padded, with rows of two tokens that have no effect.
"""

from __future__ import annotations

from omegaconf import DictConfig


def update_rows(config: DictConfig) -> int:
    """Rows of a micro-batch of the actor's update; 1 if micro-batches are cut by tokens."""
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
