"""Messages between driver and trainer about the end of a run: three entries in the key-value store of the Ray job.

The driver waits in ``ray.get``, and the trainer is an actor that may hang, on another machine. A file would need a
folder that both see.
"""

from __future__ import annotations

from typing import Literal

import ray
from ray.experimental import internal_kv

NAMESPACE = b"verl_turnkey"

STOPPED = 75
"""exit status after a signal, with a checkpoint: sysexits' EX_TEMPFAIL, "try again" """
DEAD = 69
"""exit status when a process of the run is dead: sysexits' EX_UNAVAILABLE"""

Entry = Literal["signal", "dead", "begun"]
"""signal: name of the signal that the driver got; dead: the trainer's sentence about dead processes; begun: the number
of the trainer's first step, once it begins"""
ENTRIES: tuple[Entry, ...] = ("signal", "dead", "begun")


class StoppedError(RuntimeError):
    """The run stopped on request; the message names the last step."""


def put(entry: Entry, text: str) -> None:
    """Leave ``text`` for the other side."""
    internal_kv._internal_kv_put(_key(entry), text.encode(), namespace=NAMESPACE)


def get(entry: Entry) -> str | None:
    """What the other side left."""
    value = internal_kv._internal_kv_get(_key(entry), namespace=NAMESPACE)
    return None if value is None else value.decode()


def delete(entry: Entry) -> None:
    """Remove what was left, so that a second run in the same job starts without it."""
    internal_kv._internal_kv_del(_key(entry), namespace=NAMESPACE)


def _key(entry: Entry) -> bytes:
    return f"{ray.get_runtime_context().get_job_id()}:{entry}".encode()
