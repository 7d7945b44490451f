"""What several contract tests share and is no fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

AWKWARD = str(Path(__file__).parent / "awkward_env.py")

Compose = Callable[..., DictConfig]
"""``compose("+turnkey=gigpo", ...)``: the configuration that ``main_ppo`` composes for these overrides."""
