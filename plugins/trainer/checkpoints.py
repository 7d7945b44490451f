"""Checkpoints: what a method remembers is in them; a run that stops writes one of its last step.

Resuming clears rows without prompts from the queue.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transfer_queue as tq

from verl_turnkey.advantage import EstimatorSpec, Modification
from verl_turnkey.plugins.checks.checkpoints import choose, remembering
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.trainer import credit_state
from verl_turnkey.plugins.verl_api.internals import TRACKER


class Checkpoints:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`."""

    config: Any
    global_steps: int
    base_mode: str
    use_critic: bool
    estimator: EstimatorSpec | None
    credit_params: Any
    credit_modify: Sequence[Modification]
    credit_state: Mapping[str, float]
    """``Credit.state`` of the newest batch: what the next one begins with"""
    _saved: int | None = None
    """the step of the newest checkpoint"""
    _written: tuple[Path, ...] = ()
    """checkpoints of this start that had weights when the newest one was written"""

    def _load_checkpoint(self) -> None:
        """verl's own on the newest whole checkpoint, then clears the rows that its batch left in the queue.

        verl writes a checkpoint when the prompts of the batch have left the queue, but its rows have not. Rows without
        prompts would never be sampled or cleared.
        """
        if said := choose(self.config, use_critic=self.use_critic, remembers=bool(self._remembering())):
            logger.warning(said)
        super()._load_checkpoint()  # type: ignore[misc]
        self._saved = self.global_steps
        if self.global_steps:
            self._load_credit_state()
        items = (tq.kv_list("train") or {}).get("train", {}) if self.base_mode != "sync" else {}
        prompts = {key for key, tag in items.items() if tag.get("is_prompt")}
        left = [key for key in items if key not in prompts and split_key(key)[0] not in prompts]
        if left:
            tq.kv_clear(keys=left, partition_id="train")

    def _load_credit_state(self) -> None:
        if self.estimator is None or not (names := self._remembering()):
            return
        folder = credit_state.resumed_folder(self.config, self.global_steps)
        found = credit_state.load(folder, self.estimator.name)
        if not isinstance(found, str):
            self.credit_state = found
        else:
            logger.warning("%s: %s remembers nothing of the steps before", found, " and ".join(names))

    def _remembering(self) -> list[str]:
        return remembering(self.estimator, self.credit_params, self.credit_modify)

    def _save_checkpoint(self) -> None:
        """verl's own, after the state of the method: verl's last file says that the checkpoint is complete.

        Raises:
            CheckpointError: a file could not be written; verl's tracker names the checkpoint before.
        """
        if self._saved == self.global_steps:  # a run that has to stop did not wait for verl
            return
        folder = credit_state.folder_of(self.config, self.global_steps)
        try:
            with kept(folder.parent / TRACKER):
                if self._remembering():
                    credit_state.save(folder, self.estimator.name, self.credit_state)
                super()._save_checkpoint()  # type: ignore[misc]
        except Exception as error:
            raise CheckpointError(unwritten(folder, error)) from error
        self._saved = self.global_steps
        self._drop_snapshots(folder)

    def _drop_snapshots(self, folder: Path) -> None:
        """Remove the queue's snapshots of checkpoints of this start whose weights verl has removed by its limit.

        verl leaves them, and each holds all rows of its batch. ``folder``: the checkpoint just written. Where its
        weights are on another machine, nothing is known of the others' either.
        """
        if not (folder / "actor").is_dir():
            return
        gone = [each for each in self._written if not (each / "actor").is_dir()]
        for each in gone:
            shutil.rmtree(each / "transfer_queue", ignore_errors=True)
        self._written = (*(each for each in self._written if each not in gone), folder)

    def _save_stopping(self, step: int) -> None:
        """Write a checkpoint of ``step``, the last completed one, unless it exists or the run writes none.

        Weights and the method's state are the newest ones: updates of the step that stopped are in both.
        """
        if self.config.trainer.save_freq <= 0 or self._saved == step:
            return
        self.on_sample_end()  # verl saves after the servers have released their memory
        now, self.global_steps = self.global_steps, step
        try:
            self._save_checkpoint()
            logger.warning("wrote a checkpoint of step %d before stopping", step)
        finally:
            self.global_steps = now


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says where, and how to go on."""


@contextmanager
def kept(tracker: Path) -> Iterator[None]:
    """Put ``tracker`` back if what is inside fails: verl empties it before it writes, and a full disk leaves it so."""
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
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    tracker = folder.parent / TRACKER
    step = tracker.read_text().strip() if tracker.is_file() else None
    last = "there is none" if step is None else f"global_step_{step} is the newest whole one"
    cause = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return (
        f"the checkpoint {folder} could not be written ({cause}); {free:.2f} GiB are free there. Of the checkpoints in "
        f"{folder.parent} {last}. Make room, or the folder writable; the same command with trainer.resume_mode=auto "
        "then goes on from it"
    )
