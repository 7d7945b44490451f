"""Which checkpoint a run resumes from: verl's newest one if it is whole, else the one before.

verl loads what its tracker names, and says `Errno 22` of a truncated file without its name. What is read here is
little: the end of each file of torch, the header of each of safetensors.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_turnkey.advantage import EstimatorSpec, Modification
from verl_turnkey.plugins.checks.findings import Refusal, notice, refuse, warn
from verl_turnkey.plugins.checks.lora import FSDP
from verl_turnkey.plugins.config.cluster import joins_cluster
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify, credit_params, estimator_of, turnkey_config
from verl_turnkey.plugins.verl_api.internals import TRACKER

CREDIT = "turnkey_credit.json"
"""what a method remembers, where one does"""
GROUPS = "turnkey_groups.json"
"""what ``turnkey.groups.allocation`` remembers of the tasks"""
NAMES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""content of a checkpoint -> how the names of its files of a rank begin, with verl's FSDP engine"""
RESUME_MODES = ("auto", "disable", "resume_path")
KEEP, DEPRECATED = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"), "remove_previous_ckpt_in_save"


def check_checkpoints(config: DictConfig, turnkey: TurnkeyConfig, *, use_critic: bool) -> None:
    """Warn if another checkpoint than the newest is resumed from, and let verl keep enough of them.

    Raises:
        ConfigError: see :func:`choose`.
    """
    _check_contents(config, use_critic=use_critic)
    remembers = bool(remembering(estimator_of(config), credit_params(config, turnkey), credit_modify(config, turnkey)))
    if said := choose(config, use_critic=use_critic, remembers=remembers):
        warn("checkpoint-layout", said)
    _keep_enough(config.trainer, turnkey.stop.whole_checkpoints)


def _roles(config: DictConfig, *, use_critic: bool) -> dict[str, DictConfig]:
    return {"actor": config.actor_rollout_ref.actor} | ({"critic": config.critic} if use_critic else {})


def _check_contents(config: DictConfig, *, use_critic: bool) -> None:
    """Checkpoints without what a run goes on from: verl resumes from them without a word."""
    resumable = config.trainer.resume_mode != "disable"
    for role, node in _roles(config, use_critic=use_critic).items():
        key = f"{'actor_rollout_ref.actor' if role == 'actor' else role}.checkpoint"
        saves = config.trainer.save_freq > 0
        if saves and OmegaConf.select(node, "checkpoint.async_save") and node.strategy in FSDP:
            refuse(
                "async-save",
                f"{key}.async_save=true: verl saves asynchronously with Megatron alone, but with {node.strategy} it "
                f"does not write {TRACKER} either, without which no run resumes: set {key}.async_save=false",
            )
        contents = OmegaConf.select(node, "checkpoint.load_contents") or list(NAMES)
        saved = OmegaConf.select(node, "checkpoint.save_contents") or list(NAMES)
        unsaved = [name for name in NAMES if name in contents and name not in saved]
        if resumable and unsaved and saves:
            warn(
                "load-not-saved",
                f"{key}.load_contents={[*contents]} wants {' and '.join(unsaved)}, which save_contents={[*saved]} does "
                f"not write: no run resumes from the checkpoints of this one. Set {key}.load_contents alike",
            )
        if resumable and (lacking := [name for name in NAMES if name not in contents]):
            lost = "the weights are those that the run began with" if "model" in lacking else "they begin anew"
            warn(
                "load-incomplete",
                f"{key}.load_contents={[*contents]}, which is save_contents where it is not set, has no "
                f"{' and no '.join(lacking)}: after a resume {lost}",
            )


