"""The memory that ``turnkey check --gpu`` estimates, against published sizes, transformers, torch and peft."""

from __future__ import annotations

import ast
import json
import logging
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from contract_tools import Compose
from transformers import AutoConfig, AutoModelForCausalLM
from verl.trainer.ppo.utils import need_critic
from verl.workers.rollout.utils import get_max_position_embeddings

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks import memory, resources
from verl_turnkey.plugins.checks.driver import resolve_and_check
from verl_turnkey.plugins.checks.findings import RuleWarning, collecting, id_of
from verl_turnkey.plugins.cli.main import _without_gpu
from verl_turnkey.plugins.config import machine

# model_type, hidden, inner, layers, heads, key-value heads, vocabulary, further keys -> published parameters.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    name: (
        published,
        {
            "model_type": kind,
            **dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers"), sizes[:3], strict=True)),
            **dict(zip(("num_attention_heads", "num_key_value_heads", "vocab_size"), sizes[3:], strict=True)),
            **further,
        },
    )
    for name, published, kind, sizes, further in (
        ("Qwen2.5-0.5B", 494_032_768, "qwen2", (896, 4864, 24, 14, 2, 151_936), {"tie_word_embeddings": True}),
        ("Qwen2.5-7B", 7_615_616_512, "qwen2", (3584, 18944, 28, 28, 4, 152_064), {"tie_word_embeddings": False}),
        ("Qwen3-8B", 8_190_735_360, "qwen3", (4096, 12288, 36, 32, 8, 151_936), {"tie_word_embeddings": False}),
        ("Llama-3.1-8B", 8_030_261_248, "llama", (4096, 14336, 32, 32, 8, 128_256), {"tie_word_embeddings": False}),
        ("Mistral-7B", 7_241_732_096, "mistral", (4096, 14336, 32, 32, 8, 32_000), {"tie_word_embeddings": False}),
        ("SmolLM2-135M", 134_515_008, "llama", (576, 1536, 30, 9, 3, 49_152), {"tie_word_embeddings": True}),
        (
            "Qwen3-30B-A3B",
            30_532_122_624,
            "qwen3_moe",
            (2048, 6144, 48, 32, 4, 151_936),
            {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        ),
    )
}
MODELS["Qwen3-8B"][1]["head_dim"] = 128
Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path, model_dir: Path) -> Written:
    """``written(name)``: a folder with the config.json of a published model, and a tokenizer of ours."""

    def write(name: str, **further: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in model_dir.glob("*token*"):
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps(MODELS[name][1] | further))
        return folder

    return write


