"""verl's three V1 trainers with turn-level credit.

A mixin overrides as little as it can; each override names what of verl's behaviour it answers. With an estimator of
verl's own (``grpo``, ``gae``, ...) the trainers behave like the stock ones, on step rows and on ordinary rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, ClassVar

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_to_nested

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.modules import import_modules
from verl_turnkey.plugins import agent_loop, loss, loss_inputs, phases, registration, seams, starvation
from verl_turnkey.plugins.config import credit_params, estimator_of, loss_of, loss_params, turnkey_config
from verl_turnkey.plugins.credit import CreditStep, credit_step
from verl_turnkey.plugins.derived import listed_per_turn
from verl_turnkey.plugins.metrics import combine
from verl_turnkey.plugins.rows import Rows, failure
from verl_turnkey.plugins.turns import split_key

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # verl's 2.0 is a floor under the generation time of every step, on any hardware

# Fields that no worker computes with; everything else travels, also names that we do not know.
NOT_FOR_WORKERS = frozenset(
    (
        "data_source",
        "extra_fields",
        "extra_info",
        "interaction_kwargs",
        "metrics",
        "prompt",
        "raw_prompt",
        "reward_model",
        "tools_kwargs",
        "turnkey_task",
    )
)


class TurnkeyTrainer:
    """Mixin; ``base_mode`` is the mode of the stock trainer it stands before."""

    base_mode: ClassVar[str]

    def __init__(self, config: DictConfig) -> None:
        self.turnkey = turnkey_config(config)
        import_modules(self.turnkey.modules)
        registration.register_estimators()
        registration.register_losses()
        self.estimator = estimator_of(config)
        self.credit_params = credit_params(config, self.turnkey)
        needed = (str(config.algorithm.adv_estimator),) if self.estimator else ()
        registration.verify(("estimator", "trainer"), needed)
        self.loss = loss_of(config)
        self.loss_params = loss_params(config, self.turnkey)
        # verl compares the mode with literals and reads trainer.v1.<mode>: under our own name it would silently take
        # the asynchronous replay buffer and an empty sub-configuration.
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
        super().__init__(config)  # type: ignore[call-arg]
        # Hybrid switching measures idle time against the interval: there verl's own stays.
        switching = OmegaConf.select(config, f"trainer.v1.{self.base_mode}.hybrid_rollout.enable_switch")
        if getattr(self.replay_buffer, "poll_interval", None) == 2.0 and not switching:
            self.replay_buffer.poll_interval = POLL_SECONDS
        if hasattr(self.replay_buffer, "_evict_terminal_groups"):  # not so a sampler of the user's own
            starvation.Watch(self.replay_buffer, most=2 * config.data.train_batch_size)
        self._real_rows = 0
        self._reasons: list[str | None] = []  # of the rows of this step, None: it was played
        self._updates: list[dict[str, float]] = []  # metrics of the updates of this step
        self._dp_size = 1
        self._table: Rows | None = None
        self._in_phases = self.turnkey.update.order == "reverse_turns" or self._carries_log_ratios

    @property
    def _carries_log_ratios(self) -> bool:
        return self.loss is not None and loss_inputs.GROUP_LOG_RATIO in self.loss.needs

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        # Every training process, on every node, has to have loaded the plugin.
        workers = self.actor_rollout_wg.workers
        ray.get([worker.__ray_call__.remote(_verify_worker) for worker in workers])
        if self.loss is not None:
            chosen = (self.turnkey.modules, self.loss.name, self.loss_params)
            ray.get([worker.__ray_call__.remote(loss.configure, *chosen) for worker in workers])
        groups: dict[int, WorkerCalls] = {}
        for name in ("actor_rollout_wg", "ref_policy_wg", "critic_wg"):
            group = getattr(self, name, None)
            if group is not None:  # verl lets roles share one group; they share one wrapper too
                setattr(self, name, groups.setdefault(id(group), WorkerCalls(group, self._before_call)))

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop, once every agent-loop worker has shown that it can play."""
        texts = bool(getattr(self.credit_params, "compares_texts", False))
        workers = agent_loop_manager.agent_loop_workers
        ray.get([worker.__ray_call__.remote(agent_loop.prepare, texts) for worker in workers])
        super().fit(agent_loop_manager)  # type: ignore[misc]

    def _load_checkpoint(self) -> None:
        """verl's own, without the rows that the batch of that step left in the queue.

        A checkpoint is written when the prompts of the batch are out of the queue and its rows are not: without prompts
        nobody would ever ask for them, or clear them, again.
        """
        super()._load_checkpoint()  # type: ignore[misc]
        items = (tq.kv_list("train") or {}).get("train", {}) if self.base_mode != "sync" else {}
        prompts = {key for key, tag in items.items() if tag.get("is_prompt")}
        left = [key for key in items if key not in prompts and split_key(key)[0] not in prompts]
        if left:
            tq.kv_clear(keys=left, partition_id="train")

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """verl's own, with the metrics of episodes and credit combined by what they count."""
        self._updates = []
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        metrics.update(combine(self._updates))
        return batch

    # --- a fixed number of optimizer steps --------------------------------------------------------------------------

    def _mini_batches(self, role: str) -> int:
        """Optimizer steps per batch and epoch: what verl does with one row per rollout, whatever the episode length."""
        if self.turnkey.update.mini_batches is not None:
            return self.turnkey.update.mini_batches
        size = (self.config.critic if role == "critic" else self.config.actor_rollout_ref.actor).ppo_mini_batch_size
        return math.ceil(self.config.data.train_batch_size / self.parameter_sync_step / size)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Pad to whole mini-batches of whatever size; verl pads to a multiple of ppo_mini_batch_size * n rows."""
        self._dp_size = dp_size
        updates = [1]
        if self.use_critic:
            updates.append(self._mini_batches("critic"))
        if self.config.trainer.critic_warmup <= self.global_steps and not self._in_phases:
            updates.append(self._mini_batches("actor"))
        return dp_size * math.lcm(*updates)

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Padding rows spread over the mini-batches, and enough of them to fill up any phase to a row for each rank."""
        batch = super()._balance_batch(batch, *args, **kwargs)  # type: ignore[misc]
        padding = sum(tag.get("is_padding", False) for tag in batch.tags)
        if self._in_phases and padding < self._dp_size - 1:
            # To be divisible by its length and a bit, verl adds that bit.
            larger = len(batch) + self._get_required_batch_multiple(self._dp_size)
            batch = upsample_batch_to_divisible_size(batch, larger, self.tokenizer.eos_token_id)
        batch.reorder(spread_padding([bool(tag.get("is_padding")) for tag in batch.tags], self._dp_size))
        return batch

    def _before_call(self, method: str, batch: KVBatchMeta) -> None:
        """Right before each worker call: which fields travel, and in how many mini-batches they are used."""
        batch.fields = [name for name in seams.queue_fields(batch) if name not in NOT_FOR_WORKERS]
        if method in ("update_actor", "train_mini_batch"):
            actor = method == "update_actor"
            number = 1 if actor and self._in_phases else self._mini_batches("actor" if actor else "critic")
            if actor and self._carries_log_ratios:
                batch.extra_info["epochs"] = 1  # each is a phase of its own
            # A mini_batch_size left behind by the critic's update would win over num_mini_batch.
            batch.extra_info.pop("mini_batch_size", None)
            batch.extra_info["num_mini_batch"] = number
            # The sequence-mean losses divide by it: real rows only, neither padding nor failed episodes.
            batch.extra_info["global_batch_size"] = max(1, self._real_rows) / number

    # --- credit -----------------------------------------------------------------------------------------------------

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's own advantage step, with the records of the steps at the estimator's hand."""
        fields = ["extra_fields", "response_mask"]
        fields += ["rm_scores"] if self.config.algorithm.use_kl_in_reward else []
        fields += ["values"] if self.use_critic else []
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        extra_fields = data.pop("extra_fields").tolist()
        padded = data.to_padded_tensor()
        self._count(batch, extra_fields, padded["response_mask"], metrics)
        step = CreditStep(
            params=self.credit_params,
            keys=batch.keys,
            tags=batch.tags,
            extra_fields=extra_fields,
            response_mask=padded["response_mask"],
            scores=padded.get("rm_scores", None),
            values=padded.get("values", None),
            lists=listed_per_turn(self.config.actor_rollout_ref.rollout),
        )
        if self._real_rows:
            with credit_step(step):
                batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        else:
            batch = self._without_credit(batch, data["response_mask"], metrics)
        if step.rows is None and step.has_records:
            step.read()
        metrics.update(step.metrics)
        self._updates.append({name: metrics[name] for name in metrics if name.startswith(("episode/", "credit/"))})
        self._table = step.rows
        if self._real_rows and self.loss is not None:
            rejects = bool(OmegaConf.select(self.config, "algorithm.rollout_correction.rollout_rs"))
            made_of = (self._steps, step.extra, batch.tags, self.global_steps, data["response_mask"], rejects)
            batch = loss_inputs.write(batch, self.loss, self.loss_params, loss_inputs.Batch(*made_of))
        return batch

    def _without_credit(self, batch: KVBatchMeta, response_mask: torch.Tensor, metrics: dict[str, Any]) -> KVBatchMeta:
        """One update of several, all of whose episodes failed."""
        none = response_to_nested(torch.zeros_like(response_mask.to_padded_tensor(0)).float(), response_mask)
        # verl reads these of all updates together, and a column that some rows lack of none of them.
        names = ["advantages", "returns"] + ["token_level_rewards"] * self.config.algorithm.use_kl_in_reward
        columns = TensorDict(dict.fromkeys(names, none), batch_size=len(batch))
        for name in [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]:
            del metrics[name]  # a mean over no tokens, which would be the whole step's
        metrics.pop("training/rollout_probs_diff_valid", None)
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=columns)

    def _steps(self) -> Rows:
        if self._table is None:
            raise ConfigError(
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} on rows without records: the policy "
                "loss or turnkey.update.order asks for the steps of each episode, so take an estimator of this package "
                "or an agent loop that writes records (turnkey_env)"
            )
        return self._table

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._update_critic(batch, metrics) if self._real_rows else batch  # type: ignore[misc]

    # --- the actor's update in phases -------------------------------------------------------------------------------

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's own update, or several on parts of the batch; none when all its episodes failed."""
        if not self._real_rows:
            return batch
        if not self._in_phases:
            return super()._update_actor(batch, metrics)  # type: ignore[misc]
        calls = phases.Calls(self._actor_log_probs, self._update_part)
        real_rows = self._real_rows
        # verl's separate_async takes several updates with log-probabilities from before the first of them.
        bypass = OmegaConf.select(self.config, "algorithm.rollout_correction.bypass_mode")
        current = not bypass and self.local_trigger_step == 0
        if self.turnkey.update.order == "reverse_turns":
            found = phases.reverse_turns(batch, self._steps(), self._dp_size, calls, self.turnkey.update, current)
        else:
            numbers = self._mini_batches("actor"), self.config.actor_rollout_ref.actor.ppo_epochs
            found = phases.group_log_ratios(batch, self._steps(), self._dp_size, calls, *numbers, current)
        self._real_rows = real_rows
        metrics.update(found)
        return batch

    def _actor_log_probs(self, part: KVBatchMeta) -> None:
        temperature = self.config.actor_rollout_ref.rollout.temperature
        part.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
        self.actor_rollout_wg.compute_log_prob(part)

    def _update_part(self, part: KVBatchMeta, real_rows: int) -> dict[str, Any]:
        self._real_rows = real_rows
        metrics: dict[str, Any] = {}
        super()._update_actor(part, metrics)  # type: ignore[misc]
        return metrics

    def _count(
        self, batch: KVBatchMeta, extra_fields: list[Any], response_mask: torch.Tensor, metrics: dict[str, Any]
    ) -> None:
        """Rows and episodes that are really there.

        A dead environment costs its own episode; when all of a training step die, the cause is not one environment,
        and the run stops. One update of several may be without any: what fails at once is first in line.
        """
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        has_tokens = response_mask.any(1).tolist()
        reasons = [failure(extra_fields[i], has_tokens[i]) for i in real]
        self._real_rows = sum(reason is None for reason in reasons)
        self._reasons = reasons if self.local_trigger_step == 0 else self._reasons + reasons
        last = self.local_trigger_step == self.parameter_sync_step - 1
        if last and self._reasons and None not in self._reasons:
            raise RuntimeError(
                f"all {len(self._reasons)} episodes of step {self.global_steps} failed:\n"
                f"{starvation.listed(self._reasons)}"
            )
        starvation.stop_when_exhausted(self.global_steps, reasons)
        # An agent loop that raises leaves no row: verl then trains on the rest of its group without a word.
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        asked = prompts * self.config.actor_rollout_ref.rollout.n
        missing = asked - len({split_key(batch.keys[i])[1] for i in real})
        metrics["episode/missing"] = float(max(0, missing))
        if missing > 0:
            logger.warning(
                "%d of %d episodes of step %d left no row: the agent loop raised, see the log of its worker",
                *(missing, asked, self.global_steps),
            )


