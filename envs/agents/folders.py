"""The folders of an episode: what an agent writes stays there and is removed with them."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any


@asynccontextmanager
async def episode_folder() -> AsyncIterator[Path]:
    """A new folder with empty ``app``, ``home`` and ``tmp`` in it, for its owner alone; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="turnkey-agent-"))
    try:
        for name in ("app", "home", "tmp"):
            (folder / name).mkdir()
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, onerror=_remove_all_the_same)


def _remove_all_the_same(_function: Any, path: str, _error: Any) -> None:
    """Remove what is in a folder that the agent has made read-only; what cannot be removed stays."""
    with suppress(OSError):
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, stat.S_IRWXU)
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
