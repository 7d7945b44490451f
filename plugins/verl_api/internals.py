"""The private parts of verl that this package relies on, in one place.

``SEAMS`` is data: ``turnkey doctor`` prints the missing ones, and a contract test compares each signature with the
installed verl, so that a new verl fails there and not in the middle of a run.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transfer_queue import KVBatchMeta

SUPPORTED_VERL = ">=0.9,<0.10"
TESTED_VERL = ("0.9.1",)
NO_TRAJECTORIES = "no materializable trajectories"
"""part of the error message of the synchronous replay buffer when no episode of a batch left a row"""


@dataclass(frozen=True)
class Seam:
    """One private part of verl: its module and name, the parameters we rely on, and our use of it."""

    module: str
    name: str
    parameters: str
    why: str

    def problem(self) -> str | None:
        """None when the installed verl has it as expected."""
        try:
            thing: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                thing = getattr(thing, part)
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.name} is gone ({error})"
        if not callable(thing):
            return None
        # Ray adds a parameter of its own to the methods of an actor class.
        found = ", ".join(name for name in inspect.signature(thing).parameters if name != "_ray_trace_ctx")
        if found != self.parameters:
            return f"{self.module}.{self.name}({found}) was ({self.parameters})"
        return None


_BASE = "verl.trainer.ppo.v1.trainer_base"
SEAMS = (
    Seam(_BASE, "TRAINER_REGISTRY", "", "our trainers are found by name"),
    Seam(_BASE, "PPOTrainer.__init__", "self, config", "the mode name is mapped back to verl's own"),
    Seam(_BASE, "PPOTrainer._setup", "self", "worker groups are wrapped once they exist"),
    Seam(_BASE, "PPOTrainer._compute_advantage", "self, batch, metrics", "steps and records reach the estimator"),
    Seam(_BASE, "PPOTrainer.step", "self, metrics, timing_raw", "metrics of several updates are combined"),
    Seam(_BASE, "PPOTrainer._balance_batch", "self, batch, metrics, logging_prefix, keep_minibatch", "deals episodes"),
    Seam(
        "verl.single_controller.base.worker",
        "Worker._query_dispatch_info",
        "self, mesh_name",
        "the number of data-parallel ranks",
    ),
    Seam(
        "verl.trainer.ppo.padding_utils",
        "upsample_batch_to_divisible_size",
        "batch, batch_multiple, eos_token_id",
        "padding rows fill up every mini-batch",
    ),
    Seam("verl.utils.seqlen_balancing", "log_seqlen_unbalance", "seqlen_list, partitions, prefix", "verl's metrics"),
    Seam(_BASE, "PPOTrainer._compute_ref_log_prob", "self, batch, metrics", "its adapter setting is removed"),
    Seam(_BASE, "PPOTrainer._add_prompts_to_generate", "self, num_prompts", "lost batches are replaced"),
    Seam(_BASE, "PPOTrainer.on_step_begin", "self", "a run that has to stop ends there"),
    Seam(_BASE, "PPOTrainer._rollout_server_managers", "self", "inference servers are asked whether they are alive"),
    Seam("verl.trainer.main_ppo", "run_ppo", "config, task_runner_class", "signals end the run after a step"),
    Seam(_BASE, "PPOTrainer._save_checkpoint", "self", "a run that stops writes a checkpoint"),
    Seam(_BASE, "PPOTrainer._load_checkpoint", "self", "rows without prompts are cleared after it"),
    Seam(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._evict_terminal_groups",
        "self, global_steps, partition_id, eviction_reasons",
        "dropped groups are counted",
    ),
    Seam(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.sample",
        "self, global_steps, partition_id, batch_size",
        "a batch of which all episodes failed is replaced",
    ),
    Seam(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._dapo_filtered_keys",
        "self, partition_id",
        "groups are judged by their played episodes",
    ),
    Seam(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._materialize_batch",
        "self, partition_id, selected_prompt_uids, partition_snapshot",
        "prompts without any row are counted",
    ),
    Seam(_BASE, "PPOTrainer._submit_batch_to_rollout", "self, batch", "prompts may say how many rollouts they get"),
    Seam(
        _BASE,
        "PPOTrainer._val_metrics_update",
        "self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts",
        "validation metrics are over played episodes",
    ),
    Seam(_BASE, "PPOTrainer._update_actor", "self, batch, metrics", "calls update_actor with batch.extra_info"),
    Seam(_BASE, "PPOTrainer._update_critic", "self, batch, metrics", "calls train_mini_batch with batch.extra_info"),
    Seam(
        "verl.trainer.ppo.v1.utils",
        "compute_advantage_for_multi_trajectories",
        "data, batch_keys, adv_estimator, gamma, lam, num_repeat, norm_adv_by_std_in_grpo, config",
        "hands every row, in the order of batch.keys, to the registered estimator",
    ),
    Seam("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY", "", "estimators are registered by name"),
    Seam("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY", "", "policy losses are registered by name"),
    Seam(
        "verl.trainer.ppo.core_algos",
        "agg_loss",
        "loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor",
        "our losses are averaged as verl's are",
    ),
    Seam("verl.workers.utils.losses", "ppo_loss", "config, model_output, data, dp_group", "calls our losses"),
    Seam("verl.workers.utils.losses", "value_loss", "config, model_output, data, dp_group", "takes token weights"),
    Seam("verl.workers.utils.padding", "no_padding_2_padding", "tensor, data", "log-probs of the second pass"),
    Seam("verl.workers.engine.base", "BaseEngine.train_batch", "self, data, loss_function", "one optimizer step"),
    *(
        Seam("verl.workers.engine.fsdp.transformer_impl", f"FSDPEngine.{name}", parameters, "gradients are scaled")
        for name, parameters in (
            ("forward_backward_batch", "self, data, loss_function, forward_only"),
            ("optimizer_step", "self"),
            ("optimizer_zero_grad", "self"),
        )
    ),
    Seam("verl.experimental.agent_loop.agent_loop", "_agent_loop_registry", "", "our agent loop's target goes there"),
    Seam("verl.utils.config", "validate_config", "config, use_reference_policy, use_critic", "checks in the driver"),
    Seam(
        "verl.trainer.ppo.v1.agent_loop_tq",
        "AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess",
        "self, output, validate, kwargs",
        "a list of outputs becomes rows {uid}_{session}_{index}",
    ),
    Seam(_BASE, "PPOTrainer.fit", "self, agent_loop_manager", "agent-loop workers are checked before the first step"),
    Seam("verl.utils.tracking", "Tracking.log", "self, data, step, backend", "metrics are in the trajectory log, too"),
    Seam(
        "verl.trainer.ppo.v1.agent_loop_tq",
        "AgentLoopManagerTQ.generate_sequences",
        "self, prompts",
        "deals a call's prompts to agent_loop_workers, from the first on",
    ),
    *(
        Seam("verl.workers.engine_workers", f"{name}", "self, data", "fields and mini-batches are set before the call")
        for name in (
            "ActorRolloutRefWorker.compute_log_prob",
            "ActorRolloutRefWorker.compute_ref_log_prob",
            "ActorRolloutRefWorker.update_actor",
            "TrainingWorker.infer_batch",
            "TrainingWorker.train_mini_batch",
        )
    ),
    Seam(
        "verl.workers.rollout.llm_server",
        "LLMServerClient.generate",
        "self, request_id, prompt_ids, sampling_params, image_data, video_data, audio_data, mm_processor_kwargs, "
        "kwargs",
        "generates ids from ids",
    ),
    Seam(
        "verl.utils.tokenizer.continuous_token",
        "ContinuousTokenBuilder.build_initial_tokens",
        "self, messages, tools, images, videos, audios, mm_inputs_out",
        "prompts are rendered by verl and measured by us",
    ),
    Seam(
        "verl.utils.tokenizer.continuous_token",
        "ContinuousTokenBuilder.merge_context_tokens",
        "self, previous_messages, updated_messages, runtime_token_ids, tools",
        "appends messages to a conversation",
    ),
    Seam(
        "verl.utils.tokenizer.continuous_token_wiring",
        "create_continuous_token_builder",
        "tokenizer, model_family, hf_model_type, chat_template_kwargs, mm_processor_kwargs, processor, builder_kwargs",
        "a conversation is rendered before training",
    ),
    Seam("verl.workers.rollout.utils", "get_max_position_embeddings", "hf_config", "the longest conversation"),
)


def verl_version() -> str:
    """Version of the installed verl.

    Raises:
        importlib.metadata.PackageNotFoundError: verl is not installed.
    """
    from importlib.metadata import version

    return version("verl")


def unsupported_verl() -> str | None:
    """A warning when the installed verl is outside the supported range, else None."""
    from packaging.specifiers import SpecifierSet

    found = verl_version()
    if SpecifierSet(SUPPORTED_VERL, prereleases=True).contains(found):
        return None
    return (
        f"verl {found} is outside the supported range {SUPPORTED_VERL} (tested: {', '.join(TESTED_VERL)}); "
        "run `turnkey doctor` to see which private parts moved"
    )


def actor_worker(process: Any) -> Any:
    """The worker with the actor's engine inside a Ray process of the trainer; verl puts several roles into one.

    Raises:
        RuntimeError: there is none.
    """
    return _worker(process, "an actor", lambda worker: getattr(getattr(worker, "actor", None), "engine", None))


def critic_worker(process: Any) -> Any:
    """The worker with the critic's engine, likewise: the one whose loss is verl's ``value_loss``.

    Raises:
        RuntimeError: there is none.
    """
    from verl.workers.utils.losses import value_loss

    def is_it(worker: Any) -> bool:
        return getattr(getattr(worker, "loss_fn", None), "func", None) is value_loss

    return _worker(process, "a critic", is_it)


def _worker(process: Any, what: str, is_it: Callable[[Any], Any]) -> Any:
    inside = [*getattr(process, "worker_dict", {}).values(), *getattr(process, "fused_worker_dict", {}).values()]
    for worker in (process, *inside):
        if is_it(worker):
            return worker
    raise RuntimeError(
        f"found no worker with {what} in {type(process).__name__}; has verl changed? See `turnkey doctor`"
    )


class _WithoutFlush(logging.LoggerAdapter):
    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        kwargs.pop("flush", None)
        return msg, kwargs


@contextmanager
def logger_of(module: ModuleType) -> Iterator[None]:
    """verl's separate_async calls its logger with ``flush=``, which no logger takes, when hybrid_engine is false."""
    original = module.logger
    module.logger = _WithoutFlush(original, {})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.logger = original  # type: ignore[attr-defined]


