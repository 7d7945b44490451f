"""A folder belongs to one process at a time: two runs would delete and resume from each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError

LOCK, OF_CHECKPOINTS = ".lock", ".turnkey-run"


@contextmanager
def locked(folder: Path, taken: str, fix: str, name: str = LOCK) -> Iterator[None]:
    """Create ``folder`` and hold it; the operating system lets go when the process ends, however it ends.

    Where the file system cannot lock, or the folder cannot be written, nothing is held.

    Raises:
        ConfigError: another process holds it: ``taken``, which process, and ``fix``.
    """
    file = None
    try:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / name).open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ConfigError(f"{taken} ({file.read().strip()}){fix}") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
        yield
    finally:
        if file is not None:
            file.close()


@contextmanager
def own_folder(trainer: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder in which the run writes checkpoints, if it writes any.

    Raises:
        ConfigError: names the run that holds it, and the keys.
    """
    if (trainer.get("save_freq") or 0) <= 0:
        yield
        return
    folder = Path(str(trainer.get("default_local_dir"))).absolute()
    taken = f"trainer.default_local_dir={folder}: a run writes its checkpoints there"
    fix = (
        ", and two runs would delete each other's and resume from them. Give each run its own folder, or its own "
        "trainer.project_name or trainer.experiment_name, which name verl's default folder"
    )
    with locked(folder, taken, fix, OF_CHECKPOINTS):
        yield
