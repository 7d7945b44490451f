"""Whether a launch line starts a run, starts it over, continues it from a checkpoint, or has no steps left to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.checkpoint_files import TRACKER, resumed_step
from verl_turnkey.plugins.config.leaves import files_of, leaf_of
from verl_turnkey.plugins.config.machine import joins_cluster
from verl_turnkey.plugins.config.overrides import read, values

TRAINER = {
    "default_local_dir": "checkpoints",
    "resume_mode": "auto",
    "resume_from_path": None,
    "total_training_steps": None,
    "val_only": False,
}
"""keys of verl's trainer and their defaults"""


def announce(words: Sequence[str], name: str, *, started: bool) -> bool:
    """Print where the launch line ``words`` continues the run in the folder ``name``; returns whether to start it.

    ``started``: the run was started before.
    """
    chosen = {key: values(words, f"trainer.{key}") for key in TRAINER}
    trainer = OmegaConf.create({key: [default, *chosen[key]][-1] for key, default in TRAINER.items()})
    try:
        done, steps = resumed_step(trainer), trainer.total_training_steps
        folder = Path(trainer.default_local_dir)
    except InterpolationResolutionError:
        return True  # refers to other keys: the run's header says where it continues
    if trainer.val_only:
        return True
    if not done:
        if started and trainer.resume_mode == "disable":
            print(f"{name} starts over from step 0, since trainer.resume_mode=disable", flush=True)
        elif started and not any(folder.glob("global_step_*")) and not _elsewhere(words):
            print(f"{name} has no checkpoint yet: it starts over from step 0", flush=True)
        return True
    changed = _changed_since(folder / TRACKER, words)
    since = f"{' and '.join(changed)} changed after the last checkpoint" if changed else ""
    new = "turnkey train --out FOLDER starts a new run"
    if steps is None or done < steps:
        print(f"continues {name} after step {done}{f' of {steps}' if steps else ''}; {new}", flush=True)
        if since:
            print(f"warning: {since}: the remaining steps use the new files", flush=True)
        return True
    ended = (
        f"{name} has ended: its last checkpoint is of step {done}, and the launch line ends after step {steps}. "
        f"turnkey resume {name} --steps {done + steps} trains further; {new}"
    )
    if since:
        raise ConfigError(f"{since}, but {ended}")
    print(f"nothing was trained: {ended}", flush=True)
    return False


def _elsewhere(words: Sequence[str]) -> bool:
    """Whether other machines may hold the checkpoints."""
    address = values(words, "ray_kwargs.ray_init.address")[-1:]
    return joins_cluster(OmegaConf.create({"ray_kwargs": {"ray_init": {"address": address[0] if address else None}}}))


def _changed_since(checkpoint: Path, words: Sequence[str]) -> list[str]:
    """The files in the fields of the line that name any, and in their folders, that are newer than ``checkpoint``."""
    saved = checkpoint.stat().st_mtime if checkpoint.is_file() else float("inf")
    chosen = dict(read(word) for word in words if "=" in word and leaf_of(word.lstrip("+~").partition("=")[0]))
    files = [file for key, value in chosen.items() for file in files_of(key, value, Path())]
    return list(dict.fromkeys(file.name for file in files if file.stat().st_mtime > saved))
