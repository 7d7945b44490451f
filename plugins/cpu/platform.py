"""The CPU as a verl platform. Imports verl: load it only once ``verl.plugin.platform`` exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase

from verl_turnkey.plugins.cpu import device


class CpuPlatform(PlatformBase):
    """Trains on the host. Ray counts **logical** GPUs (``ray_init.num_gpus``), one per training process."""

    device_name = "cpu"  # pyright: ignore[reportAssignmentType]
    vendor_name = "cpu"  # pyright: ignore[reportAssignmentType]

    @property
    def device_module(self) -> ModuleType:
        return device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        # verl passes this on as a device: an integer would mean an accelerator to torch, "cpu" is right everywhere.
        return device.current_device()

    def device_count(self) -> int:
        return device.device_count()

    def set_device(self, device_index: int) -> None:
        device.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        device.synchronize()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The host allocator has none of CUDA's settings."""

    def empty_cache(self) -> None:
        device.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return device.get_device_capability(device_index)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        # Ray writes the index of a logical GPU here; verl reads it as the local rank.
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        # Weights then travel to vLLM through shared memory instead of CUDA IPC.
        return False

    def cudart(self) -> Any:
        return None
