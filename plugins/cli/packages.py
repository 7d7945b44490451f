"""Packages that some commands need and others do not."""

from __future__ import annotations

from importlib.util import find_spec


def require_verl(command: str) -> None:
    """Refuse a command that reads verl's configuration where verl is not installed.

    Raises:
        ImportError: says what to install.
    """
    if find_spec("verl") is None:
        raise ImportError(f'turnkey {command} needs verl, which is not installed: pip install "verl-turnkey[verl]"')
