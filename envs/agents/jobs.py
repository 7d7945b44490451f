"""Jobs: commands for one episode, what they see of this machine, and how they are run without a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from verl_turnkey.envs.agents import relay
from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle
from verl_turnkey.envs.variables import inherited

APP, HOME, PORT = "/app", "/home/agent", 8000
"""in a sandbox: the working folder, HOME, and the port of 127.0.0.1 at which the gateway is"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SOCKET, RELAY = "/run/turnkey/gateway.sock", "/run/turnkey/relay.py"
Network = Literal["gateway", "host"]


@dataclass(frozen=True)
class Mount:
    """A folder or file of this machine in the sandbox."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class Job:
    """A command for one episode, and what it needs."""

    command: Sequence[str]
    folder: Path
    """of this episode on this machine, with ``app``, ``home`` and ``tmp`` in it; see ``folders``"""
    workspace: Path
    """the working folder, seen from outside"""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    socket: str | None = None
    """the gateway's; None: the command reaches no model"""
    cwd: str = APP
    """where the working folder is, seen from inside; the command starts there"""


@dataclass(frozen=True)
class Launch:
    """What to start on this machine."""

    command: list[str]
    env: dict[str, str]
    cwd: Path | None = None
    cleanup: list[str] | None = None
    """a command that ends what survives the first one's end"""


class Sandbox(Protocol):
    """How a job becomes a command of this machine."""

    name: ClassVar[str]

    def launch(self, job: Job) -> Launch:
        """Raises AgentFailure: the job cannot be run in it."""
        ...

    def inside(self, agent: AgentHandle, cwd: str) -> AgentHandle:
        """``agent`` as the command sees it: the address of its gateway, and its working folder ``cwd``."""
        ...


@dataclass(frozen=True)
class NoSandbox:
    """No sandbox: the rights of the user who trains; HOME, TMPDIR and the working folder are the episode's own.

    ``inherit``: variables that the command inherits besides harmless ones.
    """

    inherit: tuple[str, ...] = ()
    name: ClassVar[str] = "none"

    def launch(self, job: Job) -> Launch:
        if job.mounts:
            raise AgentFailure("turnkey.agent.sandbox=none cannot mount folders: choose bwrap or docker")
        variables = {name: value for name, value in inherited(self.inherit).items() if not name.startswith("XDG_")}
        own = {"HOME": str(job.folder / "home"), "TMPDIR": str(job.folder / "tmp")}
        return Launch(list(job.command), {**variables, **own, **job.env}, job.workspace)

    def inside(self, agent: AgentHandle, cwd: str) -> AgentHandle:
        return agent


def own_mounts(job: Job) -> list[Mount]:
    """The working folder and HOME of the episode."""
    return [Mount(job.workspace, job.cwd, True), Mount(job.folder / "home", home_of(job), True)]


def home_of(job: Job) -> str:
    """HOME in a sandbox: another folder where the usual one is the working folder, or in it."""
    return "/root" if Path(HOME).is_relative_to(job.cwd) else HOME


def relayed(
    job: Job, network: Network, command: Sequence[str], python: str = "python3"
) -> tuple[list[Mount], list[str]]:
    """``command`` behind the relay to the gateway, which ``python`` runs, and the mounts that the relay needs.

    A command that has a network of its own, or reaches no model, stays as it is.
    """
    if network == "host" or job.socket is None:
        return [], list(command)
    mounts = [Mount(Path(job.socket), SOCKET, True), Mount(Path(relay.__file__), RELAY)]
    return mounts, [python, "-I", "-S", RELAY, SOCKET, str(PORT), *command]


def seen_inside(agent: AgentHandle, network: Network, cwd: str) -> AgentHandle:
    """``agent`` as a command in a sandbox sees it."""
    if network == "host":
        return replace(agent, workspace=Path(cwd))
    path = agent.base_url.split("://", 1)[1].partition("/")[2]
    return replace(agent, base_url=f"http://127.0.0.1:{PORT}/{path}", workspace=Path(cwd), socket=SOCKET)
