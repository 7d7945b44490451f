"""For engines that draw from the global random state of their process: each instance has one of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class OwnRandom:
    """The global state of ``random`` and numpy as one instance sees it; the same for all until it is seeded."""

    def __init__(self) -> None:
        self.state: tuple[Any, Any] = random.Random(1).getstate(), np.random.RandomState(1).get_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While the engine's code runs its own state is the global one; afterwards everything is as it was outside."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self.state[0])
        np.random.set_state(self.state[1])
        try:
            yield
        finally:
            self.state = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
