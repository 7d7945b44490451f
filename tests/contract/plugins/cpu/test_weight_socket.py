"""The socket of the weight transfer: one name for sender and receiver, another in every Ray cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl_turnkey.plugins.cpu import patches

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
