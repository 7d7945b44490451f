"""verl's advantage step with the credit of steps, and the columns that it adds to the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses.registry import TEACHER, weighs
from verl_turnkey.plugins.actor import importance, loss_inputs, observations, weighing
from verl_turnkey.plugins.checks.files import training_loops
from verl_turnkey.plugins.config import schema
from verl_turnkey.plugins.config.checkpoint_files import remembering
from verl_turnkey.plugins.config.scorers import SCORE
from verl_turnkey.plugins.credit import supplied
from verl_turnkey.plugins.credit.estimator import CreditStep, credit_step
from verl_turnkey.plugins.credit.extra_fields import FIELDS as EXTRA_FIELDS
from verl_turnkey.plugins.credit.extra_fields import pop_extra_fields
from verl_turnkey.plugins.credit.heads import VALUES, target_columns, value_field
from verl_turnkey.plugins.credit.metrics import OF_EPISODES
from verl_turnkey.plugins.credit.row_turns import split_key, token_counts
from verl_turnkey.plugins.credit.rows import Rows, failure
from verl_turnkey.plugins.credit.unrecorded import listed_per_turn
from verl_turnkey.plugins.trainer.batching import Batching
from verl_turnkey.plugins.trainer.logging import TrainingLog
from verl_turnkey.plugins.trainer.outcomes import warn_of_other_outcomes
from verl_turnkey.plugins.verl_api.in_memory import InMemory
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS
from verl_turnkey.plugins.verl_api.played_rows import advantages_of, penalties_of
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, OneTrip

#: verl's estimators that compare a row with the others of its group.
OF_GROUPS = (
    *("grpo", "grpo_passk", "grpo_vectorized", "gpg", "opo"),
    *("reinforce_plus_plus_baseline", "rloo", "rloo_vectorized"),
)


class AdvantageStep:
    """The method and the loss of a run, the method's state, and the steps of the current batch."""

    def __init__(self, trainer: PPOTrainer, batching: Batching, log: TrainingLog) -> None:
        self._trainer, self._config, self._batching, self._log = trainer, trainer.config, batching, log
        turnkey = schema.turnkey_config(self._config)
        self._update = turnkey.update
        self._scored = turnkey.prm.use if turnkey.prm.kind else "column"
        self.estimator, self.loss = schema.estimator_of(self._config), schema.loss_of(self._config)
        self.params = schema.credit_params(self._config, turnkey)
        self.loss_params = schema.loss_params(self._config, turnkey)
        self.modify = schema.credit_modify(self._config, turnkey)
        self._columns = () if self.estimator is None else self.estimator.columns(self.params, self.modify)
        self.heads = () if self.estimator is None or not trainer.use_critic else self.estimator.heads(self.params)
        """the critic's heads that the method reads; none: the critic is verl's"""
        self.remembering = remembering(self.estimator, self.params, self.modify)
        """names of the estimator and the modifiers that keep state from batch to batch"""
        self._foreign_loops = not training_loops(self._config) <= {*AGENT_LOOPS}  # their records come from elsewhere
        self.state: Mapping[str, float] = {}
        """``Credit.state`` of the newest batch, with which the next one begins"""
        self.table: Rows | None = None
        self.untaught: torch.Tensor | None = None
        """:attr:`.CreditStep.untaught` of the current batch"""
        self.real_rows = 0
        """rows of played episodes in the current batch"""
        self.updates: list[dict[str, float]] = []
        """metrics of the updates of this step"""

    def compute(self, batch: KVBatchMeta, metrics: dict[str, Any], verls: Callable[..., Any]) -> KVBatchMeta:
        """verl's own advantage step and ours, on rows of the queue: our columns are read and written with verl's."""
        trip = OneTrip(batch, self.fields(), self._groups_of(batch) | self._batching.dealt_mask(batch))
        self.of_rows(trip, metrics, lambda: verls(batch, metrics))
        return trip.put()

    def of_rows(self, rows: OneTrip | InMemory, metrics: dict[str, Any], verls: Callable[[], Any]) -> None:
        """verl's advantage step ``verls`` inside a :class:`CreditStep` that holds the records of ``rows``.

        ``rows``: with :meth:`fields`; afterwards it has all columns to write.
        """
        data, extra_fields = rows.data, pop_extra_fields(rows.data)
        mask = data["response_mask"]
        has_tokens = (token_counts(mask) > 0).tolist()
        real = [i for i, tag in enumerate(rows.tags) if not tag.get("is_padding", False)]
        played = [i for i in real if failure(extra_fields[i], has_tokens[i]) is None]
        self.real_rows = len(played)
        step = CreditStep(
            params=self.params,
            scored=self._scored,
            modify=self.modify,
            training_step=self._trainer.global_steps,
            keys=rows.keys,
            tags=rows.tags,
            extra_fields=extra_fields,
            response_mask=mask,
            scores=data.get("rm_scores", None) if self._config.algorithm.use_kl_in_reward else None,
            values=data.get("values", None),
            heads=self.heads,
            lists=listed_per_turn(self._config.actor_rollout_ref.rollout),
            data=data,
            state=self.state,
        )
        compared = None if self.estimator is not None else self._compared(rows.keys, real, played)
        with credit_step(step), penalties_of(len(played)), advantages_of(compared), rows.for_verl():
            verls()
        if step.rows is None and step.has_records:
            step.read()
        self.state = step.state
        weights, step_metrics = importance.columns(self._update, mask, rows.now, step.rows)
        rows.written |= weights
        metrics |= step.metrics | step_metrics
        learned, step_metrics = observations.columns(
            self._update.observation_coefficient, extra_fields, rows.tags, mask
        )
        rows.written |= learned
        metrics |= step_metrics
        self.updates.append({name: metrics[name] for name in metrics if name.startswith(OF_EPISODES)})
        self.table, self.untaught = step.rows, step.untaught
        if self._foreign_loops and step.rows is not None and step.rows.recorded:
            warn_of_other_outcomes(step.rows, data["rm_scores"])
        if step.rows is not None and step.credit is not None:
            metrics.update(self._batching.advantage_metrics(step.rows, step.credit.advantage))
        now = rows.now
        rows.written |= self._log.credit(step, now)
        rows.written |= weighing.columns(rows.keys, self._update.weight_by, mask, now, step.rows)
        rows.written |= self._loss_columns(rows.tags, step, now)
        if self.heads and step.rows is not None and step.credit is not None:
            turns, extra = step.rows.turns, step.rows.steps.extra
            rows.written |= target_columns(self.heads, step.credit, turns, extra, now["response_mask"])

    def steps(self) -> Rows:
        """The table of steps of the current batch.

        Raises:
            ConfigError: its rows have no records.
        """
        if self.table is None:
            raise ConfigError(
                f"algorithm.adv_estimator={self._config.algorithm.adv_estimator} on rows without records: the policy "
                "loss or turnkey.update.order asks for the steps of each episode, so take an estimator of this package "
                "or an agent loop that writes records (turnkey_env)"
            )
        return self.table

    def _compared(self, keys: Sequence[str], real: list[int], played: list[int]) -> list[int]:
        """The rows that verl's estimator computes advantages of; all others get 0.

        Only rows of played episodes. If failures left a single episode of a group, an estimator that compares within
        the group has nothing to compare: verl would use the bare score as the advantage, or stop (``grpo_passk``).
        """
        if self._config.algorithm.adv_estimator not in OF_GROUPS:
            return played
        group_of = [split_key(key)[0] for key in keys]
        episodes = Counter(group for group, _ in {split_key(keys[i])[:2] for i in played})
        without_group = {group_of[i] for i in {*real} - {*played} if episodes[group_of[i]] == 1}
        return [i for i in played if group_of[i] not in without_group]

    def fields(self) -> list[str]:
        """The fields of the rows that this step reads."""
        fields = [*EXTRA_FIELDS, "response_mask", *supplied.fields(self._columns)]
        if self._config.algorithm.use_kl_in_reward or self.estimator is None or self._foreign_loops:
            fields.append("rm_scores")
        if self._trainer.use_critic:
            fields += [VALUES, *(value_field(self.heads, head) for head in self.heads[1:])]
        if self._log.tables is not None:
            fields += ["ref_log_prob", *supplied.GAP.fields]
        if self._scored != "column":
            fields.append(SCORE)
        if self.loss is not None and weighs(self.loss, self.loss_params):
            fields += ["old_log_probs", *(name for name in TEACHER if name in self.loss.needs)]
        if self._update.importance is not None:
            fields += importance.FIELDS
        return fields

    def _groups_of(self, batch: KVBatchMeta) -> dict[str, torch.Tensor]:
        """With an estimator of ours, a number for each row's group instead of verl's ``uid``.

        verl takes seconds to unpack 100,000 texts, and only passes them to the estimator; ours reads the keys.
        """
        if self.estimator is None:
            return {}
        numbers: dict[str, int] = {}
        uid = [numbers.setdefault(split_key(key)[0], len(numbers)) for key in batch.keys]
        return {"uid": torch.tensor(uid)}

    def _loss_columns(
        self, tags: Sequence[Mapping[str, Any]], step: CreditStep, now: Mapping[str, Any]
    ) -> Mapping[str, torch.Tensor]:
        if self.loss is None:
            return {}
        rejects = bool(OmegaConf.select(self._config, "algorithm.rollout_correction.rollout_rs"))
        rejects = rejects or (self._update.importance is not None and self._update.importance_outside == "clear_mask")
        extra = step.credit.extra if step.credit is not None else {}
        global_steps = self._trainer.global_steps
        batch = loss_inputs.Batch(self.steps, extra, tags, global_steps, step.response_mask, rejects)
        return loss_inputs.all_columns(self.loss, self.loss_params, batch, now)
