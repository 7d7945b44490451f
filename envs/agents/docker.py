"""The sandbox of docker: a container for each episode."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

from verl_turnkey.envs import reaper
from verl_turnkey.envs.agents.base import AgentHandle
from verl_turnkey.envs.agents.jobs import PATH, Job, Launch, Network, home_of, own_mounts, relayed, seen_inside

_REMOVE = 'docker ps --all --quiet --filter "label=turnkey=$1" | xargs --no-run-if-empty docker rm --force'
_END_SECONDS = 15.0  # by then the clients of a dead process have ended, and start no container


@functools.cache
def _label() -> str:
    """The label of this process's containers, by which a reaper removes those that outlive the process."""
    return f"turnkey={reaper.start(seconds=_END_SECONDS, command=('sh', '-c', _REMOVE, 'sh'))}"


@dataclass(frozen=True)
class Docker:
    """A container of ``image``, which needs ``python3`` for the relay."""

    image: str
    network: Network = "gateway"
    name: ClassVar[str] = "docker"

    def launch(self, job: Job) -> Launch:
        container = f"turnkey-{uuid4().hex[:16]}"
        command = ["docker", "run", "--rm", "--init", "--name", container, "--hostname", "sandbox"]
        command += ["--label", _label(), "--workdir", job.cwd]
        command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command += ["--user", f"{os.getuid()}:{os.getgid()}"]  # files that it writes can be removed by this user
        command += ["--network", "none" if self.network == "gateway" else "host"]
        relay_mounts, run = relayed(job, self.network, job.command)
        for mount in (*own_mounts(job), *job.mounts, *relay_mounts):
            mode = "" if mount.writable else ",readonly"
            command += ["--mount", f"type=bind,source={mount.source},target={mount.target}{mode}"]
        variables = {"HOME": home_of(job), **job.env}
        for name in variables:
            command += ["--env", name]  # without its value, which docker takes from its own environment
        env = {"PATH": os.environ.get("PATH", PATH), **variables}
        if "DOCKER_HOST" in os.environ:
            env["DOCKER_HOST"] = os.environ["DOCKER_HOST"]
        return Launch([*command, self.image, *run], env, cleanup=["docker", "rm", "--force", container])

    def inside(self, agent: AgentHandle, cwd: str) -> AgentHandle:
        return seen_inside(agent, self.network, cwd)
