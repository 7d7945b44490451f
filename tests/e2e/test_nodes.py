"""A cluster of two nodes, each with an address of its own: hosts run beside their workers, a node that cannot write the
log loses its part, and a node that is lost ends the run, which resumes.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from launch import started
from measured import Fault, own_tmp, suffered
from ray.cluster_utils import Cluster
from test_faults import beginner as beginner
from test_faults import commands, entries, play, steps, until_step

from verl_turnkey.plugins.view.join import read

pytestmark = pytest.mark.long

NODE_SECONDS = 240
SECOND = "127.0.0.2"
"""address of the second node"""
OF_NODE = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE")
"""titles of processes that a node has without a run, too"""


class NodeRuns(NamedTuple):
    first: Path
    second: Path
    fault: Fault
    workers_and_hosts: list[list[str]]
    """per node: the agent-loop workers and hosts on it"""
    addresses: set[str]
    """of the nodes, as Ray knows them"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="tk-"))
    (folder / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        # Ray notes the address of the cluster there, where no other run on the machine looks for one to join.
        patch.setenv("RAY_TMPDIR", str(folder))
        # Cluster itself would give each node 30 seconds to start, which it needs beside other runs.
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 32, "num_gpus": 1, "wait": False})
        nodes.wait_for_nodes(timeout=NODE_SECONDS)
        nodes.add_node(num_cpus=4, wait=False, node_ip_address=SECOND, env_vars={"TURNKEY_READ_ONLY": "1"})
        nodes.wait_for_nodes(timeout=NODE_SECONDS)
        yield nodes
        nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def on(node) -> list[str]:
    """The agent-loop workers and hosts of environments that a node runs."""
    [raylet] = node.all_processes["raylet"]
    titles = [command.split(" ")[0] for command in commands(raylet.process.pid, recursive=False).values()]
    return sorted(title for title in titles if title.startswith(("ray::AgentLoopWorker", "ray::EnvHost")))


def metrics(out: Path) -> list[dict[str, float]]:
    return [entry["data"] for entry in entries(out)]


def below(node) -> list[psutil.Process]:
    """The processes that a node runs for a run: its own stay."""
    [raylet] = node.all_processes["raylet"]
    family = commands(raylet.process.pid).items()
    return [process for process, command in family if not command.startswith(OF_NODE)]


@pytest.fixture(scope="module")
def runs(cluster: Cluster, beginner: Path, tmp_path_factory: pytest.TempPathFactory) -> NodeRuns:
    """A run of which a node is killed after its third step, and the run that resumes on what is left."""
    out = tmp_path_factory.mktemp("nodes")
    first, second = out / "first", out / "second"
    both = ("actor_rollout_ref.rollout.agent.num_workers=2", "trainer.save_freq=1")
    head, other = cluster.head_node, next(iter(cluster.worker_nodes))
    lose = partial(cluster.remove_node, other, allow_graceful=False)
    with own_tmp() as env, started(first, *play(first, beginner, *both), cluster=cluster.address) as process:
        while until_step(first, process) < 3 or not metrics(first)[-1].get("turnkey/log/lost"):
            assert process.poll() is None, (first / "log.txt").read_text()[-6000:]
            time.sleep(0.1)  # a step's rows are written in a later one
        addresses = {node.node_ip_address for node in (head, other)}
        workers_and_hosts = [on(head), on(other)]
        family = below(head)
        fault = suffered("node lost", process, first, env, lose, "a process of the run is dead", family)
    last = steps(first)[-1]
    rest = play(second, beginner, *both, f"trainer.total_training_steps={last + 2}")
    with started(second, *rest, cluster=cluster.address) as process:
        assert process.wait(timeout=900) == 0, (second / "log.txt").read_text()[-6000:]
    return NodeRuns(first, second, fault, workers_and_hosts, addresses)


def test_hosts_run_beside_their_workers(runs: NodeRuns) -> None:
    for names in runs.workers_and_hosts:
        assert [name.split(".")[0] for name in names] == ["ray::AgentLoopWorkerTQ", "ray::EnvHost"]


def test_a_node_that_cannot_write_the_log_loses_its_part_alone(runs: NodeRuns) -> None:
    assert SECOND in runs.addresses
    assert len(runs.addresses) == 2
    lost = f"rows of turnkey.log.trajectories are not written on {socket.gethostname()} until this is over: Permission"
    assert lost in (runs.first / "log.txt").read_text()
    assert metrics(runs.first)[-1]["turnkey/log/lost"] > 0
    episodes = read(runs.first.parent / "log", "episodes")
    assert len(episodes) > 0
    assert not any("Permission" in str(reason) for reason in episodes["failed"])


def test_a_lost_node_ends_the_run_with_its_cause(runs: NodeRuns) -> None:
    log = (runs.first / "log.txt").read_text()
    assert runs.fault.code == 69, log[-6000:]
    # It died, or is unavailable while Ray does not know yet.
    assert "verl-turnkey: a process of the run is dead: The actor" in log
    assert "main_ppo" in log.rsplit("To resume:", 1)[1]


def test_nothing_of_it_is_left_on_the_other_node(runs: NodeRuns) -> None:
    assert not runs.fault.alive


def test_it_resumes_on_what_is_left(runs: NodeRuns) -> None:
    saved = int((runs.first.parent / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert steps(runs.second)[-1] == saved == steps(runs.first)[-1] + 2
    assert steps(runs.second)[0] > 1
