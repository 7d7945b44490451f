"""Batches of whole episodes: how many optimizer steps an update takes, and which rows each of them sees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit.row_turns import token_counts
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.trainer import dealing
from verl_turnkey.plugins.trainer.micro_batches import forward_rows, update_rows
from verl_turnkey.plugins.verl_api import internals


class Dealt:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`."""

    config: DictConfig
    turnkey: TurnkeyConfig
    tokenizer: Any
    actor_rollout_wg: Any
    use_critic: bool
    use_reference_policy: bool
    global_steps: int
    local_trigger_step: int
    parameter_sync_step: int
    _in_phases: bool
    _groups: int | None
    _dp_size: int = 1
    _parts: int = 1
    """number of parts of the current batch; a mini-batch has one or several"""
    _mini_batch: np.ndarray | None = None
    """(B,) the actor's optimizer step that each row of the current batch is in"""
    _mask: tuple[list[str], torch.Tensor | None] = ([], None)
    """keys and response mask, jagged bool, of the batch that was dealt and has no advantages yet"""

    def _mini_batches(self, role: str) -> int:
        """Optimizer steps per batch and epoch: as many as verl takes with one row per rollout.

        Of a batch of which groups were left out, as many as verl would take for the groups that are left.
        """
        if self.turnkey.update.mini_batches is not None:
            return self.turnkey.update.mini_batches
        size = (self.config.critic if role == "critic" else self.config.actor_rollout_ref.actor).ppo_mini_batch_size
        whole = self.config.data.train_batch_size / self.parameter_sync_step
        return math.ceil((whole if self._groups is None else self._groups) / size)

    def _filled_mini_batches(self, role: str) -> int:
        """At most that many, so that each has an episode to train."""
        wanted = self._mini_batches(role)
        number = dealing.mini_batches(wanted, self._parts)
        if number < wanted:
            logger.warning(
                "step %d: too few episodes to train for %d mini-batches of whole episodes, the %s takes %d",
                *(self.global_steps, wanted, role, number),
            )
        return number

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", **_: Any
    ) -> KVBatchMeta:
        """Pads and orders the rows, and logs the metrics, as verl's method does, but keeps episodes whole.

        verl's pads to a multiple of ppo_mini_batch_size * n rows, balances the ranks over all rows of the batch, which
        takes seconds, and keeps each rank's rows in the order in which they arrived.
        """
        self._dp_size = ranks = internals.data_parallel_size(self.actor_rollout_wg)
        roles = ["critic"] if self.use_critic else []
        if self.config.trainer.critic_warmup <= self.global_steps and not self._in_phases:
            roles.append("actor")
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        mask = data.pop("response_mask").bool()
        trained = token_counts(mask)
        lengths = np.array([tag["seq_len"] for tag in batch.tags])
        seed = (self.global_steps, self.local_trigger_step)
        dealt = dealing.deal(batch.keys, lengths, trained, [self._mini_batches(role) for role in roles], seed)
        self._parts = len(dealt)

        micro = update_rows(self.config) if "actor" in roles else 1
        forward = forward_rows(self.config, self.use_reference_policy)
        multiple = math.lcm(micro, *(size // math.gcd(size, self._parts) for size in forward))
        share = dealing.rows_of_a_part(dealt, ranks, multiple)
        real = len(batch)
        if self._in_phases and len(dealt) * ranks * share < real + ranks - 1:
            share += multiple  # a phase may need a padding row for all ranks but one
        size = len(dealt) * ranks * share
        batch = upsample_batch_to_divisible_size(batch, size, self.tokenizer.eos_token_id)

        dealt = dealing.filled(dealt, ranks * share, range(real, size))
        lengths = np.array([tag["seq_len"] for tag in batch.tags])
        order = dealing.lay_out(dealt, calculate_workload(torch.from_numpy(lengths)).numpy(), ranks, micro)
        metrics.update(log_seqlen_unbalance(lengths.tolist(), order.reshape(ranks, -1).tolist(), logging_prefix))
        batch.reorder(order.tolist())
        rows = [*mask.unbind(), *[torch.zeros(1, dtype=torch.bool)] * (size - real)]  # verl's padding has one token
        self._mask = batch.keys, torch.nested.as_nested_tensor([rows[i] for i in order], layout=torch.jagged)

        number = dealing.mini_batches(self._mini_batches("actor"), self._parts) if "actor" in roles else 1
        part = np.tile(np.repeat(np.arange(self._parts), share), ranks)
        self._mini_batch = part * number // self._parts
        of_rank = lengths[order].reshape(ranks, number, -1).sum(2)
        of_rank = of_rank / of_rank.mean(0)
        held = np.bincount(self._mini_batch, weights=np.append(trained, np.zeros(size - real))[order])
        held /= max(held.mean(), 1)
        metrics.update(
            {
                "dealing/padding": (size - real) / size,
                "dealing/rank_tokens/min": float(of_rank.min()),
                "dealing/rank_tokens/max": float(of_rank.max()),
                "dealing/mini_batch_tokens/min": float(held.min()),
                "dealing/mini_batch_tokens/max": float(held.max()),
            }
        )
        return batch

    def _dealt_mask(self, batch: KVBatchMeta) -> dict[str, torch.Tensor]:
        """The response mask of the batch if it is the one that was dealt last, which is then forgotten."""
        (keys, mask), self._mask = self._mask, ([], None)
        return {} if mask is None or keys != batch.keys else {"response_mask": mask.long()}

    def _advantage_metrics(self, rows: Rows, advantage: np.ndarray) -> dict[str, float]:
        """The smallest and the largest mean advantage per token of a mini-batch."""
        if self._mini_batch is None:
            return {}
        of_step, tokens = self._mini_batch[rows.row], rows.steps.tokens
        total = np.bincount(of_step, weights=tokens)
        means = np.bincount(of_step, weights=advantage * tokens)[total > 0] / total[total > 0]
        if not len(means):
            return {}
        return {"dealing/advantage/min": float(means.min()), "dealing/advantage/max": float(means.max())}
