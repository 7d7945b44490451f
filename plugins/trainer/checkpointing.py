"""Checkpoints with the state of the parts that last from batch to batch; a run that stops writes one of its last step.

Resuming clears rows without prompts from the queue.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

import ray
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.plugins.checks.checkpoints import check_resume
from verl_turnkey.plugins.checks.data import validation_panel
from verl_turnkey.plugins.checks.files import data_mark
from verl_turnkey.plugins.config.checkpoint_files import CREDIT as FILE
from verl_turnkey.plugins.config.checkpoint_files import DATA, PANEL, TRACKER
from verl_turnkey.plugins.config.resolve import resumed_checkpoint
from verl_turnkey.plugins.credit.rows import split_key
from verl_turnkey.plugins.log.writer import write_json
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.verl_api.queue import Partition


def folder_of(config: Any, step: int) -> Path:
    """verl's folder of the checkpoint of ``step``."""
    return Path(config.trainer.default_local_dir) / f"global_step_{step}"


def resumed_folder(config: Any, step: int) -> Path:
    """The folder from which a run resumed at ``step``."""
    if config.trainer.resume_mode == "resume_path":
        return Path(config.trainer.resume_from_path)
    return folder_of(config, step)


def check_writable(trainer: PPOTrainer) -> None:
    """Refuse a checkpoint folder that a process of training cannot write to: the run would die at its first checkpoint.

    This process writes verl's tracker and the states of methods; the workers of actor and critic write their models.

    Raises:
        ConfigError: names the folder and the nodes.
    """
    config = trainer.config.trainer
    if (config.get("save_freq") or 0) <= 0:
        return
    folder = str(config.default_local_dir)
    groups = [trainer.actor_rollout_wg, *([trainer.critic_wg] if trainer.use_critic else [])]
    workers = dict.fromkeys(worker for group in groups for worker in group.workers)  # they may be the same processes
    refusals = ray.get([worker.__ray_call__.remote(unwritable, folder) for worker in workers])
    if nodes := sorted({*filter(None, [unwritable(None, folder), *refusals])}):
        raise ConfigError(
            f"trainer.default_local_dir={folder} cannot be written on {'; '.join(nodes)}. The trainer and its workers "
            "write parts of each checkpoint: make the folder writable there, or choose one that all nodes share"
        )


def unwritable(process: Any, folder: str) -> str | None:
    """Run inside a process of the run: its node and why it cannot write to ``folder``; creates nothing."""
    place = Path(folder)
    try:
        place = next(path for path in (place, *place.parents) if path.is_dir())
        with TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{socket.gethostname()} ({error.strerror}: {place})"


def save_state(folder: Path, method: str, state: Mapping[str, float], name: str = FILE) -> None:
    """Write ``state`` into ``folder``, which is created if needed, as the file ``name``; atomically."""
    values = {key: float(value) for key, value in state.items()}
    write_text(folder / name, json.dumps({"method": method, "state": values}, allow_nan=False))


def restore_state(folder: Path, method: str, without: str, name: str = FILE) -> dict[str, float] | None:
    """The state of ``method`` in ``folder``; None, and a warning of what happens ``without``, if there is none.

    Raises:
        ConfigError: the file is not one of :func:`save_state`.
    """
    file = folder / name
    if not file.is_file():
        logger.warning("there is no %s: %s", file, without)
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        saved_method, state = content["method"], {str(key): float(value) for key, value in content["state"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file}: expected the state of a method, got something else ({type(error).__name__}: {error}); "
            "without the file the method starts over"
        ) from error
    if not all(map(math.isfinite, state.values())):
        raise ConfigError(f"{file}: expected finite numbers, got {state}; without the file the method starts over")
    if saved_method != method:
        logger.warning("%s is of the method %r: %s", file, saved_method, without)
        return None
    return state


