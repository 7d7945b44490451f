"""The sandbox of bubblewrap: namespaces of the Linux kernel, without a daemon and without root."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle
from verl_turnkey.envs.agents.jobs import PATH, Job, Launch, Mount, Network, home_of, own_mounts, relayed, seen_inside

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# No files with secrets: a training that runs as root would expose /etc/shadow.
_ETC = """
alternatives bash.bashrc ca-certificates debian_version fonts java-11-openjdk java-17-openjdk java-21-openjdk
ld.so.cache ld.so.conf ld.so.conf.d localtime magic mime.types nsswitch.conf os-release perl pki profile protocols
python3 services shells ssl/certs ssl/openssl.cnf terminfo timezone
"""
_NOT_OF_AN_IMAGE = ("app", "dev", "home", "logs", "proc", "run", "solution", "sys", "tests", "tmp")


@dataclass(frozen=True)
class Bubblewrap:
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
        options += [*self._root(job), "--proc", "/proc", "--dev", "/dev"]
        if self.network == "host":
            options += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        command, own = ([*job.command], []) if self.rootfs else _program(job.command)
        mounts = own_mounts(job)
        mounts += [] if job.cwd == "/tmp" else [Mount(job.folder / "tmp", "/tmp", True)]
        readable = [path for path in dict.fromkeys([*own, *self.readable]) if not path.is_relative_to("/usr")]
        mounts += [Mount(path, str(path)) for path in readable]
        path = _search_path(Path(command[0])) if own else PATH
        python = sys.executable if self.rootfs is None else "python3"
        relay_mounts, command = relayed(job, self.network, command, python)
        mounts += [*job.mounts, *relay_mounts]
        for mount in sorted(
            mounts, key=lambda mount: mount.target.count("/")
        ):  # what lies in another one comes after it
            options += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target]
        # The environment is inherited: options of the command would show the gateway's key to every user.
        env = {"PATH": path, "HOME": home_of(job), "LANG": "C.UTF-8", "TERM": "dumb", **job.env}
        return Launch([*options, "--chdir", job.cwd, "--", *command], env)

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

    def inside(self, agent: AgentHandle, cwd: str) -> AgentHandle:
        return seen_inside(agent, self.network, cwd)


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
    own = installation(Path(sys.executable))
    if program is None or (path := Path(program).absolute()).is_relative_to("/usr") or path.parent == Path("/bin"):
        return [*command], own
    return [str(path), *command[1:]], [*own, *installation(path)]


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
