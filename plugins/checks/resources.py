"""Checks of what a run needs on its machines: models, adapters, folders to write to, packages, and Ray's resources."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.http import on_this_machine
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import MODEL, ROLLOUT, CheckedRun
from verl_turnkey.plugins.config import machine
from verl_turnkey.plugins.config.checkpoint_files import FSDP, TRACKER
from verl_turnkey.plugins.config.machine import joins_cluster, visible_accelerator
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.log.writer import read_segments

NAMES, CHECKPOINTS = ("project_name", "experiment_name"), "default_local_dir"
"""keys below ``trainer`` that identify a run, and the one with its checkpoint folder"""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""files of a vision-language model"""
LONGEST_SOCKET = 107
"""bytes of the path of a socket on Linux"""
LOG = "turnkey.log.trajectories"
RAISES_POSITIONS = f"++{MODEL}.override_config.max_position_embeddings"
MODEL_FILES = f" of {MODEL}.path="
LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""vLLM takes the smallest as a model's positions"""


def check_paths(run: CheckedRun) -> None:
    """Refuse models that are not there and folders that cannot be written to."""
    config, trainer = run.config, run.config.trainer
    _check_model(config, f"{MODEL}.path")
    for key in (f"{MODEL}.tokenizer_path", f"{MODEL}.lora_adapter_path", "turnkey.prm.path"):
        _check_model(config, key, weights=False)
    if run.use_critic:
        _check_model(config, "critic.model.path")
    folders = {LOG: run.turnkey.log.trajectories}
    folders |= {f"trainer.{key}": trainer.get(key) for key in ("rollout_data_dir", "validation_data_dir")}
    if trainer.save_freq > 0:
        folders["trainer.default_local_dir"] = trainer.default_local_dir
    for key, folder in folders.items():
        check_address(key, folder)
        if not folder:
            continue
        path = Path(folder).expanduser().absolute()
        at = next(path for path in (path, *path.parents) if path.exists())
        if not (at.is_dir() and os.access(at, os.W_OK | os.X_OK)):
            reason = f"no permission to write to {at}" if at.is_dir() else f"{at} is a file"
            absent(config, f"{key}={folder} cannot be written to: {reason}")


def check_sockets(config: DictConfig) -> None:
    """Refuse a folder of Ray's in which the path of a socket would be too long."""
    key = "ray_kwargs.ray_init._temp_dir"
    folder = OmegaConf.select(config, key)
    for name in ("RAY_TMPDIR", "TMPDIR") if folder is None else ():  # in this order, as Ray
        if folder is None and (value := os.environ.get(name)):
            key, folder = name, value
    if folder is None or joins_cluster(config):
        return
    session = f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    below = "" if key.startswith("ray_kwargs") else "ray/"
    length = len(os.fsencode(f"{folder}/{below}{session}/sockets/plasma_store"))
    if length > LONGEST_SOCKET:
        refuse("socket-path", key=key, folder=folder, length=length)


def check_address(key: str, folder: str | None) -> None:
    """Refuse an address (of a bucket, for example) in the place of a folder: one of that name would be created here."""
    if folder and "://" in folder:
        refuse("folder-address", key=key, folder=folder)


def check_otlp(run: CheckedRun) -> None:
    """Refuse an address of no receiver, traces without a log, and a missing exporter."""
    from verl_turnkey.plugins.view.traces import endpoint

    if (url := run.turnkey.log.otlp) is None:
        return
    try:
        endpoint(url)
    except ValueError:
        refuse("otlp-address", url=masked(url))
    if not run.turnkey.log.trajectories:
        refuse("otlp-without-log", url=masked(url))
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        package = "opentelemetry-exporter-otlp-proto-http"
        absent(run.config, f"turnkey.log.otlp needs the package {package}: pip install it")


