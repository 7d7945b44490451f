"""Former names of values."""

from __future__ import annotations


def current_value(name: str) -> str:
    """The current name of a metric in ``algorithm.filter_groups.metric``, a name in ``reward_extra_info``."""
    if name.startswith("reward/"):
        return f"composed_return.{name.removeprefix('reward/')}"
    return "env_return" if name == "episode_return" else name
