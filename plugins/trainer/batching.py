"""Batches of whole episodes: how many optimizer steps an update takes, and which rows each of them sees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

from verl_turnkey.plugins.actor.phases import compares_groups
from verl_turnkey.plugins.config.schema import loss_of
from verl_turnkey.plugins.config.training import UpdateConfig
from verl_turnkey.plugins.credit.row_turns import token_counts
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.trainer import partitioning
from verl_turnkey.plugins.trainer.group_selection import GroupSelection
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, partition_of


class Batching:
    """The mini-batches of the current batch."""

    def __init__(self, trainer: PPOTrainer, update: UpdateConfig, selection: GroupSelection) -> None:
        self._trainer, self._config = trainer, trainer.config
        self._update, self._selection = update, selection
        self.in_phases = update.order == "reverse_turns" or compares_groups(loss_of(trainer.config))
        """whether the actor's update cuts the batch into mini-batches itself"""
        self.ranks = 1
        """number of data-parallel ranks of the actor"""
        self.parts = 1
        """number of parts of the current batch; a mini-batch has one or several"""
        self._mini_batch: np.ndarray | None = None
        """(B,) the actor's optimizer step of each row of the current batch"""
        self.mask: tuple[list[str], torch.Tensor | None] = ([], None)
        """keys and response mask, jagged bool, of the latest batch, until its advantages are computed"""

    def mini_batches(self, role: str) -> int:
        """Optimizer steps per batch and epoch: as many as verl takes with one row per rollout.

        With dropped groups, as many as verl takes for the kept ones.
        """
        if self._update.mini_batches is not None:
            return self._update.mini_batches
        size = (self._config.critic if role == "critic" else self._config.actor_rollout_ref.actor).ppo_mini_batch_size
        groups = self._config.data.train_batch_size / self._trainer.parameter_sync_step
        return math.ceil((groups if self._selection.groups is None else self._selection.groups) / size)

    def filled_mini_batches(self, role: str) -> int:
        """At most :meth:`mini_batches`, so that each has an episode to train."""
        requested = self.mini_batches(role)
        number = partitioning.mini_batches(requested, self.parts)
        if number < requested:
            logger.warning(
                "step %d: too few episodes to train for %d mini-batches of whole episodes, the %s takes %d",
                *(self._trainer.global_steps, requested, role, number),
            )
        return number

    def balance(
        self, batch: KVBatchMeta, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", **_: Any
    ) -> KVBatchMeta:
        """Pad and order the rows and log the metrics like verl's method, but keep episodes whole.

        verl's pads to a multiple of ppo_mini_batch_size * n rows, balances the ranks over all rows of the batch, which
        takes seconds, and keeps each rank's rows in the order in which they arrived.
        """
        trainer = self._trainer
        self.ranks = ranks = internals.data_parallel_size(trainer.actor_rollout_wg)
        roles = ["critic"] if trainer.use_critic else []
        if self._config.trainer.critic_warmup <= trainer.global_steps and not self.in_phases:
            roles.append("actor")
        mask = partition_of(batch).read(batch.keys, ["response_mask"])["response_mask"].bool()
        trained = token_counts(mask)
        lengths = np.array([tag["seq_len"] for tag in batch.tags])
        seed = (trainer.global_steps, trainer.local_trigger_step)
        dealt = partitioning.deal(batch.keys, lengths, trained, [self.mini_batches(role) for role in roles], seed)
        self.parts = len(dealt)

        micro = update_rows(self._config) if "actor" in roles else 1
        forward = forward_rows(self._config, trainer.use_reference_policy)
        multiple = math.lcm(micro, *(size // math.gcd(size, self.parts) for size in forward))
        share = partitioning.rows_of_a_part(dealt, ranks, multiple)
        real = len(batch)
        if self.in_phases and len(dealt) * ranks * share < real + ranks - 1:
            share += multiple  # a phase may need a padding row for all ranks but one
        size = len(dealt) * ranks * share
        batch = upsample_batch_to_divisible_size(batch, size, trainer.tokenizer.eos_token_id)

        dealt = partitioning.filled(dealt, ranks * share, range(real, size))
        lengths = np.array([tag["seq_len"] for tag in batch.tags])
        order = partitioning.lay_out(dealt, calculate_workload(torch.from_numpy(lengths)).numpy(), ranks, micro)
        metrics.update(log_seqlen_unbalance(lengths.tolist(), order.reshape(ranks, -1).tolist(), logging_prefix))
        batch.reorder(order.tolist())
        rows = [*mask.unbind(), *[torch.zeros(1, dtype=torch.bool)] * (size - real)]  # verl's padding has one token
        self.mask = batch.keys, torch.nested.as_nested_tensor([rows[i] for i in order], layout=torch.jagged)

        number = partitioning.mini_batches(self.mini_batches("actor"), self.parts) if "actor" in roles else 1
        part = np.tile(np.repeat(np.arange(self.parts), share), ranks)
        self._mini_batch = part * number // self.parts
        rank_tokens = lengths[order].reshape(ranks, number, -1).sum(2)
        rank_tokens = rank_tokens / rank_tokens.mean(0)
        mini_batch_tokens = np.bincount(self._mini_batch, weights=np.append(trained, np.zeros(size - real))[order])
        mini_batch_tokens /= max(mini_batch_tokens.mean(), 1)
        metrics.update(
            {
                "dealing/padding": (size - real) / size,
                "dealing/rank_tokens/min": float(rank_tokens.min()),
                "dealing/rank_tokens/max": float(rank_tokens.max()),
                "dealing/mini_batch_tokens/min": float(mini_batch_tokens.min()),
                "dealing/mini_batch_tokens/max": float(mini_batch_tokens.max()),
            }
        )
        return batch

    def dealt_mask(self, batch: KVBatchMeta) -> dict[str, torch.Tensor]:
        """The response mask of the batch if it is the latest one; the mask is then dropped."""
        (keys, mask), self.mask = self.mask, ([], None)
        return {} if mask is None or keys != batch.keys else {"response_mask": mask.long()}

    def advantage_metrics(self, rows: Rows, advantage: np.ndarray) -> dict[str, float]:
        """The smallest and the largest mean advantage per token of a mini-batch."""
        if self._mini_batch is None:
            return {}
        of_step, tokens = self._mini_batch[rows.row], rows.steps.tokens
        total = np.bincount(of_step, weights=tokens)
        means = np.bincount(of_step, weights=advantage * tokens)[total > 0] / total[total > 0]
        if not len(means):
            return {}
        return {"dealing/advantage/min": float(means.min()), "dealing/advantage/max": float(means.max())}


# With ``use_dynamic_bsz=false`` verl cuts the rows of a rank into micro-batches of equal size, which must divide them.


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
