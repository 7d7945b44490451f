"""Keys under verl's nodes that verl does not have: a plus, or the user's own file, adds any key silently.

Only nodes that verl reads key by key are checked. Below others (``engine_kwargs``, ``override_config``,
``ray_init``, ``apply_chat_template_kwargs``, ...) any key reaches a library, and verl passes all of them on.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.config.composing import verls_config_dir
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.config.recipe_files import beside_parameters, leaves

# Nodes of plain keys. `actor_rollout_ref` holds those of the next list.
READ_BY_KEY = (
    "data",
    "trainer",
    "trainer.v1",
    "algorithm",
    "algorithm.rollout_correction",
    "reward",
    "actor_rollout_ref",
)
# Keys that verl's code reads although its YAML files do not list them.
UNLISTED = {
    *("data.cache_dir", "data.chat_template_func", "data.filter_prompts", "data.need_tools_kwargs"),
    "model_engine",  # a group of its files, which leaves its choice as a key
    *("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights", "trainer.remove_previous_ckpt_in_save"),
    *("reward.reward_kwargs", "reward.timeout"),
}
# Nodes that become a dataclass in each worker, which accepts no other key.
DATACLASSES = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model")
# Keys of earlier versions of verl that scripts still add.
FORMER = {
    "data.sampler": "this verl draws the tasks of a batch itself; a data set of your own is data.custom_cls",
    "trainer.val_generations_to_log_to_wandb": "verl reads trainer.log_val_generations",
}


def dataclasses(*, use_critic: bool, use_reference: bool) -> list[str]:
    """The nodes that become a dataclass in the workers of this run."""
    roles = [("critic", use_critic), ("actor_rollout_ref.ref", use_reference)]
    return [*DATACLASSES, *(name for name, used in roles if used)]


def check_accepted(config: DictConfig, node: str) -> None:
    """Refuse a key at which verl's workers would fail, with the closest one."""
    for key, target, parameters in unaccepted(config, node):
        hint, argument = _closest(key, parameters), override(key, OmegaConf.select(config, key))
        refuse(
            "unknown-dataclass-key", argument=argument, kind=target.rpartition(".")[2], hint=f"; {hint}" if hint else ""
        )


def check_unknown(config: DictConfig) -> None:
    """Warn of keys that nothing reads, with the closest one."""
    for key, value in _unread(config):
        hint = next((text for former, text in FORMER.items() if f"{key}.".startswith(f"{former}.")), _closest(key))
        warn("unknown-key", argument=override(key, value), hint=f"; {hint}" if hint else "")


def unaccepted(config: DictConfig, node: str) -> Iterator[tuple[str, str, Collection[str]]]:
    """The keys of ``node``, and of dataclasses below it, that their class does not take: key, class, its arguments."""
    section, target = OmegaConf.select(config, node), OmegaConf.select(config, f"{node}._target_")
    if not isinstance(section, DictConfig) or target is None:
        return
    if (parameters := _parameters(str(target))) is None:
        return
    for name in map(str, section):
        key = f"{node}.{name}"
        if name != "_target_" and name not in parameters and key not in known():
            yield key, str(target), parameters
        if isinstance(section._get_node(name), DictConfig):
            yield from unaccepted(config, key)


@cache
def _parameters(target: str) -> Collection[str] | None:
    """The arguments of the class ``target``; None where they are not known, or it takes any."""
    from hydra.utils import get_class

    try:
        parameters = inspect.signature(get_class(target)).parameters
    except (ImportError, ValueError):  # verl itself reports it
        return None
    return (
        None if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()) else list(parameters)
    )


def _unread(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """The keys that verl does not have, with their values; of an unknown node, all keys below it."""
    if not known():
        return
    exempt = {f"trainer.v1.{config.trainer.v1.trainer_mode}"}  # the parameters of a trainer of the user's own
    nodes = [node for node in READ_BY_KEY if node != "data" or not OmegaConf.select(config, "data.custom_cls.path")]
    for node in nodes:
        section = OmegaConf.select(config, node)
        for name in section if isinstance(section, DictConfig) else ():
            if (key := f"{node}.{name}") not in known() | UNLISTED | exempt:
                yield from _leaves(section, str(name), key)
    roots = {key for key in known() if "." not in key}
    for name in sorted({*map(str, config)} - roots - UNLISTED):
        # A node of another name is of the user's own code.
        plain = not isinstance(config._get_node(name), DictConfig)
        if plain or difflib.get_close_matches(name, roots, n=1, cutoff=0.8):
            yield from _leaves(config, name, name)


def _leaves(node: DictConfig, name: str, key: str) -> Iterator[tuple[str, Any]]:
    value = node._get_node(name)
    yield from leaves(value, f"{key}.") if isinstance(value, DictConfig) else [(key, node[name])]


def _closest(key: str, siblings: Collection[str] = ()) -> str:
    """``did you mean``: the same name elsewhere below the root, else the closest of the same node; empty: none."""
    parent, _, name = key.rpartition(".")
    root = key.partition(".")[0]
    below = f"{root}." if parent else ""
    keys = known() if parent else known() | {*beside_parameters("base")}
    moved = [known_key for known_key in keys if known_key.startswith(below) and known_key.endswith(f".{name}")]
    if len(moved) == 1:
        return f"did you mean {moved[0]}?"
    roots = {known_key.partition(".")[0] for known_key in known()}
    if root not in roots:
        return "".join(
            f"did you mean {closest}{key[len(root) :]}?"
            for closest in difflib.get_close_matches(root, roots, n=1, cutoff=0.8)
        )
    names = [known_key.removeprefix(f"{parent}.") for known_key in known() if known_key.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(name, [*names, *siblings], n=1, cutoff=0.7)
    return f"did you mean {parent}.{close[0]}?" if close else ""


@cache
def known() -> frozenset[str]:
    """Every key of verl's own configurations, whatever the training engine; empty if this verl has no such files."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = verls_config_dir().glob("_generated_ppo*_trainer.yaml")
    trees = [yaml.load(file.read_text(encoding="utf-8"), loader) for file in files]
    return frozenset(key for tree in trees for key in _keys(tree, ""))


def _keys(tree: Any, prefix: str) -> Iterator[str]:
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{name}"
        yield from _keys(value, f"{prefix}{name}.")
