"""A folder of checkpoints belongs to one run at a time: two would delete and resume from each other's."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError

LOCK = ".turnkey-run"


@contextmanager
def own_folder(trainer: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder in which the run writes checkpoints, if it writes any; it is free when this process ends.

    Where the file system cannot lock, or the folder cannot be written, which another check tells, nothing is held.

    Raises:
        ConfigError: names the run that holds it, and the keys.
    """
    folder = Path(str(trainer.get("default_local_dir"))).absolute()
    if (trainer.get("save_freq") or 0) <= 0:
        yield
        return
    file = None
    try:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / LOCK).open("a+", encoding="utf-8")
            _hold(file, folder)
        yield
    finally:
        if file is not None:
            file.close()


def _hold(file: Any, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(
            f"trainer.default_local_dir={folder}: a run writes its checkpoints there ({file.read().strip()}), and two "
            "would delete and resume from each other's. Give each a folder of its own, or another "
            "trainer.project_name or trainer.experiment_name, which name verl's"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
