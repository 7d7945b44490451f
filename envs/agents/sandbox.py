"""Which sandbox is used: bubblewrap, docker or none.

In a sandbox an agent sees the same paths in every episode, so that prompts of a group stay equal: its working folder is
``/app``, its HOME ``/home/agent``. The gateway's unix socket is the only way out; a relay inside makes it
127.0.0.1:8000.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from verl_turnkey.envs.agents.bubblewrap import Bubblewrap
from verl_turnkey.envs.agents.docker import Docker
from verl_turnkey.envs.agents.jobs import Network, NoSandbox, Sandbox
from verl_turnkey.envs.errors import SandboxError

_CHECK_SECONDS = 20.0


def choose(
    name: str,
    *,
    image: str | None = None,
    rootfs: Path | None = None,
    readable: Sequence[Path] = (),
    network: Network = "gateway",
    inherit: Sequence[str] = (),
) -> Sandbox:
    """The sandbox ``name``: ``none``, ``bwrap``, ``docker``, or ``auto``: docker if its daemon answers, else bwrap.

    ``image``: for docker; without one ``auto`` takes bwrap. ``inherit``: see ``NoSandbox``; the others inherit nothing.

    Raises:
        SandboxError: it cannot be used here; says what is missing.
    """
    if name == "none":
        return NoSandbox(tuple(inherit))
    bubblewrap = Bubblewrap(rootfs, tuple(readable), network)
    if name == "bwrap" or (name == "auto" and image is None):
        problem = bwrap_problem()
        if problem is None:
            return bubblewrap
        other = "" if name == "bwrap" else "; docker is not used without an image"
        raise SandboxError(f"turnkey.agent.sandbox={name}: {problem}{other}. sandbox=none runs agents without one")
    if name not in ("docker", "auto"):
        raise SandboxError(f"turnkey.agent.sandbox must be auto, none, bwrap or docker, not {name!r}")
    docker = docker_problem()
    if docker is None:
        if image is None:
            raise SandboxError("turnkey.agent.sandbox=docker needs an image: a Harbor task names it as docker_image")
        return Docker(image, network)
    problem = bwrap_problem() if name == "auto" else None
    if name == "auto" and problem is None:
        return bubblewrap
    reasons = "; ".join(filter(None, (docker, problem)))
    raise SandboxError(f"turnkey.agent.sandbox={name}: {reasons}. sandbox=none runs agents without one")


@functools.cache
def bwrap_problem() -> str | None:
    """Why bwrap cannot be used here; None: it can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (Debian's package bubblewrap)"
    options = ["--unshare-all", "--uid", "0", "--gid", "0", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    message = _failure(["bwrap", *options, "true"])
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
