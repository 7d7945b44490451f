"""The actor's update: verl's own, or several on parts of the batch; and the number of mini-batches of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins.actor import phases, updates, weighing
from verl_turnkey.plugins.config.training import UpdateConfig
from verl_turnkey.plugins.trainer.advantage_step import AdvantageStep
from verl_turnkey.plugins.trainer.batching import Batching
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta


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
            if role == "actor" and phases.compares_groups(self._step.loss):
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
        calls = phases.Calls(self.log_probs, partial(self._update_part, verls))
        common = (batch, self._step.steps(), self._batching.ranks, calls)
        if self._options.order == "reverse_turns":
            metrics |= phases.reverse_turns(*common, self._options, current)
        else:
            epochs = config.actor_rollout_ref.actor.ppo_epochs
            metrics |= phases.group_log_ratios(*common, self._batching.mini_batches("actor"), epochs, current)
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