@pytest.fixture
def estimated(compose: Compose, written: Written, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """``estimated(name, gpu, *words)``: bytes by phase and part."""

    def run(name: str, gpu: str, *words: str) -> dict[str, Any]:
        monkeypatch.setenv(machine.GPU, gpu)
        path = machine.model_folder(str(written(name) if name in MODELS else name)) or name
        config = compose("+turnkey=gigpo", *words, f"actor_rollout_ref.model.path={path}", "trainer.device=cuda")
        return memory.as_dict(config)

    return run


def warned(config: Any) -> dict[str, str]:
    """Rule -> its message, of warnings and refusals."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with collecting(config) as findings:
                resolve_and_check(config, use_critic=need_critic(config))
        except ConfigError:
            pass
    messages = [warning.message for warning in caught if isinstance(warning.message, RuleWarning)]
    return {str(id_of(message)): str(message) for message in (*messages, *findings.errors)}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_are_published(written: Written, name: str):
    shapes = memory.shapes(str(written(name)))
    assert shapes is not None
    assert shapes.parameters == MODELS[name][0]


def on_meta(folder: Path) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "SmolLM2-135M", "tiny"])
def test_weights_gradients_and_optimizer_are_torchs(estimated, written: Written, model_dir: Path, name: str):
    """Of one rank, in fp32; the tiny model's weights are counted in its file."""
    tiny = name == "tiny"
    update = estimated(str(model_dir) if tiny else name, "h200", "trainer.n_gpus_per_node=1")["phases"]["update"]
    with torch.device("meta"):
        config = json.loads((model_dir / "config.json").read_text()) if tiny else MODELS[name][1]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    weights = sum(p.numel() * p.itemsize for p in model.parameters())
    moments = sum(t.numel() * t.itemsize for state in optimizer.state.values() for t in state.values() if t.dim())
    assert update["weights"] == pytest.approx(weights, rel=0.01)
    assert update["gradients"] == pytest.approx(weights, rel=0.01)
    assert update["optimizer"] == pytest.approx(moments, rel=0.01)


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "Llama-3.1-8B"])
def test_activations_are_what_autograd_saves(written: Written, name: str):
    """Of a layer between two others, in bf16, by a model of the same kind that is narrow."""
    narrow = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    narrow |= {"head_dim": 32, "vocab_size": 64, "num_hidden_layers": 3}
    folder, tokens, saved = written(name, **narrow), 128, []
    shapes = memory.shapes(str(folder))
    for layers in (1, 3):
        config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa", num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config).bfloat16()
        own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

        def keep(tensor: torch.Tensor, own: set[int] = own, kept: dict[int, Any] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(torch.randint(64, (1, tokens)))
        saved.append(sum(storage.nbytes() for storage in kept.values()))
    assert shapes is not None
    assert shapes.saved == pytest.approx((saved[1] - saved[0]) / 2 / tokens, rel=0.02)


def test_adapters_are_pefts(written: Written):
    folder = written("Qwen2.5-0.5B")
    shapes = memory.shapes(str(folder))
    assert shapes is not None
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        chosen = peft.LoraConfig(r=16, target_modules=targets)
        model = peft.get_peft_model(on_meta(folder), chosen)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert shapes.adapters(targets, 16) == trained


def test_a_7b_on_8_gpus_by_hand(estimated):
    """Weights and gradients 4 bytes, AdamW 8, over 8 ranks; bf16 logits of 16,384 tokens, with temperature 1."""
    words = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384", "data.train_batch_size=512"]
    result = estimated("Qwen2.5-7B", "h100:8", *words, "trainer.n_gpus_per_node=8")
    rank, update = 7_615_616_512 / 8, result["phases"]["update"]
    states = [update[part] for part in ("weights", "gradients", "optimizer")]
    assert states == pytest.approx([4 * rank, 4 * rank, 8 * rank])
    assert result["phases"]["rollout"]["vLLM"] == pytest.approx(0.5 * 85.5e9)
    assert result["phases"]["rollout"]["weights, optimizer"] == pytest.approx(12 * rank)
    assert result["phases"]["log-prob"]["logits or a layer"] == 2 * 16_384 * 152_064
    two_nodes = estimated("Qwen2.5-0.5B", "h100:8", *words, "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    assert two_nodes["phases"]["update"]["weights"] == pytest.approx(4 * 494_032_768 / 16)


FEW = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048"
FULL = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768"
ENGINE = "actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize(
    ("words", "phase", "part", "factor"),
    [
        ([f"{ENGINE}.param_offload=true"], "rollout", "weights, optimizer", 2 / 3),
        ([f"{ENGINE}.param_offload=true", f"{ENGINE}.optimizer_offload=true"], "rollout", "weights, optimizer", 0),
        ([f"{ENGINE}.optimizer_offload=true"], "log-prob", "optimizer", 0),
        ([f"{ENGINE}.offload_policy=true", "actor_rollout_ref.actor.strategy=fsdp2"], "update", "optimizer", 0),
        ([f"{ENGINE}.fsdp_size=2"], "update", "weights", 4),
        ([f"{ENGINE}.model_dtype=bf16"], "update", "optimizer", 1 / 2),
        (["actor_rollout_ref.actor.optim.optimizer=SGD"], "update", "optimizer", 0),
        (["actor_rollout_ref.actor.entropy_coeff=0.01"], "update", "logits or a layer", 3),
        (["actor_rollout_ref.rollout.temperature=0.7"], "log-prob", "logits or a layer", 2),
        ([f"{ENGINE}.use_torch_compile=false"], "log-prob", "logits or a layer", 5),
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048"], "update", "activations", 1 / 4),
        (["actor_rollout_ref.model.enable_gradient_checkpointing=false"], "update", "activations", 32),
        (["actor_rollout_ref.rollout.free_cache_engine=false"], "update", "vLLM", None),
        (["+turnkey/loss=st_ppo"], "update", "second gradients", None),
    ],
)
def test_what_a_key_changes(estimated, written: Written, words, phase, part, factor):
    base = ["trainer.n_gpus_per_node=8", "data.train_batch_size=512"]
    base += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192"]
    base += ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]
    path = str(written("Qwen2.5-0.5B"))
    before, after = (estimated(path, "h100", *base, *further)["phases"][phase] for further in ([], words))
    if factor is None:
        assert after[part] > before.get(part, 0)
    else:
        assert after.get(part, 0) == pytest.approx(factor * before[part], rel=0.01)