def check_servers(run: CheckedRun) -> None:
    """Warn of servers at an address that each of several nodes takes for itself."""
    nodes = max(nodes for nodes, _ in run.pools.values())
    for key, url in _urls("turnkey", OmegaConf.to_container(run.config.turnkey, resolve=True)) if nodes > 1 else ():
        if on_this_machine(url):
            warn("server-of-each-node", key=key, url=masked(url), nodes=nodes)


def _urls(key: str, node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, str) and node.startswith(("http://", "https://")):
        yield key, node
    below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, entry in below:
        yield from _urls(f"{key}.{name}", entry)


def check_log_folder(run: CheckedRun) -> None:
    """Refuse a folder with another run's log, whose steps and texts would be replaced; after the checkpoint is chosen.

    A run that starts over with the same names and checkpoint folder is a second attempt and causes a warning only: the
    first may have stopped before its first checkpoint. A run that resumes may have moved.
    """
    folder, trainer = run.turnkey.log.trajectories, run.config.trainer
    if not folder or not (starts := [_trainer(differences) for differences in read_segments(Path(folder)).values()]):
        return
    earlier, auto = starts[-1], trainer.resume_mode == "auto" and (Path(trainer[CHECKPOINTS]) / TRACKER).is_file()
    resumes = auto or trainer.resume_mode == "resume_path"
    log, at = (earlier.get(key) for key in (LOG, CHECKPOINTS))
    with_it = log and at and os.path.relpath(at, log) == os.path.relpath(trainer.get(CHECKPOINTS), folder)
    compared = NAMES if resumes or with_it else (*NAMES, CHECKPOINTS)  # both may have been moved or copied
    here = {key: masked(trainer.get(key)) for key in compared}
    if different := [key for key in compared if key in earlier and earlier[key] != here[key]]:
        differences = ", ".join(f"trainer.{key}={earlier[key]}, here {here[key]}" for key in different)
        refuse("log-of-another-run", folder=folder, differences=differences)
    if not resumes:
        warn("log-of-earlier-start", folder=folder, resume_mode=trainer.resume_mode)


def _trainer(segment: dict[str, Any]) -> dict[str, Any]:
    """The node ``trainer`` of an earlier start's configuration, and its folder of the log; empty if unknown."""
    try:
        return {**segment["config"]["trainer"], LOG: segment["config"]["turnkey"]["log"]["trajectories"]}
    except (KeyError, TypeError):
        return {}


def check_joining(config: DictConfig) -> None:
    """Refuse options that Ray accepts only when it starts a cluster; its own error names no key."""
    options = config.ray_kwargs.ray_init
    keys = [f"ray_kwargs.ray_init.{key}" for key in ("num_cpus", "num_gpus") if options.get(key) is not None]
    if keys and joins_cluster(config):
        settings = " and ".join(f"{key}={OmegaConf.select(config, key)}" for key in keys)
        refuse("joined-cluster-resources", settings=settings, unset=" ".join(f"{key}=null" for key in keys))


def absent(config: DictConfig, message: str) -> None:
    """Report what is missing on this machine: an error, or a warning if the run joins a cluster."""
    if not joins_cluster(config):
        refuse("path-missing", message=message)
    else:
        warn("path-missing-here", message=message)


def searched(path: str) -> str:
    """A file that verl looks for in the current folder and in its own; ``path`` itself where there is none."""
    from verl.experimental.agent_loop.agent_loop import resolve_config_path  # pyright: ignore[reportPrivateImportUsage]

    try:
        return str(resolve_config_path(path))
    except FileNotFoundError:
        return path


def is_local(path: str) -> bool:
    """Whether ``path`` can only be a local one: names on a hub have at most one slash."""
    return "://" not in path and (path.startswith(("/", ".", "~")) or path.count("/") > 1)


