"""Jobs, which are commands for one episode, and the sandboxes that run them: bubblewrap, docker or none.

In a sandbox an agent sees the same paths in every episode, so that prompts of a group stay equal: its working folder is
``/app``, its HOME ``/home/agent``. The gateway's unix socket is the only way out; a relay inside makes it
127.0.0.1:8000.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol
from uuid import uuid4

from verl_turnkey.envs import process_tree
from verl_turnkey.envs.agents import relay
from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle
from verl_turnkey.envs.agents.processes import NO_LIMITS
from verl_turnkey.envs.errors import SandboxError
from verl_turnkey.envs.process_tree import Limits
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
    limits: Limits = NO_LIMITS

    @property
    def folders(self) -> list[Path]:
        """Those that the command can write to."""
        return [self.folder, *([] if self.workspace.is_relative_to(self.folder) else [self.workspace])]


@dataclass(frozen=True)
class Launch:
    """What to start on this machine."""

    command: list[str]
    env: dict[str, str]
    cwd: Path | None = None
    cleanup: list[str] | None = None
    """a command that ends what survives the first one's end"""
    limits: Limits = NO_LIMITS
    """those that the guard of the command keeps"""


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
        folders = {"HOME": str(job.folder / "home"), "TMPDIR": str(job.folder / "tmp")}
        return Launch(list(job.command), {**variables, **folders, **job.env}, job.workspace, limits=job.limits)

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


class _Walled:
    """A sandbox whose command sees paths and addresses of its own."""

    network: Network

    def inside(self, agent: AgentHandle, cwd: str) -> AgentHandle:
        if self.network == "host":
            return replace(agent, workspace=Path(cwd))
        path = agent.base_url.split("://", 1)[1].partition("/")[2]
        return replace(agent, base_url=f"http://127.0.0.1:{PORT}/{path}", workspace=Path(cwd), socket=SOCKET)


# --- bubblewrap: namespaces of the Linux kernel, without a daemon and without root ------------------------------------

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# No files with secrets: a training that runs as root would expose /etc/shadow.
_ETC = """
alternatives bash.bashrc ca-certificates debian_version fonts java-11-openjdk java-17-openjdk java-21-openjdk
ld.so.cache ld.so.conf ld.so.conf.d localtime magic mime.types nsswitch.conf os-release perl pki profile protocols
python3 services shells ssl/certs ssl/openssl.cnf terminfo timezone
"""
_NOT_OF_AN_IMAGE = ("app", "dev", "home", "logs", "proc", "run", "solution", "sys", "tests", "tmp")


