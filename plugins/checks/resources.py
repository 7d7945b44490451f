"""Checks of installed packages and of Ray's resources, which verl misses after loading models, or waits for forever."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.paths import absent, searched
from verl_turnkey.plugins.checks.run import MODEL, ROLLOUT, Run
from verl_turnkey.plugins.config.cluster import joins_cluster

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


def check_resources(run: Run) -> None:
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