def positions(config: DictConfig) -> tuple[int | None, str]:
    """How many tokens the rollout's model takes, None if unknown on this machine; and the key that sets it.

    verl's servers take the model's positions without its RoPE scaling, by which vLLM alone would multiply them.
    """
    if (limit := config.actor_rollout_ref.rollout.max_model_len) is not None:
        return limit, f"{ROLLOUT}.max_model_len"
    limit, key = model_positions(config)
    if MODEL_FILES in key and scaling(model_config(config)) == "yarn":
        key += f" (which verl does not multiply by YaRN's factor: raise it by {RAISES_POSITIONS})"
    return limit, key


def model_positions(config: DictConfig) -> tuple[int | None, str]:
    """:func:`positions` without ``max_model_len``: the most that verl lets it be."""
    model, name = config.actor_rollout_ref.model, "max_position_embeddings"
    part = f"{MODEL}.override_config"
    overrides: Any = model.get("override_config") or {}
    if "model_config" in overrides:  # then verl takes these alone
        part, overrides = f"{part}.model_config", overrides.model_config or {}
    if name not in overrides and name in (overrides.get("text_config") or {}):
        part, overrides = f"{part}.text_config", overrides.text_config
    if (limit := overrides.get(name)) is not None:
        return limit, f"{part}.{name}"
    return model_config(config).get(name), f"{name}{MODEL_FILES}{model.path}"


def vllm_positions(model: Mapping[str, Any]) -> int | None:
    """The positions with which vLLM serves a model with this configuration, as it computes them; None: unknown."""
    lengths = [model[name] for name in LENGTHS if model.get(name) is not None]
    own = model.get("model_max_length")
    most, factor = own or min(lengths, default=None), 1.0
    if most is None:
        return None
    rope = model.get("rope_scaling") or model.get("rope_parameters") or {}
    layers = [layer for layer in rope.values() if isinstance(layer, dict)] or [rope]
    for layer in layers if "gemma3" not in str(model.get("model_type")) else ():
        kind = layer.get("rope_type", layer.get("type"))
        if kind not in ("su", "longrope", "llama3"):
            factor = layer.get("factor", factor)
        if kind == "yarn":
            name = "original_max_position_embeddings"
            most = model.get(name) or layer.get(name) or model.get("max_position_embeddings", most)
    return max(int(most * (factor or 1.0)), own or 0)


def scaling(model: dict[str, Any]) -> str | None:
    """How RoPE of a model's configuration reaches more positions; None: it does not."""
    if not (rope := model.get("rope_scaling") or model.get("rope_parameters")):
        return None
    kind = rope.get("rope_type", rope.get("type"))  # neither: they differ by layer
    return None if kind == "default" else str(kind)


def model_config(config: DictConfig) -> dict[str, Any]:
    """The configuration of the actor's model; empty if it is not on this machine."""
    model = config.actor_rollout_ref.model
    folder = machine.model_folder(str(model.hf_config_path or model.path))
    return machine.model_config(str(folder)) if folder else {}


def _check_model(config: DictConfig, key: str, weights: bool = True) -> None:
    path = OmegaConf.select(config, key)
    if path is None:
        if weights:
            refuse("model-missing", key=key)
        return
    folder = Path(path).expanduser()
    if is_local(path) and not folder.is_dir():
        absent(config, f"{key}={path}: there is no such folder; give that of a model, or its name on the hub")
    elif not folder.is_dir() and (problem := _typed(path)):
        absent(config, f"{key}={path}: {problem}")
    elif weights and folder.is_dir() and not (folder / "config.json").is_file():
        refuse("model-without-config", key=key, path=path)


def _typed(path: str) -> str | None:
    """Why ``path``, which may be a name on the hub, is a mistyped folder; None if it is such a name, or may be one."""
    parent = Path(path).parent
    siblings = [str(parent / entry.parent.name) for entry in parent.glob("*/config.json")] if parent.is_dir() else []
    hint = did_you_mean(path, siblings)
    if "://" in path or not (hint or ("/" in path and parent.is_dir())) or os.environ.get("VERL_USE_MODELSCOPE"):
        return None
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(path, timeout=10)
    except GatedRepoError:
        return None
    except RepositoryNotFoundError:
        return f"there is no such folder and no such model on the hub{hint}"
    except Exception as error:  # offline
        kind = type(error).__name__
        return f"there is no such folder, and the hub cannot be asked for a model of that name ({kind}){hint}"
    return None


