"""Hosts run on the node of the process that asked for them, so that a turn does not cross the network."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl_turnkey.envs.hosting.pool import HostPool

def told(_):
    return ray.get_runtime_context().get_node_id()

@ray.remote(num_cpus=0)
class Loop:
    async def hosts(self):
        here = ray.get_runtime_context().get_node_id()
        pool = HostPool(4, here)
        where = [host.actor.__ray_call__.remote(told) for host in pool._hosts]
        return [await node == here for node in where]

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=2, include_dashboard=False)
ray.init(address=cluster.address, log_to_driver=False)
for node in ray.nodes():
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    print("here:", ray.get(Loop.options(scheduling_strategy=place).remote().hosts.remote()))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.long
def test_all_hosts_of_a_pool_are_on_its_node():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("here:")]  # Ray may say something, too
    assert lines == [f"here: {[True] * 4}"] * 2, f"{done.stdout}\n{done.stderr[-2000:]}"
