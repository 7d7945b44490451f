"""Checks of checkpoints: what they hold, how many there are, and the one that a run resumes from."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.plugins.checks import memory
from verl_turnkey.plugins.checks.files import data_mark, last_step, listed, steps_until_data_end
from verl_turnkey.plugins.checks.findings import refusal, refuse, warn
from verl_turnkey.plugins.checks.run import CheckedRun, heads_of
from verl_turnkey.plugins.config.checkpoint_files import (
    DATA,
    FSDP,
    NAMES,
    damage,
    fault,
    has_memory,
    newest_whole,
    resumed_from,
    resumed_step,
    roles,
)
from verl_turnkey.plugins.config.machine import joins_cluster
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.config.scorers import PRM_FOLDER as PRM

RESUME_MODES = ("auto", "disable", "resume_path")


def check_checkpoints(config: DictConfig, *, use_critic: bool) -> None:
    """Warn of checkpoints that lack a part, which verl accepts silently; refuse to resume from an incomplete one."""
    trainer = config.trainer
    resumable, saves = trainer.resume_mode != "disable", trainer.save_freq > 0
    for role, node in roles(config, use_critic=use_critic).items():
        if role == PRM:  # has the actor's settings
            continue
        key = f"{'actor_rollout_ref.actor' if role == 'actor' else role}.checkpoint"
        if saves and OmegaConf.select(node, "checkpoint.async_save") and node.strategy in FSDP:
            refuse("async-save", key=key, strategy=node.strategy)
        contents = OmegaConf.select(node, "checkpoint.load_contents") or list(NAMES)
        saved = OmegaConf.select(node, "checkpoint.save_contents") or list(NAMES)
        unsaved = [name for name in NAMES if name in contents and name not in saved]
        if resumable and unsaved and saves:
            warn("load-not-saved", key=key, contents=[*contents], unsaved=" and ".join(unsaved), saved=[*saved])
        if resumable and (unloaded := [name for name in NAMES if name not in contents]):
            consequence = "the weights are the initial ones" if "model" in unloaded else "they start over"
            lacking = " and ".join(unloaded)
            warn("load-incomplete", key=key, contents=[*contents], lacking=lacking, consequence=consequence)
    check_resume(config, use_critic=use_critic)


def check_resume(config: DictConfig, *, use_critic: bool, remembers: bool | None = None) -> None:
    """Refuse an incomplete checkpoint. A folder that is not on this machine is not checked.

    ``remembers``: whether the method stores a file of its own in checkpoints; None: as its parameters say.
    """
    trainer, folder = config.trainer, None
    mode, path = trainer.resume_mode, trainer.resume_from_path
    if mode not in RESUME_MODES:  # as for the path, verl says so only after loading the models
        refuse("unknown-resume-mode", mode=mode, choices=", ".join(RESUME_MODES))
    if mode != "resume_path" and path is not None:
        warn("resume-path-without-effect", path=path, mode=mode)
    if mode == "resume_path" and not (isinstance(path, str) and re.search(r"global_step_\d+$", path)):
        refuse("resume-path-missing", path=path)
    if mode == "resume_path" and isinstance(path, str):
        folder = Path(path).absolute()
        if joins_cluster(config) and not folder.is_dir():
            return
        remembers = has_memory(config) if remembers is None else remembers
        if wrong := fault(folder, config, use_critic=use_critic, remembers=remembers, complete=False):
            raise refusal("resume-path-damaged", wrong=wrong)
    selected = newest_whole(config, use_critic=use_critic, remembers=remembers)
    if selected and selected.folder is None:
        raise refusal("no-whole-checkpoint", fault=selected.fault, folder=Path(trainer.default_local_dir).absolute())
    folder = selected.folder if selected else folder
    if use_critic and folder:
        check_resumed_heads(folder / "critic", config)


def check_resumed_data(config: DictConfig) -> None:
    """Say that the training tasks are not those of the checkpoint; refuse fewer than its epoch has played already."""
    folder = resumed_from(config.trainer)
    if folder is None or (now := data_mark(config)) is None:
        return
    state, mark = folder / "data.pt", folder / DATA
    tasks_played = None if damage(state) else _tasks_played(state)
    if tasks_played is not None and now["tasks"] < tasks_played:
        refuse("data-fewer-than-played", folder=folder, played=tasks_played, tasks=now["tasks"], state=state)
        return
    before, then = None if damage(mark) else json.loads(read_text(mark)), ""
    if before is None and state.is_file():  # of a former version
        files = [Path(file).expanduser() for file in listed(config, "train_files")]
        newer = [str(file) for file in files if file.stat().st_mtime > state.stat().st_mtime]
        then = f"{' and '.join(newer)} is newer" if newer else ""
    elif before and before != now:
        then = f"{before['tasks']} tasks then, {now['tasks']} now"
    if then:
        warn("data-changed", folder=folder, then=then, played=tasks_played or 0)


def _tasks_played(state: Path) -> int | None:
    """How many tasks of its epoch verl's data loader had given when it wrote ``state``; None: another loader did."""
    import torch

    def yielded(node: Any) -> int | None:
        entries = node.items() if isinstance(node, dict) else ()
        numbers = (value if key == "samples_yielded" else yielded(value) for key, value in entries)
        return next((number for number in numbers if number is not None), None)

    try:
        return yielded(torch.load(state, weights_only=True))
    except pickle.UnpicklingError:  # a loader of the user's
        return None


