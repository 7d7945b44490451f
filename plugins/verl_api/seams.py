"""The private parts of verl that this package relies on, as data, and whether the installed verl has them.

A new verl shows here what it moved, and not in the middle of a run: ``turnkey doctor --verl`` prints it, and a contract
test compares each part with the installed verl. What our files import from verl is read from their source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GONE = ""
"""in ``Seam.older``: a version did not have the part yet"""


@dataclass(frozen=True)
class Moved:
    """A part of verl that differs from all supported versions.

    ``installed`` is "" when it is gone; ``fault`` is the exception of its module, other than that the part is missing.
    """

    module: str
    name: str
    expected: tuple[str, ...]
    installed: str
    fault: str = ""

    def __str__(self) -> str:
        if self.fault:
            return f"{self.module}.{self.name} cannot be imported: {self.fault}"
        if not self.installed:
            return f"{self.module}.{self.name} is gone"
        return f"{self.module}.{self.installed} was {' or '.join(text or 'not there' for text in self.expected)}"


@dataclass(frozen=True)
class Seam:
    """A private part of verl: its module and name, the parameters that we rely on, and our use of it.

    ``older``: the part in older supported versions, as ``name(parameters)``.
    """

    module: str
    name: str
    parameters: str
    why: str
    older: tuple[str, ...] = ()

    @property
    def expected(self) -> tuple[str, ...]:
        """The part in each supported version, newest first."""
        return (f"{self.name}({self.parameters})", *self.older)

    def moved(self) -> Moved | None:
        """None if the part of the installed verl is that of a supported version."""
        installed = ""
        for text in filter(None, self.expected):
            name = text.partition("(")[0]
            try:
                now = self._signature(name)
            except Exception as error:  # a development version may raise anything
                return Moved(self.module, self.name, self.expected, "", f"{type(error).__name__}: {error}")
            if now in (text, name):
                return None
            installed = installed or now
        if not installed and GONE in self.expected:
            return None
        return Moved(self.module, self.name, self.expected, installed)

    def _signature(self, name: str) -> str:
        """``name(parameters)`` as installed, ``name`` if it is not callable, "" if it does not exist."""
        try:
            thing: Any = importlib.import_module(self.module)
            for part in name.split("."):
                if inspect.ismodule(thing) and not hasattr(thing, part):
                    importlib.import_module(f"{thing.__name__}.{part}")
                thing = getattr(thing, part)
        except (ImportError, AttributeError):
            return ""
        if not callable(thing):
            return name
        # Ray adds a parameter of its own to the methods of an actor class.
        return f"{name}({', '.join(p for p in _parameters(thing, name.split('.')[-1]) if p != '_ray_trace_ctx')})"


def _parameters(thing: Any, name: str) -> list[str]:
    """The parameters of the function ``name``, also inside a decorator without ``functools.wraps``."""
    parameters = inspect.signature(thing).parameters
    if [*parameters] == ["args", "kwargs"]:
        contents = (cell.cell_contents for cell in getattr(inspect.unwrap(thing), "__closure__", None) or ())
        inner = next((cell for cell in contents if inspect.isfunction(cell) and cell.__name__ == name), thing)
        parameters = inspect.signature(inner).parameters
    return [*parameters]


_BASE, _WORKERS = "verl.trainer.ppo.v1.trainer_base", "verl.workers.engine_workers"
_ENGINE, _RAY = "verl.workers.engine.fsdp.transformer_impl", "verl.single_controller.ray.base"
_OUTPUTS = "self, output, output_args, micro_batch, logits_processor_func"
SEAMS = (
    Seam(_BASE, "TRAINER_REGISTRY", "", "our trainers are found by name"),
    Seam(_BASE, "PPOTrainer.__init__", "self, config", "the mode name is mapped back to verl's own"),
    Seam(_BASE, "PPOTrainer._setup", "self", "worker groups are wrapped once they exist"),
    Seam(_BASE, "PPOTrainer._compute_advantage", "self, batch, metrics", "steps and records reach the estimator"),
    Seam(_BASE, "tq", "", "its advantage step and ours read and write the queue together"),
    *(
        Seam("transfer_queue", name, parameters, why)
        for name, parameters, why in (
            ("KVBatchMeta", "keys, tags, partition_id, fields, extra_info", "names the rows of a batch"),
            ("KVBatchMeta.reorder", "self, indexes", "a batch is dealt to mini-batches"),
            ("kv_batch_get", "keys, partition_id, select_fields", "reads rows"),
            ("kv_batch_put", "keys, partition_id, fields, tags, data_parser", "writes rows"),
            ("kv_clear", "keys, partition_id", "removes rows"),
            ("kv_list", "partition_id", "the tags of all rows"),
            ("get_client", "", "reads what fields rows have"),
            ("TransferQueueClient.kv_retrieve_meta", "self, keys, partition_id, create", "reads what fields rows have"),
        )
    ),
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
    Seam(_BASE, "apply_kl_penalty", "data, kl_ctrl, kl_penalty", "failed episodes and padding enter no mean of its KL"),
    Seam(
        _BASE,
        "compute_advantage_for_multi_trajectories",
        "data, batch_keys, adv_estimator, gamma, lam, num_repeat, norm_adv_by_std_in_grpo, config",
        "failed episodes and padding enter no statistic of verl's estimators",
    ),
    Seam(_BASE, "PPOTrainer._compute_old_log_prob", "self, batch, metrics", "the teacher's pass follows its forward"),
    Seam(
        "verl.trainer.ppo.v1.trainer_separate_async",
        "PPOTrainerSeparateAsync._compute_old_log_prob",
        "self, batch, metrics",
        "swaps weights in for the forward that the teacher's pass follows",
    ),
    Seam(_BASE, "PPOTrainer._compute_ref_log_prob", "self, batch, metrics", "its adapter setting is removed"),
    Seam(_BASE, "PPOTrainer._init_resource_pool_mgr", "self", "a critic with several heads takes the place of verl's"),
    Seam(_BASE, "PPOTrainer._compute_values", "self, batch, metrics", "values of further heads follow verl's"),
    Seam(
        "verl.utils.model",
        "load_valuehead_model",
        "local_path, torch_dtype, model_config, trust_remote_code",
        "a critic has as many outputs as heads",
    ),
    Seam(_BASE, "PPOTrainer._add_prompts_to_generate", "self, num_prompts", "lost batches are replaced"),
    Seam(_BASE, "PPOTrainer.on_step_begin", "self", "a run that has to stop ends there"),
    Seam(
        _BASE,
        "PPOTrainer._rollout_server_managers",
        "self",
        "inference servers are asked whether they are alive",
        older=(GONE,),
    ),
    Seam(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer",
        "config, tokenizer, role_worker_mapping, resource_pool_manager, ray_worker_group_cls, processor, "
        "train_dataset, val_dataset, collate_fn, train_sampler, device_name",
        "trainers of its kind are refused",
    ),
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
    Seam(_BASE, "PPOTrainer._validate", "self", "a validation of which most episodes failed is played again"),
    Seam(
        _BASE,
        "PPOTrainer._val_metrics_update",
        "self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts",
        "validation metrics are over played episodes",
        older=(
            "PPOTrainer._val_metrics_update(self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns)",
        ),
    ),
    Seam(
        _BASE,
        "process_validation_metrics",
        "data_sources, sample_uids, infos_dict, seed, expected_acc_counts",
        "values of failed episodes are left out",
        older=("process_validation_metrics(data_sources, sample_uids, infos_dict, seed)",),
    ),
    Seam(
        "verl.trainer.ppo.v1.replay_buffer",
        "FILTER_GROUPS_REWARD_METRIC",
        "",
        "groups are judged by the values that verl would compare",
        older=(GONE,),
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
    *(
        Seam("verl.workers.engine.fsdp.transformer_impl", f"FSDPEngineWithLMHead.{name}", args, "reads its states")
        for name, args in (
            ("prepare_model_inputs", "self, micro_batch"),
            ("prepare_model_outputs", "self, output, output_args, micro_batch, logits_processor_func"),
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
    *(
        Seam(module, name, parameters, "a process reward model in the actor's processes")
        for module, name, parameters in (
            (_ENGINE, "FSDPEngine._build_module", "self"),
            (_ENGINE, "FSDPEngineWithLMHead.prepare_model_outputs", _OUTPUTS),
            (_ENGINE, "FSDPEngineWithValueHead.prepare_model_outputs", _OUTPUTS),
            ("verl.workers.engine.base", "EngineRegistry.get_engine_cls", "model_type, backend"),
            ("verl.workers.engine.base", "EngineRegistry.register", "model_type, backend, device, vendor"),
            (_RAY, "RayWorkerGroup.spawn", "self, prefix_set"),
            (_RAY, "RayClassWithInitArgs.__init__", "self, cls, args, kwargs"),
            (_WORKERS, "TrainingWorker.__init__", "self, config"),
            (_WORKERS, "TrainingWorker.reset", "self"),
            (_WORKERS, "TrainingWorker.set_loss_fn", "self, loss_fn"),
            (_WORKERS, "TrainingWorker.load_checkpoint", "self, local_path, hdfs_path, del_local_after_load"),
            (
                _WORKERS,
                "TrainingWorker.save_checkpoint",
                "self, local_path, hdfs_path, global_step, max_ckpt_to_keep",
            ),
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
        older=(
            "ContinuousTokenBuilder.build_initial_tokens(self, messages, tools)",
            "ContinuousTokenBuilder.build_initial_tokens(self, messages, tools, images, videos, audios)",
        ),
    ),
    Seam(
        "verl.utils.tokenizer.continuous_token",
        "ContinuousTokenBuilder.merge_context_tokens",
        "self, previous_messages, updated_messages, runtime_token_ids, tools",
        "appends messages to a conversation",
        older=(
            "ContinuousTokenBuilder.merge_non_assistant_tokens(self, previous_messages, updated_messages, "
            "runtime_token_ids, tools)",
        ),
    ),
    Seam(
        "verl.utils.tokenizer.continuous_token_wiring",
        "create_continuous_token_builder",
        "tokenizer, model_family, hf_model_type, chat_template_kwargs, mm_processor_kwargs, processor, builder_kwargs",
        "a conversation is rendered before training",
        older=(
            "create_continuous_token_builder(tokenizer, model_family, model_path, tokenizer_name_or_path, "
            "chat_template_kwargs, builder_kwargs)",
        ),
    ),
    Seam("verl.workers.rollout.utils", "get_max_position_embeddings", "hf_config", "the longest conversation"),
)


def imports() -> Iterator[Seam]:
    """What the files of ``plugins`` import from verl, read from their source; here a part only has to be there."""
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
                for name in node.names:
                    yield Seam(str(node.module), name.name, "", f"imported by plugins/{path.relative_to(root)}")


def moved() -> list[tuple[Moved, str]]:
    """The parts of the installed verl that are not as expected, each with our use of it."""
    gone = [(what, seam.why) for seam in imports() if (what := seam.moved()) and not what.installed]
    return [*((what, seam.why) for seam in SEAMS if (what := seam.moved())), *gone]
