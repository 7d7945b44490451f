"""Separates the weight transfers of several Ray clusters on one machine.

verl sends new weights to vLLM over a socket under ``/tmp`` whose name holds Ray's job id. That is ``01000000`` for the
first job of every Ray cluster: two runs on one machine, each with its own Ray, would share the socket, and one would
receive the other's messages until both hang. Sender and receiver therefore add the cluster's session to the name.
"""

from __future__ import annotations

import functools
import hashlib
import os
from types import ModuleType
from typing import Any

JOB_VARIABLE = "VERL_RAY_JOB_ID"
"""environment variable, read by a server's vLLM processes, with the job's part of the socket's name"""


def name_of_job(job_id: str) -> str:
    """``job_id`` with a short name of the Ray cluster of this process; a socket's path has at most 107 bytes."""
    import ray

    session = ray.get_runtime_context().get_session_name()
    return f"{job_id}-{hashlib.sha256(session.encode()).hexdigest()[:8]}"


def name_receiver(module: ModuleType) -> None:
    """vLLM's server (verl.workers.rollout.vllm_rollout.vllm_async_server): its processes inherit the variable."""
    original = module.vLLMHttpServer.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        os.environ[JOB_VARIABLE] = name_of_job(os.environ[JOB_VARIABLE])

    module.vLLMHttpServer.__init__ = __init__


def name_sender(module: ModuleType) -> None:
    """The adapter in a training process (verl.workers.rollout.vllm_rollout.vllm_rollout), which binds the socket."""
    original = module.ServerAdapter.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        job = module.ray.get_runtime_context().get_job_id()
        named = self.zmq_handle.replace(f"-{job}-", f"-{name_of_job(job)}-", 1)
        if named == self.zmq_handle:  # else vLLM would listen on another socket, and both sides would hang
            raise RuntimeError(
                f"expected Ray's job id {job} in the name of verl's socket for weights, got {self.zmq_handle}: has "
                "verl changed? See `turnkey doctor`"
            )
        self.zmq_handle = named

    module.ServerAdapter.__init__ = __init__
