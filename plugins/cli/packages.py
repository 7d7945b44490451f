"""What several commands share: packages that they need, how a shell finds ``turnkey``, and the console."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def require_verl(command: str) -> None:
    """Refuse a command that reads verl's configuration where verl is not installed."""
    if find_spec("verl") is None:
        raise ImportError(f'turnkey {command} needs verl, which is not installed: pip install "verl-turnkey[verl]"')


def require_pandas(command: str) -> None:
    """Refuse a command that reads parquet files where the packages for it are missing."""
    if missing := [name for name in ("pandas", "pyarrow") if find_spec(name) is None]:
        raise ImportError(f'turnkey {command} needs {" and ".join(missing)}: pip install "verl-turnkey[view]"')


def turnkey() -> str:
    """The program ``turnkey`` as it was called, where its virtual environment is not activated; else its name."""
    by_path = Path(sys.argv[0]).name == "turnkey" and shutil.which("turnkey") is None
    return shlex.quote(sys.argv[0]) if by_path else "turnkey"


def console(**options: Any) -> Console:
    """A console of the terminal's width; of 120 columns without a terminal."""
    from rich.console import Console

    return Console(width=None if os.isatty(1) else 120, **options)