def check_resumed_heads(folder: Path, config: DictConfig) -> None:
    """Refuse to resume from the critic in ``folder`` with another number of heads than its saved config has."""
    file = folder / "huggingface" / "config.json"
    if str(config.critic.strategy) not in FSDP or damage(file):
        return
    names = json.loads(read_text(file, only_utf8=True)).get("id2label")
    heads, method = len(heads_of(config, turnkey_config(config))) or 1, config.algorithm.adv_estimator
    if names is not None and len(names) != heads:
        raise refusal("heads-of-checkpoint", folder=folder, number=len(names), method=method, heads=heads)


def check_disk(run: CheckedRun) -> None:
    """Warn of more checkpoints than fit on the disk, if the model is here. Beside them the log's texts are small."""
    trainer, last, known = run.config.trainer, last_step(run.config), memory.models(run)
    if trainer.save_freq <= 0 or not run.trains or "actor" not in known:
        return
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    saves = 1 if last is None else -(-(last - resumed_step(trainer)) // trainer.save_freq)
    need, number, nodes = 0.0, 0, roles(run.config, use_critic=run.use_critic)
    for role, model in known.items():  # verl deletes none of an earlier start
        kept, options = min(saves, trainer[f"max_{role}_ckpt_to_keep"] or saves), nodes[role].checkpoint
        need += kept * model.checkpoint(options.save_contents or list(NAMES), bool(options.get("save_lora_only")))
        number = max(number, kept)
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if need > free:
        sizes = [memory.in_gb(value) for value in (need / number, need, free)]
        warn("disk-space", folder=folder, number=number, size=sizes[0], need=sizes[1], free=sizes[2])


def check_steps(config: DictConfig) -> None:
    """Warn if no step is left to train, or if the epochs end before the steps do.

    verl makes the last save and validation only after the last step.
    """
    trainer, reachable = config.trainer, steps_until_data_end(config)
    if trainer.get("val_only"):
        return
    done, last = resumed_step(trainer), last_step(config)
    if done and last is not None and done >= last:
        warn("no-steps-left", done=done, last=last)
    total, epochs = trainer.get("total_training_steps"), trainer.total_epochs
    if total is None or reachable is None or total <= reachable:
        return
    every = {"checkpoint": trainer.save_freq, "validation": trainer.test_freq}
    lost = [name for name, steps in every.items() if steps > 0 and reachable % steps]
    without, enough = f" without a last {' and '.join(lost)}" if lost else "", -(-total * epochs // max(1, reachable))
    warn("training-steps-not-reached", total=total, epochs=epochs, reachable=reachable, without=without, enough=enough)
