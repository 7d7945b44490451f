"""Groups of runs: seeds of the same configuration, and a distinct name per configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_turnkey.plugins.config.leaves import leaf_of
from verl_turnkey.plugins.config.roles import Use
from verl_turnkey.plugins.view.runs import Run, nearest

ALIASES = {
    "method": "algorithm.adv_estimator",
    "loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "env": "turnkey.env.id",
    "model": "actor_rollout_ref.model.path",
}
SEED = re.compile(r"(^|[._])seeds?$")
OUTPUTS = re.compile(
    r"(_local_dir|_data_dir|_temp_dir|save_path|experiment_name|project_name|trajectories|VERL_FILE_LOGGER_\w+)$"
    r"|^trainer\.(logger|resume_\w+|save_freq|max_\w+_ckpt_to_keep)$"
)
"""keys of where a run stores its outputs, and of how it resumes"""
ABSENT = "absent"
SHOWN = 3
"""most keys in the name of a group"""


@dataclass
class Group:
    """Runs that differ only in seed and paths, or that share the keys of ``--by``."""

    name: str
    runs: list[Run]
    config: dict[str, str] = field(default_factory=dict)
    """the keys in which the groups differ"""
    mixed: dict[str, list[str]] = field(default_factory=dict)
    """with ``--by``: further keys in which its runs differ"""


def seed_of(run: Run) -> str:
    """The seed of the data or of the rollout, else the name of the folder."""
    seeds = (run.config.get(key) for key in ("data.seed", "actor_rollout_ref.rollout.seed"))
    return next((str(seed) for seed in seeds if seed is not None), run.folder.name)


def meaning(config: Mapping[str, Any]) -> dict[str, str]:
    """The keys that identify a configuration, with values as texts: all but seeds, outputs and what decides nothing.

    Only the last part of an absolute path counts: each run has its own folder, but two models have two names.
    """
    telling = [key for key in config if not SEED.search(key) and not OUTPUTS.search(key)]
    apart = [key for key in telling if (leaf := leaf_of(key)) and leaf.use is Use.APART]
    return {key: _text(config[key]) for key in telling if key not in apart}


def group_runs(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """Group ``runs``; groups come in the order of their first runs.

    Runs without a configuration are grouped by the name of their folder, without a number at its end.

    Args:
        by: the only keys or aliases that distinguish groups.

    Raises:
        LookupError: a key of ``by`` is in no configuration.
    """
    keys = [ALIASES.get(key, key) for key in by]
    for key in keys:
        known = {name: None for run in runs for name in run.config}
        if key not in known:
            raise LookupError(f"--by {key}: no run has this key{nearest(key, known)}")
    members: dict[str, tuple[dict[str, str], list[Run]]] = {}
    for run in runs:
        whole = meaning(run.config)
        same = {key: _text(run.config.get(key, ABSENT)) for key in keys} if keys else whole
        name = json.dumps(same, sort_keys=True) if same else re.sub(r"[-_.]?\d+$", "", run.folder.name)
        members.setdefault(name, (same, []))[1].append(run)
    groups = [Group(name, of_name) for name, (_, of_name) in members.items()]
    differ = _differing([same for same, _ in members.values()])
    for group, (same, _) in zip(groups, members.values(), strict=True):
        group.config = {key: same.get(key, ABSENT) for key in differ}
        if keys:
            within = [meaning(run.config) for run in group.runs]
            group.mixed = {key: [config.get(key, ABSENT) for config in within] for key in _differing(within)}
    _name(groups, keys)
    return groups


def _name(groups: Sequence[Group], by: Sequence[str]) -> None:
    """Name groups by the keys of ``by``, or method, loss and environment if they differ; equal names get more keys."""
    base = list(by) or [key for key in (ALIASES["method"], ALIASES["loss"], ALIASES["env"]) if key in groups[0].config]
    for group in groups:
        config = group.runs[0].config
        if config:
            words = [group.config.get(key) or _text(config.get(key, ABSENT)) for key in base or [ALIASES["method"]]]
            group.name = " ".join(words)
    for name in {group.name for group in groups}:
        same = [group for group in groups if group.name == name]
        if len(same) > 1:
            for number, group in enumerate(same, 1):
                keys = _differing([other.config for other in same])[:SHOWN]
                group.name += "".join(f" {key.rpartition('.')[2]}={group.config[key]}" for key in keys) or f" {number}"
    used: dict[str, int] = {}
    for group in groups:  # they may differ in more keys than their names hold
        used[group.name] = number = used.get(group.name, 0) + 1
        group.name += f" ({number})" if number > 1 else ""


def _differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({config.get(key, ABSENT) for config in configs}) > 1]


def _text(value: Any) -> str:
    if isinstance(value, str):
        path = value.startswith(("/", "~", "file://"))
        return value.rstrip("/").rpartition("/")[2] if path else value
    if isinstance(value, list):
        return json.dumps([_text(entry) if isinstance(entry, str) else entry for entry in value], default=str)
    return json.dumps(value, default=str)