class Saved(Protocol):
    """A part of the trainer with state in the folder of a checkpoint."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Checkpointing:
    """verl's checkpoints with what ``parts`` save; ``remembers``: whether the method has a state among it."""

    def __init__(self, trainer: PPOTrainer, parts: Sequence[Saved], remembers: bool) -> None:
        self._trainer, self._parts, self._remembers = trainer, parts, remembers
        self._marks = {PANEL: validation_panel(trainer.config), DATA: data_mark(trainer.config)}
        self.saved: int | None = None
        """the step of the newest checkpoint"""
        self._written: tuple[Path, ...] = ()
        """checkpoints of this start that had weights when the newest one was written"""

    def load(self, verls: Callable[[], None]) -> None:
        """verl's own load of the newest complete checkpoint; then clear the rows that its batch left in the queue.

        verl writes a checkpoint when the prompts of the batch have left the queue, but its rows have not. Rows without
        prompts would never be sampled or cleared.
        """
        trainer = self._trainer
        files = {"use_critic": trainer.use_critic, "remembers": self._remembers}
        if change := resumed_checkpoint(trainer.config, **files):
            logger.warning(change.message)
        check_resume(trainer.config, **files)
        verls()
        self.saved = trainer.global_steps
        if trainer.global_steps:
            folder = resumed_folder(trainer.config, trainer.global_steps)
            for part in self._parts:
                part.load(folder)
        train = Partition("train")
        items = train.tags() if trainer.trainer_mode != "sync" else {}
        prompts = {key for key, tag in items.items() if tag.get("is_prompt")}
        orphans = [key for key in items if key not in prompts and split_key(key)[0] not in prompts]
        if orphans:
            train.clear(orphans)

    def save(self, verls: Callable[[], None]) -> None:
        """verl's own save, after the method's state: verl's last file marks the checkpoint as complete.

        Raises:
            CheckpointError: a file could not be written; verl's tracker names the checkpoint before.
        """
        step = self._trainer.global_steps
        if self.saved == step:  # a run that has to stop did not wait for verl
            return
        folder = folder_of(self._trainer.config, step)
        try:
            with kept(folder.parent / TRACKER):
                for part in self._parts:
                    part.save(folder)
                for name, mark in self._marks.items():
                    if mark:
                        write_json(folder / name, mark)
                verls()
        except Exception as error:
            raise CheckpointError(unwritten(folder, error)) from error
        self.saved = step
        self._drop_snapshots(folder)

    def _drop_snapshots(self, folder: Path) -> None:
        """Remove the queue's snapshots of checkpoints of this start whose weights verl has removed by its limit.

        verl keeps them, and each holds all rows of its batch. ``folder``: the checkpoint just written. If its weights
        are on another machine, so are those of the others.
        """
        if not (folder / "actor").is_dir():
            return
        gone = [checkpoint for checkpoint in self._written if not (checkpoint / "actor").is_dir()]
        for checkpoint in gone:
            shutil.rmtree(checkpoint / "transfer_queue", ignore_errors=True)
        self._written = (*(checkpoint for checkpoint in self._written if checkpoint not in gone), folder)

    def save_stopping(self, step: int) -> None:
        """Write a checkpoint of ``step``, the last completed one, unless it exists or the run writes none.

        Weights and the method's state are the newest: both include updates of the step that stopped.
        """
        trainer = self._trainer
        if trainer.config.trainer.save_freq <= 0 or self.saved == step:
            return
        trainer.on_sample_end()  # verl saves after the servers have released their memory
        now, trainer.global_steps = trainer.global_steps, step
        try:
            trainer._save_checkpoint()
            logger.warning("wrote a checkpoint of step %d before stopping", step)
        finally:
            trainer.global_steps = now


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says where, and how to continue."""


@contextmanager
def kept(tracker: Path) -> Iterator[None]:
    """Restore ``tracker`` if the block fails: verl empties it before it writes, and a full disk leaves it empty."""
    before = tracker.with_name(f"{tracker.name}.before")
    before.unlink(missing_ok=True)
    if tracker.is_file():
        shutil.copyfile(tracker, before)
    try:
        yield
    except BaseException:
        if before.is_file():
            before.replace(tracker)
        else:
            tracker.unlink(missing_ok=True)
        raise
    before.unlink(missing_ok=True)


def unwritten(folder: Path, error: Exception) -> str:
    """Why the checkpoint ``folder`` could not be written, what is left, and how to resume."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    tracker = folder.parent / TRACKER
    step = tracker.read_text().strip() if tracker.is_file() else None
    last = "there is none" if step is None else f"global_step_{step} is the newest complete one"
    cause = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return (
        f"the checkpoint {folder} could not be written ({cause}); {free:.2f} GiB are free there. Of the checkpoints in "
        f"{folder.parent} {last}. Free some space, or make the folder writable; the same command with "
        "trainer.resume_mode=auto then continues from it"
    )