@dataclass(frozen=True)
class Bubblewrap(_Walled):
    """Kernel namespaces by ``bwrap``: this machine's files read-only, no network, no other processes.

    Args:
        rootfs: folder of an unpacked image, shown as ``/`` instead of this machine's ``/usr``, read-only; it needs
            ``python3``.
        readable: further files and folders of this machine that are shown at their own paths, read-only.
        network: ``gateway``: nothing but the gateway; ``host``: this machine's network.
    """

    rootfs: Path | None = None
    readable: tuple[Path, ...] = ()
    network: Network = "gateway"
    name: ClassVar[str] = "bwrap"

    def launch(self, job: Job) -> Launch:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise AgentFailure("turnkey.agent.sandbox=bwrap: bwrap is not installed (Debian's package bubblewrap)")
        options = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        options += ["--uid", "0", "--gid", "0", "--hostname", "sandbox"]
        # Files in memory count for no process: each of these two places may hold as much again.
        size = ["--size", str(job.limits.memory)] if job.limits.memory else []
        options += [*size, *self._root(job), "--proc", "/proc", "--dev", "/dev"]
        options += [*size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"] if size else []
        if self.network == "host":
            options += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        command, needed = ([*job.command], []) if self.rootfs else _program(job.command)
        mounts = own_mounts(job)
        mounts += [] if job.cwd == "/tmp" else [Mount(job.folder / "tmp", "/tmp", True)]
        readable = [path for path in dict.fromkeys([*needed, *self.readable]) if not path.is_relative_to("/usr")]
        mounts += [Mount(path, str(path)) for path in readable]
        path = _search_path(Path(command[0])) if needed else PATH
        python = sys.executable if self.rootfs is None else "python3"
        relay_mounts, command = relayed(job, self.network, command, python)
        mounts += [*job.mounts, *relay_mounts]
        for mount in sorted(mounts, key=lambda mount: mount.target.count("/")):  # what lies in another comes after it
            options += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target]
        # The environment is inherited: options of the command would show the gateway's key to every user.
        env = {"PATH": path, "HOME": home_of(job), "LANG": "C.UTF-8", "TERM": "dumb", **job.env}
        return Launch([*options, "--chdir", job.cwd, "--", *command], env, limits=job.limits)

    def _root(self, job: Job) -> list[str]:
        if self.rootfs is not None:
            return _entries(self.rootfs)
        options = ["--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
        for name in _SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                options += ["--symlink", os.readlink(path), f"/{name}"]
            elif path.is_dir():
                options += ["--ro-bind", f"/{name}", f"/{name}"]
        for name in _ETC.split():
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name, text in _users(home_of(job)).items():
            (job.folder / name).write_text(text, encoding="ascii")
            options += ["--ro-bind", str(job.folder / name), f"/etc/{name}"]
        return options


def installation(program: Path) -> list[Path]:
    """Folders without which ``program`` does not run: its virtual environment and the Python behind it.

    A program outside a virtual environment, conda environment, installation of node or folder of its packages is
    mounted alone: the folder around it may be a user's home.
    """
    paths: list[Path] = []
    for path in dict.fromkeys((program, program.resolve())):
        prefix = path.parent.parent
        if "node_modules" in path.parts:
            paths += [Path(*path.parts[: path.parts.index("node_modules") + 1])]
            continue
        if path.parent.name != "bin" or not _is_installation(prefix):
            paths.append(path)
            continue
        paths.append(prefix)
        if (prefix / "pyvenv.cfg").is_file():
            python = (prefix / "bin" / "python").resolve()
            if python != path:
                paths += [python.parent.parent]
    return [path for path in dict.fromkeys(paths) if path.exists()]


def _is_installation(prefix: Path) -> bool:
    if prefix == Path.home() / ".local":
        return False
    marks = ("pyvenv.cfg", "conda-meta", "lib/node_modules", "include/node")
    return any((prefix / mark).exists() for mark in marks) or prefix in (Path(sys.base_prefix), Path(sys.prefix))


def _program(command: Sequence[str]) -> tuple[list[str], list[Path]]:
    """``command`` with the path of its program where that is not the system's, and the folders that it needs."""
    program = shutil.which(command[0])
    python = installation(Path(sys.executable))
    if program is None or (path := Path(program).absolute()).is_relative_to("/usr") or path.parent == Path("/bin"):
        return [*command], python
    return [str(path), *command[1:]], [*python, *installation(path)]


def _search_path(program: Path) -> str:
    """The search path for programs.

    The folder of an agent's program comes last: its own Python must not replace the task's. The folder of a program for
    node comes first, since the node beside it starts it.
    """
    if not program.is_absolute():
        return PATH
    first = "node_modules" in program.resolve().parts
    return f"{program.parent}:{PATH}" if first else f"{PATH}:{program.parent}"


def _entries(rootfs: Path) -> list[str]:
    """Mount the folders of an image one by one: mount points can be made only in a writable folder."""
    options = ["--tmpfs", "/"]
    for path in sorted(rootfs.iterdir()):
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), f"/{path.name}"]
        elif path.name not in _NOT_OF_AN_IMAGE:
            options += ["--ro-bind", str(path), f"/{path.name}"]
    return options


