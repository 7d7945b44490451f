"""The checkpoints of a run on this machine: which are whole, and which one a run resumes from.

verl loads what its tracker names, and says `Errno 22` of a truncated file without its name. What is read here is
little: the end of each file of torch, the header of each of safetensors.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import EstimatorSpec, Modification
from verl_turnkey.plugins.config.schema import credit_modify, credit_params, estimator_of, turnkey_config

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file with the number of the newest complete checkpoint"""
CREDIT = "turnkey_credit.json"
"""what a method remembers, where one does"""
GROUPS = "turnkey_groups.json"
"""what ``turnkey.groups.allocation`` remembers of the tasks"""
NAMES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""content of a checkpoint -> how the names of its files of a rank begin, with verl's FSDP engine"""
FSDP = ("fsdp", "fsdp2")


@dataclass(frozen=True)
class Selected:
    """The newest whole checkpoint of a run, and why it is none that verl would take."""

    folder: Path | None
    """None if none is whole"""
    fault: str | None
    """what is wrong with the newest one or with the tracker; None if nothing is"""


def newest_whole(config: DictConfig, *, use_critic: bool, remembers: bool | None = None) -> Selected | None:
    """The checkpoint that ``resume_mode=auto`` takes; None without one on this machine, and with another mode.

    ``remembers``: whether the method has a file of its own in them; None: as its parameters say.
    """
    trainer = config.trainer
    root = Path(trainer.default_local_dir).absolute()
    if trainer.resume_mode != "auto" or not (root / TRACKER).is_file():
        return None
    remembers = has_memory(config) if remembers is None else remembers
    named, why = _tracked(root), ""
    for folder in _candidates(root, named):
        if (wrong := fault(folder, config, use_critic=use_critic, remembers=remembers)) is None:
            return Selected(folder, None if folder.name == named else why or f"{root / TRACKER} is damaged")
        why = why or f"the newest checkpoint cannot be resumed from: {wrong}"
    return Selected(None, why or f"{root / TRACKER} is damaged")


def has_memory(config: DictConfig) -> bool:
    """Whether the method of the run, or a modifier of it, is stateful."""
    turnkey = turnkey_config(config)
    return bool(remembering(estimator_of(config), credit_params(config, turnkey), credit_modify(config, turnkey)))


def roles(config: DictConfig, *, use_critic: bool) -> dict[str, DictConfig]:
    """Role of a model that is trained -> its node."""
    return {"actor": config.actor_rollout_ref.actor} | ({"critic": config.critic} if use_critic else {})


def remembering(estimator: EstimatorSpec | None, params: Any, modify: Sequence[Modification]) -> list[str]:
    """Names of what is stateful under its parameters: the estimator, its modifiers."""
    if estimator is None:
        return []
    chosen = [(estimator, params), *((one.spec, one.params) for one in modify)]
    return [spec.name for spec, given in chosen if spec.stateful and getattr(given, "remembers", True)]


def fault(
    folder: Path, config: DictConfig, *, use_critic: bool, remembers: bool = False, complete: bool = True
) -> str | None:
    """What is wrong with the checkpoint ``folder``, with the name of the file; None if it is whole.

    ``complete``: the state of the data loader, which verl writes last and can do without, must be there.
    """
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    for role, node in roles(config, use_critic=use_critic).items():
        if "model" not in (OmegaConf.select(node, "checkpoint.load_contents") or NAMES):
            return f"{folder / role}: load_contents has no 'model', so that the weights would not be loaded"
        for file in _expected(folder / role, node, config.trainer.nnodes, config.trainer.n_gpus_per_node):
            if found := damage(file):
                return f"{file} {found}"
    data = folder / "data.pt"
    files = [data] if complete or data.exists() else []
    files += [folder / CREDIT] if remembers and (folder / CREDIT).exists() else []
    known = turnkey_config(config).groups.remembers
    files += [folder / GROUPS] if known and (folder / GROUPS).exists() else []
    queue = folder / "transfer_queue"
    files += [queue / name for name in ("metadata.json", "controller_state.pkl") if queue.is_dir()]
    return next((f"{file} {found}" for file in files if (found := damage(file))), None)


def damage(file: Path) -> str | None:
    """What is wrong with ``file``, as the end of a sentence that begins with its name."""
    try:
        if not file.is_file():
            return "is missing"
        if file.stat().st_size == 0:
            return "is empty"
        if file.suffix == ".pt":
            zipfile.ZipFile(file).close()  # its directory stands at the end
        elif file.suffix == ".safetensors":
            return _damage_of_safetensors(file)
        elif file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".pkl":
            with file.open("rb") as stream:
                stream.seek(-1, 2)
                if stream.read() != pickle.STOP:
                    return "is truncated: it does not end like a pickle"
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        return f"is truncated or damaged: {error}"
    return None


def _damage_of_safetensors(file: Path) -> str | None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if 8 + length > size:
            return f"is truncated: its header of {length} bytes does not fit into {size} bytes"
        header = json.loads(stream.read(length))
    end = 8 + length + max((e["data_offsets"][1] for name, e in header.items() if name != "__metadata__"), default=0)
    return None if end == size else f"is truncated: {size} of {end} bytes are there"


def _expected(folder: Path, node: Any, nodes: int, ranks_per_node: int) -> Iterator[Path]:
    """The files of a role that must be whole: those of every rank with FSDP, all that are there with other engines.

    On several nodes the files of a rank may be on the node of the rank: those that are here count.
    """
    if node.strategy not in FSDP:
        there = sorted(file for file in folder.rglob("*") if file.suffix in (".pt", ".safetensors"))
        yield from there if there or folder.is_dir() else [folder]
        return
    contents = OmegaConf.select(node, "checkpoint.load_contents") or list(NAMES)
    ranks = nodes * ranks_per_node
    for rank in range(ranks):
        for content in contents:
            if content in NAMES:
                file = folder / f"{NAMES[content]}_world_size_{ranks}_rank_{rank}.pt"
                if nodes == 1 or file.exists():
                    yield file


def _tracked(root: Path) -> str | None:
    """The name of the checkpoint in verl's tracker; None if the tracker is damaged."""
    text = (root / TRACKER).read_text(errors="replace").strip()
    return f"global_step_{int(text)}" if text.isdecimal() else None


def _candidates(root: Path, named: str | None) -> list[Path]:
    """The checkpoint ``named``, then the older ones, newest first; all if the tracker is damaged."""
    names = [path.name for path in root.glob("global_step_*") if re.fullmatch(r"global_step_\d+", path.name)]
    older = sorted((name for name in names if named is None or _step(name) < _step(named)), key=_step, reverse=True)
    return [root / name for name in ([] if named is None else [named]) + older]


def _step(name: str) -> int:
    return int(name.removeprefix("global_step_"))
