"""What a launch line needs of each GPU, in bytes: arithmetic on the shapes of its model, for FSDP with vLLM.

Weights, gradients and optimizer state are exact. Activations are what autograd saves for a layer like Llama's with
flash attention. CUDA, NCCL and fragmentation get an allowance, :data:`CONTEXTS`. Images, and the models of turnkey.prm
and of judges, are not counted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import ACTOR, MODEL, ROLLOUT, CheckedRun, run_of, spread_of
from verl_turnkey.plugins.config import machine
from verl_turnkey.plugins.config.checkpoint_files import FSDP

CONTEXTS = 3e9
"""bytes of two CUDA contexts, NCCL's buffers, the graphs of a sleeping vLLM, and fragments"""
WIDTHS = {"fp32": 4, "float32": 4, "32": 4}
"""bytes per number of a type; of all others 2"""
STATES = {"adam": 2, "lion": 1, "sgd": 0, "muon": 1}
"""numbers per weight that an optimizer keeps, by a part of its name"""
MICRO_BATCHES = {
    "actor": (f"{ACTOR}.ppo", f"{ACTOR}.use_dynamic_bsz"),
    "log_prob": (f"{ROLLOUT}.log_prob", f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
    "critic": ("critic.ppo", None),
}
"""pass -> prefix of the keys with its sizes, and the switch that splits it by tokens; None: it always is split"""
KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` whose parameters follow from config.json; for all others they are counted in the weight files"""


@dataclass(frozen=True)
class Shapes:
    """A decoder, as far as memory depends on it; numbers of parameters, and widths in numbers per token."""

    parameters: int
    layers: int
    layer: int
    """parameters of one"""
    vocabulary: int
    hidden: int
    linear: Mapping[str, tuple[int, int]]
    """inputs and outputs of the matrices of a layer, which may have adapters; those of experts once"""
    saved: int
    """bytes that autograd saves per token and layer, in 16 bits"""
    kv_heads: int
    head: int
    """width of a head"""

    def adapters(self, targets: Any, rank: int) -> int:
        """Parameters of LoRA; a regular expression counts like all-linear."""
        names = self.linear.keys() if isinstance(targets, str) or targets is None else {*targets}
        return self.layers * rank * sum(sum(sides) for name, sides in self.linear.items() if name in names)


def shapes(path: str) -> Shapes | None:
    """Those of the model at ``path``, or in the hub's cache; None if it is not here, or of another architecture."""
    folder = machine.model_folder(path)
    config = machine.model_config(str(folder)) if folder else {}
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    if folder is None or not all(isinstance(config.get(name), int) for name in needed):
        return None
    hidden, layers, heads, vocabulary, inner = (config[name] for name in needed)
    kind, kv_heads = config.get("model_type"), config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, kv_heads * head
    experts, chosen = config.get("num_experts") or 1, 1
    if experts > 1:
        inner, chosen = config.get("moe_intermediate_size") or inner, config.get("num_experts_per_tok") or 1
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    attention["o_proj"] = (queries, hidden)
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    layer = sum(a * b for a, b in attention.values()) + experts * sum(a * b for a, b in mlp.values()) + 2 * hidden
    layer += experts * hidden if experts > 1 else 0  # the router
    normed = str(kind).startswith("qwen3")
    layer += 2 * head if normed else 0
    if kind == "qwen2" or config.get("attention_bias"):
        layer += queries + 2 * keys + (0 if kind == "qwen2" else hidden)
    layer += 2 * inner + hidden if config.get("mlp_bias") else 0
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    if not (parameters := _stored(folder) or (layers * layer + embeddings + hidden if kind in KINDS else 0)):
        return None
    # Per token: two norms (4 + 2 bytes each, twice), the inputs of seven matrices, gate, up and their product.
    saved = 16 * hidden + 8 * inner * chosen + (10 if normed else 4) * (queries + keys)
    linear = {**attention, **mlp}
    return Shapes(parameters, layers, layer, vocabulary, hidden, linear, saved, kv_heads, head)


def _stored(folder: Path) -> int:
    """Parameters in the safetensors files of a model, from their headers; 0 if there are none."""
    number = 0
    for file in folder.glob("model*.safetensors"):
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length)) if length < file.stat().st_size else {}
            number += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError):
            header = {}
        if not header:  # a pointer of Git LFS, or a download that was cut
            return 0
    return number


@dataclass(frozen=True)
class Trained:
    """A model with optimizer on each GPU; bytes."""

    shapes: Shapes
    engine: Any
    """its FSDPEngineConfig"""
    optim: Any
    gpus: int
    adapters: int = 0
    """parameters of LoRA, which alone are trained then"""

    @property
    def trainable(self) -> int:
        return self.adapters or self.shapes.parameters

    @property
    def ranks(self) -> int:
        """GPUs that hold the model together."""
        size = self.engine.fsdp_size
        return self.gpus if size < 0 else min(size, self.gpus)

    @property
    def width(self) -> int:
        """Of a stored weight."""
        return WIDTHS.get(str(self.engine.get("model_dtype") or "fp32"), 2)

    @property
    def computes(self) -> int:
        """Bytes of a number in the forward pass."""
        return WIDTHS.get(str((self.engine.get("mixed_precision") or {}).get("param_dtype", "bf16")), 2)

    @property
    def weights(self) -> float:
        return (self.shapes.parameters + self.adapters) * self.width / self.ranks

    @property
    def gradients(self) -> float:
        return self.trainable * self.width / self.ranks

    @property
    def optimizer(self) -> float:
        name = str(self.optim.optimizer).lower()
        numbers = next((number for part, number in STATES.items() if part in name), 2)
        width = 1 if "8bit" in name else self.width
        return self.trainable * width * numbers / self.ranks

    def checkpoint(self, contents: Collection[str], lora_only: bool) -> float:
        """Bytes of a checkpoint: the shards of every rank, and for ``hf_model`` the whole model once more."""
        whole = (self.shapes.parameters + self.adapters) * self.width
        model = self.adapters * self.width / self.ranks if lora_only and self.adapters else self.weights
        shards = model * ("model" in contents) + self.optimizer * ("optimizer" in contents)
        return self.gpus * shards + whole * ("hf_model" in contents)

    @property
    def gathered(self) -> float:
        """Whole layers during a pass: this one, the next, and the gradients of this one on their way to the ranks."""
        largest = max(self.shapes.layer, self.shapes.vocabulary * self.shapes.hidden)
        kept = self.shapes.parameters if not self.engine.reshard_after_forward else 0
        return max(kept, 2 * largest) * self.computes

    def on_gpu(self, *, optimizer: bool = True, gradients: bool = False) -> dict[str, float]:
        """What is on the GPU while the model works; ``offload_policy`` keeps all of it in CPU memory."""
        if self.engine.get("offload_policy"):
            return {}
        parts = {"weights": self.weights, "gradients": self.gradients * gradients}
        return parts | {"optimizer": self.optimizer * optimizer}

    @property
    def idle(self) -> float:
        """What stays while another model or vLLM works."""
        parts, engine = self.on_gpu(optimizer=not self.engine.optimizer_offload), self.engine
        return sum(parts.values()) - (parts.get("weights", 0.0) if engine.param_offload else 0.0)


def models(run: CheckedRun) -> dict[str, Trained]:
    """Actor and critic, except one of unknown shapes; none where FSDP does not hold them."""
    if str(run.actor.strategy) not in FSDP:
        return {}
    config, model = run.config, run.config.actor_rollout_ref.model
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    nodes = {"actor": (model, run.actor.fsdp_config, run.actor.optim)}
    if run.use_critic:
        nodes["critic"] = (config.critic.model, config.critic.fsdp, config.critic.optim)
    return {
        role: Trained(own, engine, optim, gpus, own.adapters(node.get("target_modules"), node.get("lora_rank") or 0))
        for role, (node, engine, optim) in nodes.items()
        if (own := shapes(str(node.path))) is not None
    }


@dataclass(frozen=True)
class Estimate:
    """Bytes per GPU by phase and part, and the limit."""

    run: CheckedRun
    gpu: machine.Gpu
    actor: Trained
    critic: Trained | None

    @property
    def shapes(self) -> Shapes:
        return self.actor.shapes

    @property
    def apart(self) -> bool:
        """Whether vLLM has GPUs of its own."""
        return ROLLOUT in self.run.pools

    @property
    def vllm(self) -> float:
        return float(self.run.rollout.gpu_memory_utilization) * self.gpu.memory

    @cached_property
    def phases(self) -> dict[str, dict[str, float]]:
        """Phase -> part -> bytes."""
        actor, critic = self.actor, self.critic
        asleep = 0.0 if self.apart or self.run.rollout.free_cache_engine else self.vllm
        stays = {"vLLM": asleep, "CUDA, NCCL": CONTEXTS}
        idle_models = stays | ({"critic": critic.idle} if critic else {})
        idle = {} if self.apart else {"weights, optimizer": actor.idle, **idle_models}
        tokens = self.tokens("log_prob")
        layer = tokens * self.shapes.saved * actor.computes / 4  # half of it at a time
        log_prob = {
            **actor.on_gpu(optimizer=not actor.engine.optimizer_offload),
            "gathered layers": actor.gathered,
            "activations": 2.0 * tokens * self.shapes.hidden * actor.computes,
            "logits or a layer": max(self.logits("log_prob"), layer),
        }
        scales = callable(getattr(self.run.loss_params, "gradient_scale", None))
        update = self.update(actor, "actor") | ({"second gradients": actor.gradients} if scales else {})
        phases = {"rollout": {**idle, "CUDA, NCCL": CONTEXTS, "vLLM": self.vllm}}
        phases |= {"log-prob": log_prob | idle_models, "update": update | idle_models}
        return phases | ({"critic": self.update(critic, "critic") | stays | {"actor": actor.idle}} if critic else {})

    def update(self, of: Trained, name: str) -> dict[str, float]:
        """Parts of an update. With gradient checkpointing the input of each layer is kept, and one layer whole."""
        model, tokens = self.run.config.actor_rollout_ref.model, self.tokens(name)
        layer = tokens * of.shapes.saved * of.computes / 2
        kept = tokens * of.computes * of.shapes.hidden if model.enable_gradient_checkpointing else layer
        passes = {
            "gathered layers": 1.5 * of.gathered,
            "activations": kept * (2 if model.get("enable_activation_offload") else of.shapes.layers),
            "logits or a layer": max(self.logits(name), 1.5 * layer),  # with the gradients of half of it
        }
        step = of.gradients - sum(passes.values())  # AdamW's buffer, when the passes are over
        return {**of.on_gpu(gradients=True), **passes, **({"optimizer's step": step} if step > 0 else {})}

    def total(self, phase: str) -> float:
        return sum(self.phases[phase].values())

    def tokens(self, of: str) -> int:
        """Of the largest micro-batch on a GPU: by the limit of ``actor``, ``critic`` or ``log_prob``, or by rows."""
        key, switch = MICRO_BATCHES[of]
        most = int(self.run.get(f"{key}_max_token_len_per_gpu") or 0)
        if switch and not self.run.get(switch):
            rows = int(self.run.get(f"{key}_micro_batch_size_per_gpu") or 1)
            most = -(-rows * self.longest // spread_of(self.run.actor))
        rows = self.run.sizes.rows  # no micro-batch is longer than all rows of a rank
        return min(most, -(-rows.most // self.actor.gpus) * self.longest) if rows and rows.high else most

    @property
    def longest(self) -> int:
        """Tokens of a row at most."""
        return int(self.run.rollout.prompt_length) + int(self.run.rollout.response_length)

    def logits(self, of: str) -> float:
        """As verl computes them: in place, unless with entropy; its softmax is fused by torch.compile."""
        actor, run, trains = self.actor, self.run, of == "actor"
        if of == "critic" or run.get(f"{MODEL}.use_fused_kernels"):
            return 0.0
        entropy = not trains or run.actor.get("calculate_entropy") or float(run.actor.entropy_coeff or 0) != 0
        width = actor.computes * (1 if float(run.rollout.temperature) == 1 else 2)
        width += 8 if entropy and not actor.engine.use_torch_compile else 0  # softmax, times logits, in 32 bits
        width += 2 * actor.computes if entropy and trains else 0  # gradients of log-probability and of entropy
        return float(self.tokens(of) * self.shapes.vocabulary * width)

    @property
    def vllm_least(self) -> float:
        """Bytes of vLLM for its weights and one sequence of maximum length."""
        rollout, shape = self.run.rollout, self.shapes
        parallel = int(rollout.tensor_model_parallel_size) * int(rollout.get("pipeline_model_parallel_size") or 1)
        width = WIDTHS.get(str(rollout.dtype), 2)
        sequence = int(rollout.max_model_len or self.longest)
        heads = max(1, shape.kv_heads / int(rollout.tensor_model_parallel_size))
        cache = 2 * sequence * shape.layers * heads * shape.head * width
        batch = int(rollout.max_num_batched_tokens or 0) * shape.saved / 2 / parallel
        return shape.parameters * width / parallel + cache + batch


def estimate(run: CheckedRun, gpu: machine.Gpu) -> Estimate | str:
    """The estimate, or why there is none."""
    if str(run.actor.strategy) not in FSDP:
        return f"{ACTOR}.strategy={run.actor.strategy}: only FSDP is estimated"
    known = models(run)
    for role, key in {"actor": f"{MODEL}.path", **({"critic": "critic.model.path"} if run.use_critic else {})}.items():
        if role not in known:
            name = str(run.get(key))
            why = "its architecture is unknown here"
            if machine.model_folder(name) is None:
                download = f"; `hf download {name} config.json` is enough" if machine.on_hub(name) else ""
                why = f"it is not on this machine{download}"
            return f"{key}={name}: {why}"
    return Estimate(run, gpu, known["actor"], known.get("critic"))


def _gpu_of(config: DictConfig) -> machine.Gpu | None:
    """The GPU that the user named, else this machine's, unless the run is on a CPU or joins a cluster of others."""
    elsewhere = machine.joins_cluster(config) and not os.environ.get(machine.GPU)
    return None if elsewhere or str(config.trainer.device) == "cpu" else machine.gpu_here()


def check_memory(run: CheckedRun) -> None:
    """Warn of what will not fit into the memory of the GPUs; refuse weights and an optimizer that alone do not."""
    if (gpu := _gpu_of(run.config)) is None:
        return
    per_node = run.config.trainer.n_gpus_per_node
    if gpu.number and per_node > gpu.number:
        warn("gpu-number", per_node=per_node, number=gpu.number, name=gpu.name)
    result = estimate(run, gpu)
    if isinstance(result, str):
        return
    limit = in_gb(gpu.memory)
    actor = result.actor
    states = 0.0 if actor.engine.get("offload_policy") else actor.weights + actor.optimizer * run.trains
    if states > gpu.memory:
        refuse("gpu-memory-states", states=in_gb(states), limit=limit, name=gpu.name, gpus=result.actor.gpus)
        return
    if result.vllm < result.vllm_least and run.rollout.name == "vllm":
        share = f"{result.vllm_least / gpu.memory + 0.01:.2f}"
        warn("vllm-memory", share=in_gb(result.vllm), least=in_gb(result.vllm_least), enough=share)
    for phase in result.phases if run.trains else ("rollout",):
        if result.total(phase) > gpu.memory:
            need, way_out = in_gb(result.total(phase)), _way_out(result, phase)
            warn("gpu-memory", phase=phase, need=need, limit=limit, name=gpu.name, fix=way_out)


def _way_out(result: Estimate, phase: str) -> str:
    """The key to change, so that ``phase`` fits."""
    parts, over = result.phases[phase], result.total(phase) - result.gpu.memory
    offload = f"{ACTOR}.fsdp_config.param_offload=true {ACTOR}.fsdp_config.optimizer_offload=true"
    if phase == "rollout":
        share = int(100 * (result.vllm - over) / result.gpu.memory) / 100
        lower = f"lower {ROLLOUT}.gpu_memory_utilization to {share}, or " if share > 0 else ""
        return f"{lower}set {offload}"
    of = {"log-prob": "log_prob", "update": "actor"}.get(phase, phase)
    key, switch = MICRO_BATCHES[of]
    if switch and not result.run.get(switch) and int(result.run.get(f"{key}_micro_batch_size_per_gpu") or 1) > 1:
        return f"lower {key}_micro_batch_size_per_gpu, or set {switch}=true"
    varies, tokens = parts["activations"] + parts["logits or a layer"], result.tokens(of)
    fits = int(tokens * (1 - over / varies)) // 256 * 256
    if fits >= result.longest:
        return f"lower {MICRO_BATCHES[of][0]}_max_token_len_per_gpu to {fits}"
    if of != "log_prob" and not result.run.get(f"{MODEL}.enable_gradient_checkpointing"):
        return f"set {MODEL}.enable_gradient_checkpointing=true"
    if fits > 0:
        return f"raise {ACTOR}.ulysses_sequence_parallel_size, and lower {MICRO_BATCHES[of][0]}_max_token_len_per_gpu"
    return f"use more GPUs, or {ACTOR}.strategy=fsdp2 {ACTOR}.fsdp_config.offload_policy=true"


def in_gb(number: float) -> str:
    """Bytes in GB, with at least three digits."""
    return f"{number / 1e9:,.0f}" if number >= 1e11 else f"{number / 1e9:.3g}"


def table(config: DictConfig) -> Iterator[str]:
    """The table of :func:`as_dict`; a sentence where there can be none, nothing without a GPU."""
    if not (result := as_dict(config)):
        return
    if reason := result.get("reason"):
        yield f"memory of the GPUs cannot be estimated: {reason}"
        return
    phases, limit = result["phases"], result["limit"]
    yield f"memory of each GPU in GB, estimated, of {limit / 1e9:.1f} ({result['gpu']}):"
    yield f"  {'':<20}" + "".join(f"{phase:>10}" for phase in phases)
    names = [*dict.fromkeys(part for parts in phases.values() for part in parts if part != "total"), "total"]
    for name in names:
        cells = [parts.get(name, 0) / 1e9 for parts in phases.values()]
        yield f"  {name:<20}" + "".join(f"{f'{cell:.1f}' if cell else '':>10}" for cell in cells)
    peak = max(phases, key=lambda phase: phases[phase]["total"])
    yield f"  peak: {peak}, {phases[peak]['total'] / limit:.0%} of the memory"


def as_dict(config: DictConfig) -> dict[str, Any]:
    """Bytes of each GPU by phase and part, and the limit; or the reason why there are none; empty without a GPU."""
    if (gpu := _gpu_of(config)) is None:
        return {}
    if isinstance(result := estimate(run_of(config), gpu), str):
        return {"gpu": gpu.name, "reason": result}
    phases = {phase: {**parts, "total": sum(parts.values())} for phase, parts in result.phases.items()}
    sizes = {"gpus": result.actor.gpus, "parameters": result.shapes.parameters, "vllm_least": result.vllm_least}
    return {"gpu": gpu.name, "limit": gpu.memory, **sizes, "phases": phases}
