"""``torch.cpu`` with the calls verl makes on ``torch.cuda``; verl gets this module as its device module.

Host memory is not accounted per tensor, so the process's resident size is reported as allocated and reserved memory in
verl's memory metrics.
"""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace

import torch
from torch.cpu import Stream as Stream
from torch.cpu import current_device as current_device
from torch.cpu import current_stream as current_stream
from torch.cpu import device_count as device_count
from torch.cpu import is_available as is_available
from torch.cpu import stream as stream
from torch.cpu import synchronize as synchronize

# verl saves and restores the device's generator beside the CPU's (checkpoint_manager.py); here both are the same one.
get_rng_state = torch.get_rng_state
set_rng_state = torch.set_rng_state
manual_seed = torch.manual_seed
manual_seed_all = torch.manual_seed


def set_device(device: object = None) -> None:
    """There is one CPU device."""


def get_device_name(device: object = None) -> str:
    """The name verl's FLOPs table knows."""
    return "CPU"


def get_device_capability(device: object = None) -> tuple[None, None]:
    """No compute capability."""
    return None, None


def get_device_properties(device: object = None) -> SimpleNamespace:
    """``total_memory`` in bytes and ``name``, as on an accelerator."""
    return SimpleNamespace(name=get_device_name(), total_memory=mem_get_info()[1])


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Free and total host memory in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def memory_allocated(device: object = None) -> int:
    """Resident size of this process in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def max_memory_allocated(device: object = None) -> int:
    """Largest resident size of this process so far in bytes."""
    # The kernel updates its two counters at different times: without the second the peak could be below the current
    # size.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, memory_allocated())


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def _nothing(*_: object, **__: object) -> None:
    """An accelerator's memory management without a counterpart on a CPU."""


empty_cache = ipc_collect = reset_peak_memory_stats = reset_accumulated_memory_stats = _nothing
set_per_process_memory_fraction = _nothing