def test_a_critic_is_beside_the_policy(estimated, written: Written):
    path = str(written("Qwen2.5-0.5B"))
    phases = estimated(path, "h100", "critic.enable=true", f"critic.model.path={path}")["phases"]
    states = 12 * 494_032_768 / 8
    assert phases["rollout"]["critic"] == phases["critic"]["actor"] == pytest.approx(states)
    assert phases["critic"]["logits or a layer"] < phases["update"]["logits or a layer"]


@pytest.mark.parametrize(
    ("gpu", "words", "rules"),
    [
        ("h100:8", [], set()),
        ("h100:4", [], {"gpu-number"}),
        ("4090:8", ["actor_rollout_ref.rollout.gpu_memory_utilization=0.8"], {"gpu-memory"}),
        ("4090:8", ["actor_rollout_ref.rollout.gpu_memory_utilization=0.4", FEW], {"vllm-memory"}),
        ("h100:1", ["trainer.n_gpus_per_node=1"], {"gpu-memory-states"}),
        ("h100:1", ["trainer.n_gpus_per_node=1", "actor_rollout_ref.model.lora_rank=16"], set()),
        # What a first run of a 7B model on eight GPUs meets: servers over all of them, vLLM's usual share, long rows.
        ("h100:8", ["actor_rollout_ref.rollout.tensor_model_parallel_size=8"], {"rollout-heads"}),
        ("", ["actor_rollout_ref.rollout.tensor_model_parallel_size=8"], {"rollout-heads"}),  # no GPU
        ("a100-40gb:8", ["actor_rollout_ref.rollout.gpu_memory_utilization=0.9"], {"gpu-memory"}),
        ("a100-40gb:8", [FULL, "actor_rollout_ref.actor.entropy_coeff=0.01"], {"gpu-memory"}),
    ],
)
def test_what_does_not_fit_is_named(compose, written: Written, monkeypatch, gpu, words, rules):
    monkeypatch.setenv(machine.GPU, gpu)
    path = written("Qwen2.5-7B", max_position_embeddings=32_768)
    keys = [f"actor_rollout_ref.model.path={path}", "trainer.device=cuda", "turnkey.env.probe=false"]
    size = [] if any(word.startswith("trainer.n_gpus") for word in words) else ["trainer.n_gpus_per_node=8"]
    messages = warned(compose("+turnkey=gigpo", *keys, *size, *words))
    assert {id for id in messages if re.search("gpu|memory|heads", id)} == rules, messages


def test_a_model_of_the_hub_is_read_in_its_cache(compose, written: Written, monkeypatch, tmp_path: Path):
    """As far as it is there: its limits are checked without a GPU, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--a--b"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("1")
    (cache / "snapshots").mkdir()
    written("SmolLM2-135M").rename(cache / "snapshots/1")
    config = compose("+turnkey=gigpo", "actor_rollout_ref.model.path=a/b")
    assert resources.model_config(config)["num_attention_heads"] == 9


def test_rope_scaling_counts_for_the_trainer_and_not_for_verls_servers(compose, written: Written):
    """Which hold rows to the model's own positions, unless the configuration overrides them."""
    path = written("Qwen2.5-0.5B", max_position_embeddings=32_768, rope_scaling=YARN)
    keys = [f"actor_rollout_ref.model.path={path}", "turnkey.env.probe=false", "data.max_prompt_length=40000"]
    keys += ["turnkey.teacher.source=gold_answer", "turnkey.teacher.max_tokens=1000"]
    config = compose("+turnkey=gigpo", *keys)
    assert resources.positions(config)[0] == get_max_position_embeddings(AutoConfig.from_pretrained(path)) == 32_768
    messages = warned(config)
    assert "teacher-positions" not in messages
    raising = "++actor_rollout_ref.model.override_config.max_position_embeddings"
    assert f"by YaRN's factor: raise it by {raising}) gives 32768" in messages["context-too-long"]
    assert "context-too-long" not in warned(compose("+turnkey=gigpo", *keys, f"{raising}=131072"))