RAY = "ray_kwargs.ray_init"
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""package of each rollout engine"""
CLASSES: dict[str, tuple[str, ...]] = {
    f"{ROLLOUT}.agent.agent_loop_manager_class": ("create", "generate_sequences"),
    "trainer.checkpoint_callback_class": ("on_save",),
}
"""keys of the user's own classes, with the methods that verl calls"""
ROUTER = f"{ROLLOUT}.router_config_path"
LIBRARIES = (f"{MODEL}.external_lib", "critic.model.external_lib")


def check_resources(run: CheckedRun) -> None:
    """Refuse packages that are not installed, and a Ray with fewer resources than the run reserves."""
    config, engine = run.config, str(run.rollout.name)
    if engine in ENGINES and find_spec(ENGINES[engine]) is None:
        warn("rollout-engine-missing", engine=engine, package=ENGINES[engine])
    if engine != "vllm" and str(config.trainer.device) == "cpu":
        refuse("rollout-cpu", engine=engine)
    for key in LIBRARIES if run.use_critic else LIBRARIES[:1]:
        names = run.get(key)
        for name in names if OmegaConf.is_list(names) else [names] if names else []:
            if find_spec(str(name).partition(".")[0]) is None:
                absent(config, f"{key}={name}: there is no such module")
    _check_classes(config)
    _check_adapter(config)
    if not joins_cluster(config):
        _check_ray(config)


def _check_classes(config: DictConfig) -> None:
    """Check the user's classes, which verl imports only after loading the models."""
    for key, methods in CLASSES.items():
        if name := OmegaConf.select(config, key):
            _check_class(config, f"{key}={name}", str(name), methods)
    if router := OmegaConf.select(config, ROUTER):
        _check_router(config, f"{ROUTER}={router}", str(router))
    data = config.data.get("custom_cls") or {}
    if (path := data.get("path")) and "://" not in path and Path(path).is_file():
        from torch.utils.data import Dataset
        from verl.utils.import_utils import load_extern_object

        setting = f"data.custom_cls.path={path}, name={data.get('name')}"
        try:
            cls = load_extern_object(path, data.get("name"))  # pyright: ignore[reportArgumentType]
        except (Exception, SystemExit) as error:  # of the user's code
            absent(config, f"{setting}: it cannot be loaded ({type(error).__name__}: {error})")
            return
        if not (isinstance(cls, type) and issubclass(cls, Dataset)):
            refuse("dataset-class-type", path=path, name=data.get("name"))


def _check_class(config: DictConfig, setting: str, name: str, methods: Iterable[str] = ()) -> None:
    """``setting``: the key with its value, for messages."""
    module, _, class_name = name.rpartition(".")
    if not module:
        refuse("class-missing", setting=setting)
        return
    try:
        cls = getattr(importlib.import_module(module), class_name)
    except (Exception, SystemExit) as error:  # of the user's code
        absent(config, f"{setting} cannot be imported ({type(error).__name__}: {error})")
        return
    if lacking := [method for method in methods if not hasattr(cls, method)]:
        refuse("class-without-method", setting=setting, method=lacking[0])


def _check_router(config: DictConfig, setting: str, path: str) -> None:
    """Check the file with a load balancer's class."""
    file = Path(searched(path))
    if not file.is_file():
        absent(config, f"{setting}: there is no such file")
        return
    try:
        content = OmegaConf.load(file)
    except Exception as error:
        refuse("router-unreadable", setting=setting, kind=type(error).__name__, error=error)
    if not isinstance(content, DictConfig) or not content.get("router_class") or "defaults" in content:
        refuse("router-without-class", setting=setting)
    _check_class(config, f"{setting}: router_class={content.router_class}", str(content.router_class))


