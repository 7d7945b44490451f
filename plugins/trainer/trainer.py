"""verl's three V1 trainers with turn-level credit.

Each overriding method of the mixin names the behaviour of verl that makes it necessary. With an estimator of verl's own
(``grpo``, ``gae``, ...) the advantages are those of the stock trainers; mini-batches of whole episodes, the replacement
of failed batches and validation are as with ours.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins import registries
from verl_turnkey.plugins.actor import loss_inputs, phases, updates, weighing
from verl_turnkey.plugins.checks import probe
from verl_turnkey.plugins.config.schema import (
    credit_modify,
    credit_params,
    estimator_of,
    loss_of,
    loss_params,
    turnkey_config,
)
from verl_turnkey.plugins.credit.metrics import combine
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.stopping import channel
from verl_turnkey.plugins.trainer import started, starvation, worker_setup
from verl_turnkey.plugins.trainer.allotted import Allotted
from verl_turnkey.plugins.trainer.asked import Asked
from verl_turnkey.plugins.trainer.checkpoints import Checkpoints
from verl_turnkey.plugins.trainer.credited import Credited
from verl_turnkey.plugins.trainer.dealt import Dealt
from verl_turnkey.plugins.trainer.hosts import HostMetrics
from verl_turnkey.plugins.trainer.kept import Kept
from verl_turnkey.plugins.trainer.logged import FINISH_SECONDS, Logged
from verl_turnkey.plugins.trainer.replayed import Replayed
from verl_turnkey.plugins.trainer.stopping import Stopping
from verl_turnkey.plugins.trainer.validation import PlayedValidation
from verl_turnkey.plugins.verl_api import internals, ledger

POLL_SECONDS = 0.05  # verl's 2.0 is a lower bound on the generation time of every step


class TurnkeyTrainer(Credited, Kept, Replayed, Dealt, Logged, PlayedValidation, Stopping, Checkpoints, Allotted):
    """Mixin; ``base_mode`` is the mode of the stock trainer that it extends."""

    base_mode: ClassVar[str]

    def __init__(self, config: DictConfig) -> None:
        self.turnkey = turnkey_config(config)
        import_modules(self.turnkey.modules)
        registries.register_estimators()
        registries.register_losses()
        self.estimator = estimator_of(config)
        self.credit_params = credit_params(config, self.turnkey)
        self.credit_modify = credit_modify(config, self.turnkey)
        self.credit_state = {}
        needed = (str(config.algorithm.adv_estimator),) if self.estimator else ()
        ledger.verify(("estimator", "trainer"), needed)
        self.loss = loss_of(config)
        self.loss_params = loss_params(config, self.turnkey)
        # verl compares the mode with literals and reads trainer.v1.<mode>: under our own name it would silently take
        # the asynchronous replay buffer and an empty sub-configuration.
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
        self._open_log(config)
        super().__init__(config)  # type: ignore[call-arg]
        # Hybrid switching compares idle time with the interval, so there verl's own stays.
        switching = OmegaConf.select(config, f"trainer.v1.{self.base_mode}.hybrid_rollout.enable_switch")
        if getattr(self.replay_buffer, "poll_interval", None) == 2.0 and not switching:
            self.replay_buffer.poll_interval = POLL_SECONDS
        starvation.StarvationGuard(
            self.replay_buffer,
            self.turnkey.env.patience,
            config.data.train_batch_size,
            self._ask_again,
            max(0, OmegaConf.select(config, "algorithm.filter_groups.max_num_gen_batches") or 0),
            lambda: channel.told("signal"),
        )
        prompts = config.data.train_batch_size // self.parameter_sync_step
        self._asked = Asked(self.replay_buffer, prompts, config.actor_rollout_ref.rollout.n)
        self._real_rows = 0
        self._left_out, self._seen, self._allotted = Counter(), {}, {}
        self._updates: list[dict[str, float]] = []  # metrics of the updates of this step
        self._table: Rows | None = None
        self._hosts = HostMetrics()
        spec = self.estimator
        self._columns = () if spec is None else spec.columns(self.credit_params, self.credit_modify)
        self._in_phases = self.turnkey.update.order == "reverse_turns" or self._carries_log_ratios

    @property
    def _carries_log_ratios(self) -> bool:
        return self.loss is not None and loss_inputs.GROUP_LOG_RATIO in self.loss.needs

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        # Every training process, on every node, must have loaded the plugin.
        workers = self.actor_rollout_wg.workers
        ray.get([worker.__ray_call__.remote(worker_setup.verify) for worker in workers])
        if self.loss is not None:
            chosen = (self.turnkey.modules, self.loss.name, self.loss_params)
            ray.get([worker.__ray_call__.remote(worker_setup.configure, *chosen) for worker in workers])
        if self.turnkey.update.weight_by != "token":
            worker_setup.weigh(workers, self.critic_wg.workers if self.use_critic else [])
        self._record_updates()
        groups: dict[int, worker_setup.WorkerCalls] = {}
        for name in ("actor_rollout_wg", "ref_policy_wg", "critic_wg"):
            group = getattr(self, name, None)
            if group is not None:  # verl lets roles share one group; they share one wrapper too
                setattr(self, name, groups.setdefault(id(group), worker_setup.WorkerCalls(group, self._before_call)))

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop, after every node has played the probe and every agent-loop worker has passed its checks."""
        plays = self.config.actor_rollout_ref.rollout.agent.default_agent_loop == "turnkey_env"
        if plays and self.turnkey.env.probe and (file := probe.task_file(self.config)):
            probe.probe_nodes(self.turnkey, file)
        texts, before = loop_worker.recorded(self.config, self.turnkey)
        workers = internals.loop_workers(agent_loop_manager)
        if not workers:
            logger.warning(
                "the agent-loop manager %s has no agent_loop_workers: they are not checked before the first step; "
                "metrics of hosts, reasons of failed validation episodes and the log's last episodes are missing",
                type(agent_loop_manager).__name__,
            )
        self._hosts = HostMetrics(workers)
        ray.get([worker.__ray_call__.remote(loop_worker.prepare, texts, before) for worker in workers])
        started.write_start(self.config, self.global_steps)
        self._look_for_log(workers)
        try:
            super().fit(internals.Dealing(agent_loop_manager, VALIDATION))  # type: ignore[misc]
        finally:  # the log may still have to write why the run stops
            left = [worker.__ray_call__.remote(loop_worker.finish) for worker in workers]
            left += self._flush_log(FINISH_SECONDS)
            if left:
                ray.wait(left, num_returns=len(left), timeout=2 * loop_worker.FINISH_SECONDS)
            if self._tables is not None:
                self._tables.drain(FINISH_SECONDS)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """verl's own, with the metrics of episodes and credit of several updates combined by our rules."""
        self._updates = []
        self._begin_log()
        try:
            batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        except (starvation.StarvedError, channel.StoppedError):
            self._save_stopping(self.global_steps - 1)
            raise
        metrics.update(combine(self._updates))
        metrics.update(self._hosts.read())
        self._flush_log()
        return batch

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        self._allot(batch)
        self._asked.submit(batch)
        return super()._submit_batch_to_rollout(batch)  # type: ignore[misc]

    def _ask_again(self, prompts: int) -> None:
        """Request prompts in place of those whose episodes all failed; verl gives multiples of ``gen_batch_size``."""
        size = self.config.data.get("gen_batch_size") or self.config.data.train_batch_size
        self._add_prompts_to_generate(math.ceil(prompts / size) * size)

    # --- worker calls -------------------------------------------------------------------------------------------------

    def _before_call(self, method: str, batch: KVBatchMeta) -> None:
        """Called before each worker call: sets the number of mini-batches of an update."""
        if method in ("update_actor", "train_mini_batch"):
            actor = method == "update_actor"
            number = 1 if actor and self._in_phases else self._filled_mini_batches("actor" if actor else "critic")
            if actor and self._carries_log_ratios:
                batch.extra_info["epochs"] = 1  # each is a phase of its own
            # A mini_batch_size left behind by the critic's update would win over num_mini_batch.
            batch.extra_info.pop("mini_batch_size", None)
            batch.extra_info |= {"num_mini_batch": number, weighing.MINI_BATCHES: number}
            batch.extra_info[updates.STEP] = self.global_steps
            # The sequence-mean losses divide by it: real rows only, neither padding nor failed episodes.
            batch.extra_info["global_batch_size"] = max(1, self._real_rows) / number

    # --- credit -----------------------------------------------------------------------------------------------------

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_ref_log_prob(batch, metrics)  # type: ignore[misc]
        # Meant for this call; left there, the critic would compute its values without its adapter too.
        batch.extra_info.pop("no_lora_adapter", None)
        return batch

    # --- the actor's update in phases -------------------------------------------------------------------------------

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's own update, or several on parts of the batch."""
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
        with internals.logger_of(trainer_separate_async):
            super()._setup()