def vllms_own(config: Any) -> int:
    """What vLLM's own functions, taken from its files because its import takes 1.5 GB, compute for a model."""
    root, made = Path(find_spec("vllm").origin).parent, dict[str, Any]()
    made |= {"logger": logging.getLogger(), "current_platform": SimpleNamespace(check_max_model_len=lambda most: most)}
    made |= {"is_rope_parameters_nested": lambda rope: not {"rope_type", "rope_theta"} & rope.keys()}
    for file, name in (
        ("transformers_utils/model_arch_config_convertor.py", "derive_max_model_len_and_key"),
        ("config/model.py", "_get_and_verify_max_len"),
    ):
        nodes = ast.walk(ast.parse((root / file).read_text()))
        body = [next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)]
        exec(compile(ast.Module([*body], []), file, "exec", flags=annotations.compiler_flag), made)
    derived = made["derive_max_model_len_and_key"](SimpleNamespace(hf_text_config=config))
    arch = SimpleNamespace(derived_max_model_len_and_key=derived)
    return made["_get_and_verify_max_len"](config, arch, None, -1, False, None)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
BY_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LINEAR}


@pytest.mark.parametrize(
    ("further", "own", "served"),
    [
        ({"max_position_embeddings": 32_768}, 32_768, 32_768),
        ({"max_position_embeddings": 32_768, "rope_scaling": YARN}, 32_768, 131_072),
        ({"max_position_embeddings": 262_144, "rope_scaling": YARN}, 262_144, 131_072),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192, 16_384),
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "dynamic", "factor": 2.5}}, 8192, 20_480),
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "linear", "factor": None}}, 8192, 8192),
        ({"max_position_embeddings": 131_072, "rope_scaling": LLAMA3}, 131_072, 131_072),
        ({"max_position_embeddings": 32_768, "seq_length": 8192}, 32_768, 8192),
        ({"max_position_embeddings": 8192, "rope_parameters": BY_LAYER, "model_type": "gemma3_text"}, 8192, 8192),
        ({"max_position_embeddings": 8192, "rope_parameters": BY_LAYER, "model_type": "gemma4_text"}, 8192, 65_536),
    ],
)
def test_positions_are_those_of_verl_and_vllm(written: Written, further, own, served):
    path = written("Qwen2.5-0.5B", **further)
    model = AutoConfig.from_pretrained(path)
    assert get_max_position_embeddings(model) == own
    assert resources.vllm_positions(machine.model_config(str(path))) == vllms_own(model) == served


def test_the_rollout_has_no_more_positions_than_verl_and_vllm_start_with(compose, written: Written, monkeypatch):
    limit, raised = "actor_rollout_ref.rollout.max_model_len", resources.RAISES_POSITIONS
    path = written("Qwen2.5-0.5B", max_position_embeddings=32_768, rope_scaling=YARN)

    def problem(*words: str, name: str = "vllm") -> str | None:
        base = [f"actor_rollout_ref.model.path={path}", f"actor_rollout_ref.rollout.name={name}"]
        return warned(compose("+turnkey=gigpo", "turnkey.env.probe=false", *base, *words)).get("max-model-len")

    above = f"{limit}=131073", f"{raised}=131073"
    message = "gives the rollout {} positions, but {} starts with at most {} for this model: set {}={}"
    verls = message.format(32_769, "verl", 32_768, limit, 32_768)
    assert problem(f"{limit}=32769") == f"{limit} {verls}, or, since vLLM allows it, {raised}=131072"
    assert problem(f"{limit}=131072", f"{raised}=131072") is None
    vllms = message.format(131_073, "vLLM", 131_072, limit, 131_072)
    assert (problem(*above), problem(above[1])) == (f"{limit} {vllms}", f"{raised[2:]} {vllms}")
    assert problem(*above, name="sglang") is None
    assert problem(*above, "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_theta=1e6") is None
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert problem(*above) is None
    assert problem(f"{limit}=32769") == f"{limit} {verls}", "which does not read the variable"
    of_workers = "+ray_kwargs.ray_init.runtime_env.env_vars.VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    assert problem(*above, f"{of_workers}='0'") == f"{limit} {vllms}", "which Ray puts in the variable's place"


