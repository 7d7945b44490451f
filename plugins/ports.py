"""Ports that other processes are not given by chance: a program may listen on one only seconds after its choice."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

FIRST_PORT = 20_000
"""``ray start`` gives its workers lower ones"""
TRIES = 100


def port_range() -> list[int] | None:
    """Ports below those that Linux hands out, from a random one on; None: there are none, or this is not Linux."""
    with suppress(OSError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if first - FIRST_PORT > 1000:  # else there is no choice
            return [random.SystemRandom().randrange(FIRST_PORT, (FIRST_PORT + first) // 2), first]
    return None


def free_port() -> int:
    """A port that no process listens on now, of :func:`port_range` where there is one."""
    ports = range(*(port_range() or (0, 0)))
    with socket.socket() as probe:
        for port in random.SystemRandom().sample(ports, min(TRIES, len(ports))):
            with suppress(OSError):
                probe.bind(("", port))
                break
        else:
            probe.bind(("", 0))
        return int(probe.getsockname()[1])