def _users(home: str) -> dict[str, str]:
    return {
        "passwd": f"root:x:0:0:root:{home}:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
        "group": "root:x:0:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n",
    }


# --- docker: a container for each episode -----------------------------------------------------------------------------

_REMOVE = 'docker ps --all --quiet --filter "label=turnkey=$1" | xargs --no-run-if-empty docker rm --force'
_END_SECONDS = 15.0  # by then the clients of a dead process have ended, and start no container


@functools.cache
def _label() -> str:
    """The label of this process's containers, by which a reaper removes those that outlive the process."""
    return f"turnkey={process_tree.start_reaper(seconds=_END_SECONDS, command=('sh', '-c', _REMOVE, 'sh'))}"


@dataclass(frozen=True)
class Docker(_Walled):
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
        memory, processes, disk = job.limits
        command += ["--memory", str(memory), "--memory-swap", str(memory)] if memory else []
        command += ["--pids-limit", str(processes)] if processes else []
        command += ["--ulimit", f"fsize={disk}"] if disk else []
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
        cleanup = ["docker", "rm", "--force", container]
        return Launch([*command, self.image, *run], env, cleanup=cleanup, limits=Limits(disk=disk))


# --- which of them is used --------------------------------------------------------------------------------------------

_CHECK_SECONDS = 20.0


def choose(
    name: str,
    *,
    image: str | None = None,
    rootfs: Path | None = None,
    readable: Sequence[Path] = (),
    network: Network = "gateway",
    inherit: Sequence[str] = (),
    limits: Limits = NO_LIMITS,
) -> Sandbox:
    """The sandbox ``name``: ``none``, ``bwrap``, ``docker``, or ``auto``: docker if its daemon answers, else bwrap.

    ``image``: for docker; without one ``auto`` takes bwrap. ``inherit``: see ``NoSandbox``; the others inherit nothing.
    ``limits``: those that it has to keep.

    Raises:
        SandboxError: it cannot be used here; says what is missing.
    """
    if name == "none":
        return NoSandbox(tuple(inherit))
    if name not in ("auto", "bwrap", "docker"):
        raise SandboxError(f"turnkey.agent.sandbox must be auto, none, bwrap or docker, not {name!r}")
    problems = []
    if name == "docker" or (name == "auto" and image is not None):
        if (problem := docker_problem()) is not None:
            problems.append(problem)
        elif image is not None:
            return Docker(image, network)
        else:
            raise SandboxError("turnkey.agent.sandbox=docker needs an image: a Harbor task names it as docker_image")
    if name != "docker":
        if (problem := bwrap_problem(limits.memory > 0)) is None:
            return Bubblewrap(rootfs, tuple(readable), network)
        problems.append(problem)
    if name == "auto" and image is None:
        problems.append("docker is not used without an image")
    raise SandboxError(f"turnkey.agent.sandbox={name}: {'; '.join(problems)}. sandbox=none runs agents without one")


@functools.cache
def bwrap_problem(memory: bool = False) -> str | None:
    """Why bwrap cannot be used here, or not with a limit of the ``memory``; None: it can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (Debian's package bubblewrap)"
    options = ["--unshare-all", "--uid", "0", "--gid", "0", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    options += ["--size", "4096", "--tmpfs", "/tmp"] if memory else []
    message = _failure(["bwrap", *options, "true"])
    if message is not None and "--size" in message:
        return f"turnkey.agent.memory_gb needs bubblewrap 0.7 or newer: {message}"
    return None if message is None else f"bwrap fails on this machine, which may forbid namespaces: {message}"


@functools.cache
def docker_problem() -> str | None:
    """Why docker cannot be used here; None: it can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    message = _failure(["docker", "version", "--format", "{{.Server.Version}}"])
    return None if message is None else f"docker's daemon does not answer: {message}"


def _failure(command: Sequence[str]) -> str | None:
    """The last line of what ``command`` says when it fails; None: it does not."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CHECK_SECONDS, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"
