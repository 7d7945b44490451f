"""Values of keys that had another name once."""

from __future__ import annotations


def current_value(name: str) -> str:
    """A name in ``reward_extra_info``, as ``algorithm.filter_groups.metric`` has it, by its current name."""
    if name.startswith("reward/"):
        return f"composed_return.{name.removeprefix('reward/')}"
    return "env_return" if name == "episode_return" else name