def _verify_worker(worker: Any) -> None:
    registration.verify(("estimator",))


def spread_padding(is_padding: list[bool], ranks: int) -> list[int]:
    """An order of the rows in which the padding rows of each rank stand evenly between its others.

    verl sorts a rank's rows by length and cuts mini-batches from front to end: the padding rows, all alike, would be a
    mini-batch of their own. Nothing else changes its order.
    """
    order: list[int] = []
    share = len(is_padding) // ranks
    for start in range(0, len(is_padding), max(1, share)):
        part = range(start, min(start + share, len(is_padding)))
        padding = [i for i in part if is_padding[i]]
        real = iter([i for i in part if not is_padding[i]])
        at = {int((k + 0.5) * len(part) / len(padding)): i for k, i in enumerate(padding)}
        order += [at[place] if place in at else next(real) for place in range(len(part))]
    return order


class WorkerCalls:
    """A worker group whose calls on a batch are prepared first; everything else passes through."""

    METHODS = frozenset({"compute_log_prob", "compute_ref_log_prob", "infer_batch", "update_actor", "train_mini_batch"})

    def __init__(self, group: Any, before: Callable[[str, KVBatchMeta], None]) -> None:
        self._group = group
        self._before = before

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._group, name)
        if name not in self.METHODS:
            return attribute

        def call(batch: KVBatchMeta) -> Any:
            self._before(name, batch)
            return attribute(batch)

        return call


class TurnkeyTrainerSync(TurnkeyTrainer, PPOTrainerSync):
    """``trainer.v1.trainer_mode=turnkey_sync``"""

    base_mode = "sync"


class TurnkeyTrainerColocateAsync(TurnkeyTrainer, PPOTrainerColocateAsync):
    """``trainer.v1.trainer_mode=turnkey_colocate_async``"""

    base_mode = "colocate_async"


class TurnkeyTrainerSeparateAsync(TurnkeyTrainer, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=turnkey_separate_async``"""

    base_mode = "separate_async"

    def _setup(self) -> None:
        with seams.logger_of(trainer_separate_async):
            super()._setup()