def deal_in_turn(manager: Any) -> None:
    """Make ``manager.generate_sequences`` rotate: each call begins with the agent-loop worker after the last one used.

    verl always begins with the first worker, which would get all prompts that are requested one by one.
    """
    generate = manager.generate_sequences

    def generate_sequences(prompts: TensorDict) -> Any:
        workers = manager.agent_loop_workers
        used = len(prompts.chunk(len(workers)))
        result = generate(prompts)
        manager.agent_loop_workers = workers[used:] + workers[:used]
        return result

    manager.generate_sequences = generate_sequences


def mark_validation(manager: Any, field: str) -> None:
    """Make ``manager.generate_sequences`` set ``field`` on validation prompts; verl's loops do not see its own mark."""
    from verl.utils.tensordict_utils import assign_non_tensor_data

    generate = manager.generate_sequences

    def generate_sequences(prompts: TensorDict) -> Any:
        if "validate" in prompts:
            assign_non_tensor_data(prompts, field, True)
        return generate(prompts)

    manager.generate_sequences = generate_sequences


def data_parallel_size(group: Any, role: str = "actor") -> int:
    """Number of data-parallel ranks of a worker group; asked for and remembered as verl's ``_balance_batch`` does."""
    if role not in group._dispatch_info:
        group._dispatch_info[role] = group._query_dispatch_info(role)
    return max(group._dispatch_info[role]) + 1


def queue_fields(batch: KVBatchMeta) -> list[str]:
    """Names of all fields that the rows of ``batch`` share in TransferQueue.

    In a batch fresh from the replay buffer ``batch.fields`` is None, which verl reads as "all".
    """
    if batch.fields is not None:
        return list(batch.fields)
    import transfer_queue as tq

    meta = tq.get_client().kv_retrieve_meta(keys=batch.keys, partition_id=batch.partition_id, create=False)
    return list(meta.field_names)
