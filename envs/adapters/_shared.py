"""What several adapters share: the folder of what they keep between runs, and a random state per instance."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def cache_folder(name: str) -> Path:
    """``$TURNKEY_CACHE/name``, by default ``~/.cache/verl-turnkey/name``; it need not exist yet."""
    chosen = os.environ.get("TURNKEY_CACHE")
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl-turnkey"
    return (Path(chosen) if chosen else shared) / name


class OwnRandom:
    """The states of ``random`` and ``numpy.random`` that one instance sees; equal in all new instances."""

    def __init__(self) -> None:
        self.state: tuple[Any, Any] = random.Random(1).getstate(), np.random.RandomState(1).get_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within this context the instance's state is the global one; afterwards the program's is back."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self.state[0])
        np.random.set_state(self.state[1])
        try:
            yield
        finally:
            self.state = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
