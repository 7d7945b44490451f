"""Batches of whole episodes: the optimizer steps of an update, which rows each of them sees, and the actor's update.

In verl the rows of a batch are in the order in which the rollouts finished, and every rank cuts its share into
mini-batches of equal numbers of rows in that order. With a row per step the first mini-batches would hold the short
episodes, many of which have the same outcome. Here whole episodes are dealt at random to *parts*, one or several of
which are a mini-batch, and the rows of each part to the ranks, with about equal work. Padding rows bring every part to
the same number of rows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

from verl_turnkey.plugins.actor import update_order, updates, weighing
from verl_turnkey.plugins.actor.update_order import compares_groups, even
from verl_turnkey.plugins.config.schema import loss_of
from verl_turnkey.plugins.config.training import UpdateConfig
from verl_turnkey.plugins.credit.rows import Rows, split_key, token_counts
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.trainer.groups import GroupSelection
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, partition_of

if TYPE_CHECKING:
    from verl_turnkey.plugins.trainer.advantage_step import AdvantageStep


def parts(requested: Iterable[int], played: int) -> int:
    """Number of parts of a batch for roles that take ``requested`` mini-batches; each part has an episode to train.

    ``played``: number of episodes with a token to train. If it suffices, the number of parts is a multiple of each of
    ``requested``; else the number up to ``played`` that gives the roles the largest share of their requests.
    """
    requested = list(requested)
    every = math.lcm(*requested)
    if every <= played:
        return every
    shares = {number: sum(mini_batches(most, number) / most for most in requested) for number in range(1, played + 1)}
    return max(shares, key=lambda number: shares[number], default=1)


def mini_batches(requested: int, parts: int) -> int:
    """The largest number of mini-batches, at most ``requested``, that divides the number of parts."""
    return next(number for number in range(min(requested, parts), 0, -1) if parts % number == 0)


def deal(
    keys: Sequence[str], lengths: np.ndarray, trained: np.ndarray, roles: Iterable[int], seed: Sequence[int]
) -> list[np.ndarray]:
    """The rows of each part, drawn with ``seed``, independently of the order of the rows.

    Episodes are dealt from the one with most rows down, those with equal numbers in random order. Each goes to the part
    with the fewest rows so far, and among those with equal numbers to the one with the fewest tokens. Parts then differ
    by at most the rows of one episode, and have about equal numbers of tokens. The order of the parts is random.

    Args:
        keys: keys of the rows, B.
        lengths: (B,) tokens of each row, prompt included.
        trained: (B,) tokens to train in each row. Episodes without any are dealt last.
        roles: ``requested`` of :func:`parts`.
        seed: seed of the random generator.
    """
    rng = np.random.default_rng(seed)
    by_key = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    number_of: dict[str, int] = {}
    codes = np.array([number_of.setdefault(split_key(keys[int(i)])[1], len(number_of)) for i in by_key.tolist()])
    episode = np.empty(len(keys), dtype=np.int64)
    episode[by_key] = rng.permutation(len(number_of))[codes]
    size = np.bincount(episode)
    tokens, idle = np.bincount(episode, weights=lengths), np.bincount(episode, weights=trained) == 0
    number = parts(roles, int((~idle).sum()))
    of_episode = np.empty(len(size), dtype=np.int64)
    fewest = [(0, 0.0, part) for part in range(number)]
    order = np.lexsort((-size, idle))  # ties stay in the drawn order
    for i, rows, episode_tokens in zip(order.tolist(), size[order].tolist(), tokens[order].tolist(), strict=True):
        count, total, part = fewest[0]
        of_episode[i] = part
        heapq.heapreplace(fewest, (count + rows, total + episode_tokens, part))
    of_row = of_episode[episode]
    drawn = by_key[rng.permutation(len(keys))]
    return [drawn[of_row[drawn] == part] for part in rng.permutation(number)]


def rows_of_a_part(dealt: Sequence[np.ndarray], ranks: int, multiple: int) -> int:
    """Rows of each part per rank, including padding: a multiple of ``multiple``."""
    return max(math.ceil(len(part) / (ranks * multiple)) for part in dealt) * multiple


def lay_out(dealt: Sequence[np.ndarray], weights: np.ndarray, ranks: int, micro: int) -> np.ndarray:
    """The order of a batch's rows: by rank, then by part, then by micro-batch, with about equal work in each.

    Args:
        dealt: the rows of each part, in equal numbers, which are a multiple of ``ranks * micro``.
        weights: work of each row.
        ranks: number of data-parallel ranks.
        micro: rows of a micro-batch; 1 leaves the order of a rank's rows as it is.
    """
    of_rank: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for part in dealt:
        of_row = even(weights[part], ranks)
        for rank, rank_rows in enumerate(of_rank):
            rows = part[of_row == rank]
            if micro > 1:
                rows = rows[even(weights[rows], len(rows) // micro).argsort(kind="stable")]
            rank_rows.append(rows)
    return np.concatenate([rows for rank_rows in of_rank for rows in rank_rows])


def filled(dealt: Sequence[np.ndarray], rows: int, padding: Iterable[int]) -> list[np.ndarray]:
    """Each part, filled up with padding rows to ``rows`` rows."""
    unused = iter(padding)
    return [np.concatenate([part, [next(unused) for _ in range(rows - len(part))]]).astype(np.int64) for part in dealt]


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
        number = mini_batches(requested, self.parts)
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
        dealt = deal(batch.keys, lengths, trained, [self.mini_batches(role) for role in roles], seed)
        self.parts = len(dealt)

        micro = update_rows(self._config) if "actor" in roles else 1
        forward = forward_rows(self._config, trainer.use_reference_policy)
        multiple = math.lcm(micro, *(size // math.gcd(size, self.parts) for size in forward))
        share = rows_of_a_part(dealt, ranks, multiple)
        real = len(batch)
        if self.in_phases and len(dealt) * ranks * share < real + ranks - 1:
            share += multiple  # a phase may need a padding row for all ranks but one
        size = len(dealt) * ranks * share
        batch = upsample_batch_to_divisible_size(batch, size, trainer.tokenizer.eos_token_id)

        dealt = filled(dealt, ranks * share, range(real, size))
        lengths = np.array([tag["seq_len"] for tag in batch.tags])
        order = lay_out(dealt, calculate_workload(torch.from_numpy(lengths)).numpy(), ranks, micro)
        metrics.update(log_seqlen_unbalance(lengths.tolist(), order.reshape(ranks, -1).tolist(), logging_prefix))
        batch.reorder(order.tolist())
        rows = [*mask.unbind(), *[torch.zeros(1, dtype=torch.bool)] * (size - real)]  # verl's padding has one token
        self.mask = batch.keys, torch.nested.as_nested_tensor([rows[i] for i in order], layout=torch.jagged)

        number = mini_batches(self.mini_batches("actor"), self.parts) if "actor" in roles else 1
        part = np.tile(np.repeat(np.arange(self.parts), share), ranks)
        self._mini_batch = part * number // self.parts
        rank_tokens = lengths[order].reshape(ranks, number, -1).sum(2)
        rank_tokens = rank_tokens / rank_tokens.mean(0)
        mini_batch_tokens = np.bincount(self._mini_batch, weights=np.append(trained, np.zeros(size - real))[order])
        mini_batch_tokens /= max(mini_batch_tokens.mean(), 1)
        metrics["dealing/padding"] = (size - real) / size
        for name, tokens in (("rank_tokens", rank_tokens), ("mini_batch_tokens", mini_batch_tokens)):
            metrics[f"dealing/{name}/min"] = float(tokens.min())
            metrics[f"dealing/{name}/max"] = float(tokens.max())
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


class ActorUpdate:
    """Updates the actor on the current batch."""

    def __init__(self, trainer: PPOTrainer, options: UpdateConfig, batching: Batching, step: AdvantageStep) -> None:
        self._trainer, self._options, self._batching, self._step = trainer, options, batching, step
        self._part_rows: int | None = None
        """rows of the current part, without padding; None: the whole batch"""

    def before_call(self, method: str, batch: KVBatchMeta) -> None:
        """Called before each worker call: sets the number of mini-batches of an update."""
        if method in ("update_actor", "train_mini_batch"):
            role = "actor" if method == "update_actor" else "critic"
            in_phases = role == "actor" and self._batching.in_phases
            number = 1 if in_phases else self._batching.filled_mini_batches(role)
            extra_info = batch.extra_info = batch.extra_info or {}
            if role == "actor" and update_order.compares_groups(self._step.loss):
                extra_info["epochs"] = 1  # each epoch is a phase of its own
            # A mini_batch_size left behind by the critic's update would win over num_mini_batch.
            extra_info.pop("mini_batch_size", None)
            extra_info |= {"num_mini_batch": number, weighing.MINI_BATCHES: number}
            extra_info[updates.STEP] = self._trainer.global_steps
            # The sequence-mean losses divide by it: only real rows, neither padding nor failed episodes.
            rows = self._step.real_rows if self._part_rows is None else self._part_rows
            extra_info["global_batch_size"] = max(1, rows) / number

    def run(self, batch: KVBatchMeta, metrics: dict[str, Any], verls: Callable[..., Any]) -> KVBatchMeta:
        """verl's own update, or several on parts of the batch."""
        if not self._batching.in_phases:
            return verls(batch, metrics)
        config = self._trainer.config
        # verl's separate_async makes several updates with log-probabilities from before the first one.
        bypass = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")
        current = not bypass and self._trainer.local_trigger_step == 0
        calls = update_order.Calls(self.log_probs, partial(self._update_part, verls))
        common = (batch, self._step.steps(), self._batching.ranks, calls)
        if self._options.order == "reverse_turns":
            metrics |= update_order.reverse_turns(*common, self._options, current)
        else:
            epochs = config.actor_rollout_ref.actor.ppo_epochs
            metrics |= update_order.group_log_ratios(*common, self._batching.mini_batches("actor"), epochs, current)
        return batch

    def log_probs(self, part: KVBatchMeta) -> None:
        """The actor's forward pass over the rows of ``part``; writes ``log_probs`` to the queue."""
        temperature = self._trainer.config.actor_rollout_ref.rollout.temperature
        settings = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        part.extra_info = (part.extra_info or {}) | settings
        self._trainer.actor_rollout_wg.compute_log_prob(part)

    def _update_part(self, verls: Callable[..., Any], part: KVBatchMeta, real_rows: int) -> dict[str, Any]:
        self._part_rows = real_rows
        metrics: dict[str, Any] = {}
        verls(part, metrics)
        self._part_rows = None
        return metrics
