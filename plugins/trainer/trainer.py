"""verl's three V1 trainers with turn-level credit: all overrides of verl's methods, each of which hands over to a part.

With an estimator of verl's own (``grpo``, ``gae``, ...) the advantages are those of the stock trainers; mini-batches of
whole episodes, the replacement of failed batches and validation are as with ours.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins import register
from verl_turnkey.plugins.config.schema import estimator_of, turnkey_config
from verl_turnkey.plugins.credit.metrics import combine
from verl_turnkey.plugins.teacher.column import AfterOldLogProbs
from verl_turnkey.plugins.trainer import logging, worker_setup
from verl_turnkey.plugins.trainer.advantage_step import AdvantageStep
from verl_turnkey.plugins.trainer.batching import ActorUpdate, Batching
from verl_turnkey.plugins.trainer.checkpointing import Checkpointing
from verl_turnkey.plugins.trainer.groups import Allocation, GroupSelection
from verl_turnkey.plugins.trainer.logging import TrainingLog
from verl_turnkey.plugins.trainer.parts import PARTS, hooks
from verl_turnkey.plugins.trainer.replay import Replay
from verl_turnkey.plugins.trainer.rollout_metrics import HostMetrics, RolloutCounter
from verl_turnkey.plugins.trainer.shutdown import Shutdown
from verl_turnkey.plugins.trainer.starvation import StarvationGuard
from verl_turnkey.plugins.trainer.validation import Validation
from verl_turnkey.plugins.trainer.worker_setup import ValueHeads
from verl_turnkey.plugins.verl_api import internals, ledger
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta

POLL_SECONDS = 0.05  # verl's 2.0 is a lower bound on the generation time of every step


class TurnkeyTrainer(PPOTrainer):
    """Comes before one of verl's three trainers in the bases of a subclass; ``base_mode`` is the mode of that one."""

    base_mode: ClassVar[str]

    def __init__(self, config: DictConfig) -> None:
        self.turnkey = turnkey = turnkey_config(config)
        import_modules(turnkey.modules)
        register.register_estimators()
        register.register_losses()
        ledger.verify(("estimator", "trainer"), (str(config.algorithm.adv_estimator),) if estimator_of(config) else ())
        # verl compares the mode with literals and reads trainer.v1.<mode>: under our own name it would silently take
        # the asynchronous replay buffer and an empty sub-configuration.
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
        super().__init__(config)
        # Hybrid switching compares idle time with the interval, so there verl's own stays.
        switching = OmegaConf.select(config, f"trainer.v1.{self.base_mode}.hybrid_rollout.enable_switch")
        if getattr(self.replay_buffer, "poll_interval", None) == 2.0 and not switching:
            self.replay_buffer.poll_interval = POLL_SECONDS
        StarvationGuard(self, turnkey.env.patience)
        prompts = config.data.train_batch_size // self.parameter_sync_step
        self.rollout_counter = RolloutCounter(self.replay_buffer, prompts, config.actor_rollout_ref.rollout.n)
        self.hosts = HostMetrics()
        self.log = TrainingLog(self, turnkey.log)
        self.allocation = Allocation(config, turnkey.groups)
        self.replay = Replay(self, turnkey.groups)
        self.group_selection = GroupSelection(turnkey.groups, self.allocation, self.replay)
        self.batching = Batching(self, turnkey.update, self.group_selection)
        self.advantage_step = AdvantageStep(self, self.batching, self.log)
        self.value_heads = ValueHeads(self, self.advantage_step)
        self.actor_update = ActorUpdate(self, turnkey.update, self.batching, self.advantage_step)
        self.parts = [make(self) for make in PARTS.values()]
        for name, part in zip(PARTS, self.parts, strict=True):
            setattr(self, name, part)
        self.further_passes = AfterOldLogProbs(*hooks(self.parts, "after_old_log_probs"))
        saved = [self.advantage_step, self.allocation, *(part for part in self.parts if hasattr(part, "save"))]
        self.checkpointing = Checkpointing(self, saved, bool(self.advantage_step.remembering))
        self.validation = Validation(self, turnkey.env.patience, self.checkpointing)
        self.shutdown = Shutdown(self, self.checkpointing, self.log)

    @property
    def logger(self) -> Any:
        """verl's loggers, which ``fit`` sets."""
        return self._logger

    @logger.setter
    def logger(self, loggers: Any) -> None:
        self._logger = self.log.over(loggers)

    @property
    def resource_pool_to_cls(self) -> dict[Any, dict[str, Any]]:
        """The workers of each resource pool, which verl sets before it adds its own."""
        return self._resource_pool_to_cls

    @resource_pool_to_cls.setter
    def resource_pool_to_cls(self, pools: dict[Any, dict[str, Any]]) -> None:
        for joined in hooks(self.parts, "joined"):
            pools = joined(pools)
        self._resource_pool_to_cls = pools

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.value_heads.join()

    def _setup(self) -> None:
        with internals.logger_of(trainer_separate_async):
            super()._setup()
        worker_setup.set_up_training(self, self.turnkey, self.advantage_step)
        self.log.record_updates()
        worker_setup.wrap_groups(self, self._before_call, self.further_passes.after_call, self.value_heads.fields)

    def on_init_end(self) -> None:
        """The servers get the first weights: verl would wait for a dead one for ever."""
        with self.shutdown.watchdog(self.turnkey.stop.patience):
            super().on_init_end()

    def _before_call(self, method: str, batch: KVBatchMeta) -> None:
        for before_forward in hooks(self.parts, "before_forward"):
            before_forward(method, batch)
        self.actor_update.before_call(method, batch)

    def fit(self, agent_loop_manager: Any) -> None:
        workers = worker_setup.set_up_rollouts(self, self.turnkey, agent_loop_manager)
        self.hosts = HostMetrics(workers)
        logging.write_start(self.config, self.global_steps)
        self.agent_loop_manager = worker_setup.dealing(agent_loop_manager)
        with self.log.of_run(workers), self.shutdown.watchdog(self.turnkey.stop.patience):
            super().fit(self.agent_loop_manager)  # pyright: ignore[reportArgumentType]

    def on_step_begin(self) -> None:
        self.shutdown.begin_step()
        super().on_step_begin()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """verl's own, with the metrics of episodes and credit of several updates combined by our rules."""
        self.advantage_step.updates = []
        self.log.begin_step()
        with self.shutdown.of_step():
            batch = super().step(metrics, timing_raw)
        metrics |= combine(self.advantage_step.updates) | self.hosts.read()
        self.log.flush()
        return batch

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        self.allocation.allot(batch)
        self.rollout_counter.submit(batch)
        return super()._submit_batch_to_rollout(batch)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> KVBatchMeta:
        """verl's first step after the rewards of a batch are there. verl's mini-batches do not keep episodes whole."""
        return self.batching.balance(self.group_selection.select(batch, metrics), metrics, *args, **kwargs)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with ExitStack() as stack:
            for during in hooks(self.parts, "during"):
                stack.enter_context(during(batch))
            stack.enter_context(self.further_passes.during(metrics))
            return super()._compute_old_log_prob(batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_ref_log_prob(batch, metrics)
        # Meant for this call; left there, the critic would compute its values without its adapter too.
        (batch.extra_info or {}).pop("no_lora_adapter", None)
        return batch

    def _compute_values(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_values(batch, metrics)
        self.value_heads.computed(batch)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's estimators see neither steps nor trajectories."""
        self.hosts.ask()
        metrics |= self.rollout_counter.missing(batch, self.group_selection.left_out, self.global_steps)
        for before_advantage in hooks(self.parts, "before_advantage"):
            metrics |= before_advantage(batch)
        batch = self.advantage_step.compute(batch, metrics, super()._compute_advantage)
        for after_advantage in hooks(self.parts, "after_advantage"):
            metrics |= after_advantage(batch)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return self.actor_update.run(batch, metrics, super()._update_actor)

    def _load_checkpoint(self) -> None:
        self.checkpointing.load(super()._load_checkpoint)

    def _save_checkpoint(self) -> None:
        self.checkpointing.save(super()._save_checkpoint)

    def _validate(self) -> dict[str, float]:
        return self.validation.validate(super()._validate)

    def _val_metrics_update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return self.validation.metrics(super()._val_metrics_update, *args, **kwargs)


class TurnkeyTrainerSync(TurnkeyTrainer, PPOTrainerSync):
    """``trainer.v1.trainer_mode=turnkey_sync``"""

    base_mode = "sync"


class TurnkeyTrainerColocateAsync(TurnkeyTrainer, PPOTrainerColocateAsync):
    """``trainer.v1.trainer_mode=turnkey_colocate_async``"""

    base_mode = "colocate_async"


class TurnkeyTrainerSeparateAsync(TurnkeyTrainer, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=turnkey_separate_async``"""

    base_mode = "separate_async"
