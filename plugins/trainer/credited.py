"""verl's advantage step with the credit of steps, and what further columns the batch gets there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta

from verl_turnkey.advantage import ConfigError, EstimatorSpec, Modification
from verl_turnkey.losses import LossSpec
from verl_turnkey.losses.registry import weighs
from verl_turnkey.plugins.actor import loss_inputs, weighing
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit import supplied
from verl_turnkey.plugins.credit.estimator import CreditStep, credit_step
from verl_turnkey.plugins.credit.metrics import OF_EPISODES
from verl_turnkey.plugins.credit.row_turns import split_key, token_counts
from verl_turnkey.plugins.credit.rows import REPLAYED, Rows, failure
from verl_turnkey.plugins.credit.unrecorded import listed_per_turn
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.trainer.asked import Asked
from verl_turnkey.plugins.trainer.hosts import HostMetrics
from verl_turnkey.plugins.verl_api.one_trip import OneTrip, penalties_of

#: verl's estimators that compare a row with the others of its group.
OF_GROUPS = (
    *("grpo", "grpo_passk", "grpo_vectorized", "gpg", "opo"),
    *("reinforce_plus_plus_baseline", "rloo", "rloo_vectorized"),
)


class Credited:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`."""

    config: DictConfig
    turnkey: TurnkeyConfig
    use_critic: bool
    global_steps: int
    estimator: EstimatorSpec | None
    credit_params: Any
    credit_modify: Sequence[Modification]
    credit_state: Mapping[str, float]
    loss: LossSpec | None
    loss_params: Any
    _hosts: HostMetrics
    _asked: Asked
    _columns: Sequence[str]
    _left_out: Counter[str]
    _updates: list[dict[str, float]]
    _table: Rows | None
    _real_rows: int
    _played: Sequence[int]
    """rows of played episodes in the current batch"""
    _shrunk: Collection[str]
    """groups of which an episode failed"""
    _dealt_mask: Callable[[KVBatchMeta], dict[str, torch.Tensor]]
    _advantage_metrics: Callable[..., dict[str, float]]
    _log_credit: Callable[..., Mapping[str, torch.Tensor]]

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's own advantage step, inside a :class:`CreditStep` that holds the records.

        verl reads and writes the queue there; what is ours goes with it.
        """
        self._hosts.ask()
        trip = OneTrip(batch, self._fields(), self._groups_of(batch) | self._dealt_mask(batch))
        extra_fields, mask = trip.data.pop("extra_fields").tolist(), trip.data["response_mask"]
        self._count(batch, extra_fields, mask, metrics)
        step = CreditStep(
            params=self.credit_params,
            modify=self.credit_modify,
            keys=batch.keys,
            tags=batch.tags,
            extra_fields=extra_fields,
            response_mask=mask,
            scores=trip.data.get("rm_scores", None) if self.config.algorithm.use_kl_in_reward else None,
            values=trip.data.get("values", None),
            lists=listed_per_turn(self.config.actor_rollout_ref.rollout),
            data=trip.data,
            state=self.credit_state,
        )
        compared = None if self.estimator is not None else self._compared(batch.keys)
        with credit_step(step), penalties_of(self._real_rows), trip.for_verl(compared):
            super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        if step.rows is None and step.has_records:
            step.read()
        self.credit_state = step.state
        metrics.update(step.metrics)
        self._updates.append({name: metrics[name] for name in metrics if name.startswith(OF_EPISODES)})
        self._table = step.rows
        if step.rows is not None and step.credit is not None:
            metrics.update(self._advantage_metrics(step.rows, step.credit.advantage))
        now = trip.now
        trip.written |= self._log_credit(step, now)
        trip.written |= weighing.columns(batch.keys, self.turnkey.update.weight_by, mask, now, step.rows)
        trip.written |= self._loss_columns(batch, step, now)
        return trip.put()

    def _compared(self, keys: Sequence[str]) -> list[int]:
        """The rows that verl's estimator computes advantages of; all others get 0.

        They are of played episodes. Where failures left a single one of a group, an estimator that compares with the
        group has nothing to compare: verl would take the bare score for the advantage, or stop (``grpo_passk``).
        """
        if self.config.algorithm.adv_estimator not in OF_GROUPS:
            return [*self._played]
        played = Counter(group for group, _ in {split_key(keys[i])[:2] for i in self._played})
        alone = {group for group in self._shrunk if played[group] == 1}
        return [i for i in self._played if split_key(keys[i])[0] not in alone]

    def _fields(self) -> list[str]:
        """The fields of the queue that we read."""
        fields = ["extra_fields", "response_mask", *supplied.fields(self._columns)]
        if self.config.algorithm.use_kl_in_reward or self.estimator is None:
            fields.append("rm_scores")
        if self.use_critic:
            fields.append("values")
        if self.loss is not None and weighs(self.loss, self.loss_params):
            fields.append("old_log_probs")
        return fields

    def _groups_of(self, batch: KVBatchMeta) -> dict[str, torch.Tensor]:
        """With an estimator of ours a number for each row's group in the place of verl's ``uid``.

        verl takes seconds to unpack 100,000 texts, and hands them on to the estimator alone; ours reads the keys.
        """
        if self.estimator is None:
            return {}
        numbers: dict[str, int] = {}
        uid = [numbers.setdefault(split_key(key)[0], len(numbers)) for key in batch.keys]
        return {"uid": torch.tensor(uid)}

    def _loss_columns(self, batch: KVBatchMeta, step: CreditStep, now: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        if self.loss is None:
            return {}
        rejects = bool(OmegaConf.select(self.config, "algorithm.rollout_correction.rollout_rs"))
        extra = step.credit.extra if step.credit is not None else {}
        made_of = (self._steps, extra, batch.tags, self.global_steps, step.response_mask, rejects)
        return loss_inputs.all_columns(self.loss, self.loss_params, loss_inputs.Batch(*made_of), now)

    def _steps(self) -> Rows:
        if self._table is None:
            raise ConfigError(
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} on rows without records: the policy "
                "loss or turnkey.update.order asks for the steps of each episode, so take an estimator of this package "
                "or an agent loop that writes records (turnkey_env)"
            )
        return self._table

    def _count(
        self, batch: KVBatchMeta, extra_fields: list[Any], response_mask: torch.Tensor, metrics: dict[str, Any]
    ) -> None:
        """Count the rows of played episodes, and the episodes that left no row."""
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        has_tokens = (token_counts(response_mask) > 0).tolist()
        self._played = [i for i in real if failure(extra_fields[i], has_tokens[i]) is None]
        self._real_rows = len(self._played)
        self._shrunk = {split_key(batch.keys[i])[0] for i in {*real} - {*self._played}}
        # An agent loop that raises leaves no row: verl then silently trains on the rest of its group.
        played = [i for i in real if not batch.tags[i].get(REPLAYED, False)]
        there = Counter(group for group, _ in {split_key(batch.keys[i])[:2] for i in played}) + self._left_out
        missing = self._asked.missing(there)
        metrics["episode/missing"] = float(missing)
        if missing:
            logger.warning(
                "%d of %d episodes of step %d left no row: the agent loop raised, see the log of its worker",
                *(missing, missing + there.total(), self.global_steps),
            )