def _check_ray(config: DictConfig) -> None:
    """Check a Ray that this run starts: verl waits silently and forever for missing resources."""
    gpus, cpus = (OmegaConf.select(config, f"{RAY}.num_{resource}") for resource in ("gpus", "cpus"))
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if gpus is not None and nodes * per_node > gpus:
        refuse("ray-num-gpus", nodes=nodes, per_node=per_node, number=nodes * per_node, gpus=gpus)
    units = OmegaConf.select(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units") or 0
    least = units + 3  # the queue's storage and its controller, verl's program, and an actor of the trainer
    if cpus is not None and cpus < least:
        refuse("ray-num-cpus", cpus=cpus, least=least)


def _check_adapter(config: DictConfig) -> None:
    """Check that modules of the model end with the names in ``target_modules``; peft only reports if none does."""
    model = config.actor_rollout_ref.model
    targets = model.get("target_modules")
    if not model.get("lora_rank") or targets is None or isinstance(targets, str):
        return  # a text is a regular expression or all-linear
    modules = _modules(Path(str(model.path)).expanduser())
    unknown = [str(name) for name in targets if modules and not any(f".{m}".endswith(f".{name}") for m in modules)]
    if not unknown:
        return
    endings = sorted({module.rpartition(".")[2] for module in modules})
    closest = did_you_mean(unknown[0], endings) or "."
    if len(unknown) == len(targets):
        refuse("adapter-missing", module=unknown[0], closest=closest, choices=", ".join(endings))
    else:
        warn("adapter-missing-here", module=unknown[0], closest=closest, choices=", ".join(endings))


def _modules(folder: Path) -> set[str]:
    """Names of the modules with weights of a local model, from the headers of its files; empty if there are none."""
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        from safetensors import safe_open

        with safe_open(str(file), framework="numpy") as weights:
            names |= {*weights.keys()}
    return {name.rpartition(".")[0] for name in names if name.endswith(".weight")}


def hint_without_gpu(config: DictConfig) -> None:
    """Hint at the CPU mode: verl's error comes late and names Ray resources. A cluster's head node may have no GPU."""
    from verl_turnkey.plugins import cpu

    elsewhere = os.environ.get(machine.GPU) or joins_cluster(config)
    if not (elsewhere or visible_accelerator() or cpu.opted_in()):
        print(
            "verl-turnkey: no accelerator is visible here. On a machine without one add +turnkey/device=cpu; "
            "on the head node of a GPU cluster this line can be ignored.",
            file=sys.stderr,
            flush=True,
        )


def check_lora(run: CheckedRun) -> None:
    """Refuse adapters that verl would not build, train or generate with."""
    model, strategy = run.config.actor_rollout_ref.model, run.actor.strategy
    rank, path = model.get("lora_rank", 0), model.get("lora_adapter_path")
    of_megatron = model.get("lora") or {}
    megatron_rank = of_megatron.get("rank", 0)
    if strategy == "megatron" and rank and not megatron_rank:
        refuse("lora-megatron", rank=rank)
    # verl's trainer uses the actor without its adapter as the reference, and here the actor has no adapter.
    if strategy in FSDP and not rank and megatron_rank:
        refuse("lora-rank-key", megatron_rank=megatron_rank)
    if strategy in FSDP and not rank and path:
        refuse("lora-adapter-without-rank", path=path)
    if rank and run.mode.endswith("separate_async") and not of_megatron.get("merge", False):
        refuse("lora-trainer", rank=rank, mode=run.mode)
    if run.use_critic and (rank := run.config.critic.model.get("lora_rank", 0)):
        from transformers import PreTrainedModel

        # Since 4.50 peft cannot build verl's kind of adapter for a token classifier.
        if not hasattr(PreTrainedModel, "prepare_inputs_for_generation"):
            refuse("lora-critic", rank=rank)
