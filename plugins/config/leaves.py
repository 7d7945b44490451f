"""Every field of a run's configuration with its roles: those of the node ``turnkey``, and verl's that play a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from verl_turnkey.plugins.config.roles import (
    FileOfVerl,
    Hosted,
    Leaf,
    Modules,
    Played,
    Sampled,
    Trained,
    Use,
    leaves,
    read,
)
from verl_turnkey.plugins.config.schema import TurnkeyConfig

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
VERLS: Mapping[str, Any] = {
    "data.max_prompt_length": Played[int],
    "data.max_response_length": Played[int],
    f"{ROLLOUT}.multi_turn.tool_config_path": Played[FileOfVerl[str]],
    f"{ROLLOUT}.multi_turn.function_tool_path": Played[FileOfVerl[str]],
    "data.apply_chat_template_kwargs": Sampled[dict],
    f"{ROLLOUT}.multi_turn.format": Sampled[str],
    **{f"{ROLLOUT}.{key}": Sampled[float] for key in ("temperature", "top_p", "top_k")},
    **{f"{ROLLOUT}.{key}": Hosted[Any] for key in ("dtype", "max_model_len", "engine_kwargs.vllm")},
    **{f"{MODEL}.{key}": Hosted[Any] for key in ("trust_remote_code", "custom_chat_template")},
    f"{MODEL}.external_lib": Hosted[Modules[Any]],
    f"{ROLLOUT}.agent.agent_loop_config_path": Trained[FileOfVerl[str]],
    "data.custom_cls.path": Trained[FileOfVerl[str]],
    "reward.custom_reward_function.path": Trained[FileOfVerl[str]],
    "reward.reward_manager.module.path": Trained[FileOfVerl[str]],
    "trainer.v1.sampler.custom_sampler.path": Trained[FileOfVerl[str]],
}
"""keys of verl -> their roles"""


@cache
def every() -> Mapping[str, Leaf]:
    """All leaves by their keys."""
    of_turnkey = {leaf.key: leaf for leaf in leaves(TurnkeyConfig, "turnkey")}
    return of_turnkey | {key: Leaf.of(key, hint) for key, hint in VERLS.items()}


def leaf_of(key: str) -> Leaf | None:
    """The leaf that ``key`` is, or lies in; None: a key of verl's that plays no part."""
    while key and key not in every():
        key = key.rpartition(".")[0]
    return every().get(key)


def uses(*chosen: Use) -> Iterator[Leaf]:
    """The leaves with one of these uses."""
    return (leaf for leaf in every().values() if leaf.use in chosen)


def files_of(key: str, value: Any, folder: Path) -> dict[str, Path | str]:
    """Name -> path of the user's files in ``value``, which a launch line gives to ``key``; installed packages: version.

    Of a folder or a package the Python files, named by the path from there. The second file of a name is named by its
    whole path.
    """
    leaf = leaf_of(key)
    if leaf is None or leaf.files is None or not leaf.files.watched:
        return {}
    for name in reversed(key.removeprefix(leaf.key).split(".")[1:]):
        value = {name: value}
    files: dict[str, Path | str] = {}
    for name, path in leaf.files.sources(value, folder):
        files[name if files.get(name, path) == path else str(path)] = path
    return files


def sources(config: Any) -> dict[str, dict[str, Path | str]]:
    """Key -> :func:`files_of` its value, of a whole configuration."""
    of_keys = {leaf.key: files_of(leaf.key, value_of(config, leaf), Path()) for leaf in every().values()}
    return {key: files for key, files in of_keys.items() if files}


def value_of(config: Any, leaf: Leaf) -> Any:
    """The plain value of a leaf in a whole configuration; its default where the configuration lacks it."""
    _, value = _place(config, leaf)
    return leaf.default if value is None else value


def make_absolute(config: Any, folder: Path) -> list[str]:
    """Make the paths in a whole configuration absolute that are relative to ``folder``; returns their keys."""
    changed = []
    for leaf in every().values():
        if leaf.files is None:
            continue
        node, value = _place(config, leaf)
        last = leaf.key.rpartition(".")[2]
        for names, path in leaf.files.relative(value, folder):
            changed.append(leaf.key + "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names))
            parent = read(node[last], names[:-1]) if names else node
            parent[names[-1] if names else last] = path
    return changed


def _place(config: Any, leaf: Leaf) -> tuple[Any, Any]:
    """The node that a leaf lies in, and its plain value."""
    *parents, last = leaf.key.split(".")
    for name in parents:
        config = config.get(name) if isinstance(config, Mapping) else None
    value: Any = config.get(last) if isinstance(config, Mapping) else None
    if type(value).__module__.startswith("omegaconf"):  # a command that reads a run's files needs no such package
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value, resolve=True)
    return config, value