@pytest.mark.parametrize(
    ("words", "size", "number"),
    [
        ([], 12, 3),  # weights, and AdamW's two numbers for each
        (["actor_rollout_ref.actor.checkpoint.save_contents=[model]"], 4, 3),
        (["actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"], 16, 3),
        ([f"{ENGINE}.fsdp_size=2"], 48, 3),  # each pair of ranks writes the whole model
        (["trainer.max_actor_ckpt_to_keep=null"], 12, 6),
        (["critic.enable=true", "trainer.max_actor_ckpt_to_keep=null"], 12 + 12 * 3 / 6, 6),
    ],
)
def test_checkpoints_are_compared_with_free_space(
    compose, written: Written, tmp_path, monkeypatch, words, size, number
):
    """Bytes per parameter, by what verl writes; the disk has nothing free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    path = written("Qwen2.5-0.5B")
    keys = [f"actor_rollout_ref.model.path={path}", f"critic.model.path={path}", "turnkey.env.probe=false"]
    keys += ["trainer.save_freq=10", "trainer.total_training_steps=60", f"trainer.default_local_dir={tmp_path}"]
    keys += [f"trainer.max_{role}_ckpt_to_keep=3" for role in ("actor", "critic")]
    message = warned(compose("+turnkey=gigpo", *keys, *words))["disk-space"]
    checkpoints, of_one, in_all = re.search(r"(\d+) checkpoints of (\S+) GB need (\S+) GB", message).groups()
    assert int(checkpoints) == number
    assert float(of_one) == pytest.approx(size * 0.494032768, rel=0.01)
    assert float(in_all) == pytest.approx(number * size * 0.494032768, rel=0.01)


def test_the_fix_of_a_micro_batch_fits(compose, written: Written, monkeypatch):
    monkeypatch.setenv(machine.GPU, "48GB:8")
    path, limit = written("Qwen2.5-7B", max_position_embeddings=131_072), "actor.ppo_max_token_len_per_gpu"
    keys = [f"actor_rollout_ref.model.path={path}", "trainer.device=cuda", "turnkey.env.probe=false"]
    keys += ["trainer.n_gpus_per_node=8", "data.train_batch_size=512", "actor_rollout_ref.actor.entropy_coeff=0.01"]
    message = warned(compose("+turnkey=gigpo", *keys, f"actor_rollout_ref.{limit}=65536"))["gpu-memory"]
    tokens = message.rpartition(f"lower actor_rollout_ref.{limit} to ")[2].split()[0]
    assert "gpu-memory" not in warned(compose("+turnkey=gigpo", *keys, f"actor_rollout_ref.{limit}={tokens}"))


def test_the_command(stock_overrides: list[str], written: Written, tmp_path: Path):
    words = ["+turnkey=gigpo", *stock_overrides, "turnkey.env.probe=false", "trainer.device=cuda"]
    command = [sys.executable, "-m", "verl_turnkey", "check", *words]
    done = subprocess.run([*command, "--gpu", "h100:8"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("memory of each GPU in GB, estimated, of 85.5 (h100):\n")[2]
    assert table.splitlines()[0].split() == ["rollout", "log-prob", "update"]
    assert "  peak: rollout, 54% of the memory\nready: nothing was started" in table
    done = subprocess.run([*command, "--gpu=40GB:8", "--json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["gpu"], result["limit"], result["gpus"]) == ("40gb", 40e9, 8)


@pytest.mark.parametrize(
    ("name", "fix"),
    [("some/model", "; `hf download some/model config.json` is enough"), ("/no/such/model", ""), ("./model", "")],
)
def test_a_model_that_is_not_here(estimated, name: str, fix: str):
    reason = estimated(name, "h100")["reason"]
    assert reason == f"actor_rollout_ref.model.path={name}: it is not on this machine{fix}"


def test_names_of_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(machine.GPU, raising=False)
    monkeypatch.setattr(machine, "visible_accelerator", lambda: True)
    for model, name in {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA GH200 480GB": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GeForce RTX 4090": "4090",
        "Tesla V100-SXM2-32GB": "32gb",
        "Quadro P9": None,
    }.items():
        monkeypatch.setattr(machine, "hardware", lambda model=model: {"accelerators": [model]})
        here = machine.gpu_here()
        assert (here and here.name) == name
    for text in ("h1000", "h100:0", "h100:many", ""):
        with pytest.raises(ConfigError, match=r"expected one of h100, .* or its memory as 80GB"):
            machine.Gpu.parse(text)
    assert _without_gpu(["a=1", "--gpu", "h200:4", "b=2"]) == (["a=1", "b=2"], "h200:4")
    with pytest.raises(ConfigError):
        _without_gpu(["a=1", "--gpu"])