def _keep_enough(trainer: DictConfig, whole: int) -> None:
    """Raise verl's limits to ``whole`` + 1: it deletes the oldest checkpoint before it writes the next one."""
    previous = bool(trainer.get(DEPRECATED))  # verl's former name for a limit of 1
    few = [key for key in KEEP if previous or (trainer.get(key) or whole + 1) <= whole]
    if trainer.save_freq <= 0 or not few:
        return
    asked = f"trainer.{DEPRECATED}=true" if previous else " and ".join(f"trainer.{k}={trainer[k]}" for k in few)
    with open_dict(trainer):
        for key in few:
            trainer[key] = whole + 1
        trainer[DEPRECATED] = False
    are = "checkpoint is" if whole == 1 else "checkpoints are"
    notice(
        "max-checkpoints-raised",
        f"{asked}: raised to {whole + 1}, so that {whole} whole {are} there at any moment, which is "
        f"turnkey.stop.whole_checkpoints: verl deletes the oldest before it writes the next one. The disk has to hold "
        f"{whole + 1}",
    )


def remembering(estimator: EstimatorSpec | None, params: Any, modify: Sequence[Modification]) -> list[str]:
    """Names of what is stateful under its parameters: the estimator, its modifiers."""
    if estimator is None:
        return []
    chosen = [(estimator, params), *((one.spec, one.params) for one in modify)]
    return [spec.name for spec, given in chosen if spec.stateful and getattr(given, "remembers", True)]


def choose(config: DictConfig, *, use_critic: bool, remembers: bool) -> str | None:
    """Check the checkpoint that the run resumes from; with ``resume_mode=auto`` take the newest whole one.

    One that is not the newest is written into ``config``, as ``trainer.resume_from_path``; the warning is returned. A
    run whose folder is not on this machine is left alone. ``remembers``: the method has a file of its own in them.

    Raises:
        ConfigError: none is whole, or the one that ``trainer.resume_from_path`` names is not.
    """
    trainer = config.trainer
    asked = {"use_critic": use_critic, "remembers": remembers}
    _check_resume(trainer)
    if trainer.resume_mode == "resume_path" and isinstance(trainer.resume_from_path, str):
        folder = Path(trainer.resume_from_path).absolute()
        elsewhere = joins_cluster(config) and not folder.is_dir()
        if not elsewhere and (found := fault(folder, config, **asked, complete=False)):
            raise Refusal("resume-path-damaged", f"trainer.resume_from_path cannot be resumed from: {found}")
    root = Path(trainer.default_local_dir).absolute()
    if trainer.resume_mode != "auto" or not (root / TRACKER).is_file():
        return None
    named, why = _tracked(root), ""
    for folder in _candidates(root, named):
        if (found := fault(folder, config, **asked)) is None:
            if folder.name == named:
                return None
            with open_dict(config):
                trainer.resume_mode, trainer.resume_from_path = "resume_path", str(folder)
            return f"{why or f'{root / TRACKER} is damaged'}. The run resumes from {folder}"
        why = why or f"the newest checkpoint cannot be resumed from: {found}"
    raise Refusal(
        "no-whole-checkpoint",
        f"{why or f'{root / TRACKER} is damaged'}; no other checkpoint in {root} is whole. To begin anew set "
        "trainer.resume_mode=disable, or another trainer.default_local_dir",
    )


def _check_resume(trainer: DictConfig) -> None:
    """Refuse what verl finds out once all models are loaded."""
    mode, path = trainer.resume_mode, trainer.resume_from_path
    if mode not in RESUME_MODES:
        refuse("unknown-resume-mode", f"there is no trainer.resume_mode={mode!r}: choices: {', '.join(RESUME_MODES)}")
    if mode != "resume_path":
        if path is not None:
            warn(
                "resume-path-without-effect",
                f"trainer.resume_from_path={path} has no effect with trainer.resume_mode={mode}: resume_path takes it",
            )
    elif not isinstance(path, str) or not re.search(r"global_step_\d+$", path):
        refuse(
            "resume-path-missing",
            "trainer.resume_mode=resume_path needs the folder of a checkpoint: set trainer.resume_from_path to one "
            f"that ends in global_step_<number>, got {path!r}",
        )


def fault(
    folder: Path, config: DictConfig, *, use_critic: bool, remembers: bool = False, complete: bool = True
) -> str | None:
    """What is wrong with the checkpoint ``folder``, with the name of the file; None if it is whole.

    ``complete``: the state of the data loader, which verl writes last and can do without, must be there.
    """
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    for role, node in _roles(config, use_critic=use_critic).items():
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
