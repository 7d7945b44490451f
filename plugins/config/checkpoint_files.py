"""The checkpoints of a run on this machine: which are complete, and which one a run resumes from.

verl loads what its tracker names, and reports a truncated file as `Errno 22` without its name. Only little is read
here: the end of each torch file, the header of each safetensors file.
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
from verl_turnkey.plugins.config.scorers import PRM_FOLDER as PRM

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file with the number of the newest complete checkpoint"""
STEP_FOLDER = r"global_step_\d+"
"""pattern of the name of a checkpoint's folder"""
CREDIT = "turnkey_credit.json"
"""what a stateful method remembers"""
GROUPS = "turnkey_groups.json"
"""what ``turnkey.groups.allocation`` remembers of the tasks"""
DATA = "turnkey_data.json"
"""number and hashes of the training tasks"""
PANEL = "turnkey_panel.json"
"""name and hash of the panel that the run validates on"""
NAMES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""content of a checkpoint -> prefix of its files per rank, with verl's FSDP engine"""
FSDP = ("fsdp", "fsdp2")


@dataclass(frozen=True)
class Selected:
    """The newest complete checkpoint of a run, and why verl would not take it."""

    folder: Path | None
    """None if none is complete"""
    fault: str | None
    """the problem of the newest checkpoint or of the tracker; None without one"""


def newest_whole(config: DictConfig, *, use_critic: bool, remembers: bool | None = None) -> Selected | None:
    """The checkpoint that ``resume_mode=auto`` takes; None if this machine has none, or with another mode.

    ``remembers``: whether the method stores a file of its own in checkpoints; None: as its parameters say.
    """
    trainer = config.trainer
    root = Path(trainer.default_local_dir).absolute()
    if trainer.resume_mode != "auto" or not (root / TRACKER).is_file():
        return None
    remembers = has_memory(config) if remembers is None else remembers
    tracked, reason = _tracked(root), ""
    for folder in _candidates(root, tracked):
        if (wrong := fault(folder, config, use_critic=use_critic, remembers=remembers)) is None:
            return Selected(folder, None if folder.name == tracked else reason or f"{root / TRACKER} is damaged")
        reason = reason or f"the newest checkpoint cannot be resumed from: {wrong}"
    return Selected(None, reason or f"{root / TRACKER} is damaged")


def resumed_step(trainer: DictConfig) -> int:
    """The training step after which a run of ``config.trainer`` continues; 0: this machine has no checkpoint of it."""
    return _step(folder.name) if (folder := resumed_from(trainer)) else 0


def resumed_from(trainer: DictConfig) -> Path | None:
    """The folder of the checkpoint from which a run of ``config.trainer`` continues; None: this machine has none."""
    root, folder = Path(trainer.default_local_dir).absolute(), None
    if trainer.resume_mode == "resume_path":
        folder = Path(str(trainer.resume_from_path))
    elif trainer.resume_mode == "auto" and (root / TRACKER).is_file():
        folder = root / (_tracked(root) or "")
    return folder if folder and folder.is_dir() and re.fullmatch(STEP_FOLDER, folder.name) else None


def has_memory(config: DictConfig) -> bool:
    """Whether the method of the run, or a modifier of it, is stateful."""
    turnkey = turnkey_config(config)
    return bool(remembering(estimator_of(config), credit_params(config, turnkey), credit_modify(config, turnkey)))


def roles(config: DictConfig, *, use_critic: bool) -> dict[str, DictConfig]:
    """Role of each trained model -> its node."""
    actor = config.actor_rollout_ref.actor
    nodes = {"actor": actor} | ({"critic": config.critic} if use_critic else {})
    return nodes | ({PRM: actor} if turnkey_config(config).prm.trains else {})


def remembering(estimator: EstimatorSpec | None, params: Any, modify: Sequence[Modification]) -> list[str]:
    """Names of the estimator and the modifiers that are stateful with their parameters."""
    if estimator is None:
        return []
    chosen = [(estimator, params), *((modifier.spec, modifier.params) for modifier in modify)]
    return [spec.name for spec, values in chosen if spec.stateful and getattr(values, "remembers", True)]


def fault(
    folder: Path, config: DictConfig, *, use_critic: bool, remembers: bool = False, complete: bool = True
) -> str | None:
    """The problem of the checkpoint ``folder``, with the name of the file; None if it is complete.

    ``complete``: require the state of the data loader, too, which verl writes last and can do without.
    """
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    for role, node in roles(config, use_critic=use_critic).items():
        if "model" not in (OmegaConf.select(node, "checkpoint.load_contents") or NAMES):
            return f"{folder / role}: load_contents has no 'model', so the weights would not be loaded"
        for file in _expected(folder / role, node, config.trainer.nnodes, config.trainer.n_gpus_per_node):
            if problem := damage(file):
                return f"{file} {problem}"
    data, queue = folder / "data.pt", folder / "transfer_queue"
    states = {folder / CREDIT: remembers, folder / GROUPS: turnkey_config(config).groups.remembers}
    files = [data] if complete or data.exists() else []
    files += [file for file, used in states.items() if used and file.exists()]
    files += [queue / name for name in ("metadata.json", "controller_state.pkl") if queue.is_dir()]
    return next((f"{file} {problem}" for file in files if (problem := damage(file))), None)


def damage(file: Path) -> str | None:
    """The problem of ``file``, as the end of a sentence that begins with its name; None without one."""
    try:
        if not file.is_file():
            return "is missing"
        if file.stat().st_size == 0:
            return "is empty"
        if file.suffix == ".pt":
            zipfile.ZipFile(file).close()  # its directory is at the end
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
    """The files of a role to check: with FSDP those of every rank, with other engines all that exist.

    On several nodes the files of a rank may be only on its node: then those on this one are checked.
    """
    if node.strategy not in FSDP:
        present = sorted(file for file in folder.rglob("*") if file.suffix in (".pt", ".safetensors"))
        yield from present if present or folder.is_dir() else [folder]
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


def _candidates(root: Path, tracked: str | None) -> list[Path]:
    """The checkpoint ``tracked``, then the older ones, newest first; all if the tracker is damaged."""
    names = [path.name for path in root.glob("global_step_*") if re.fullmatch(STEP_FOLDER, path.name)]
    older = [name for name in sorted(names, key=_step, reverse=True) if tracked is None or _step(name) < _step(tracked)]
    return [root / name for name in ([] if tracked is None else [tracked]) + older]


def _step(name: str) -> int:
    return int(name.removeprefix("global_step_"))
