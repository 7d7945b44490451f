"""The trainer's part of the trajectory log: the run, the credit of each turn, the metrics of each step.

``run.json`` describes the run, and a file each start of the trainer. The actor's ranks write what an update does to
each turn (:mod:`verl_turnkey.plugins.actor.updates`); the trainer sends them the turn of each token.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.envs.user_modules import entries
from verl_turnkey.plugins.actor import updates
from verl_turnkey.plugins.checks.data import validation_panel
from verl_turnkey.plugins.checks.files import listed
from verl_turnkey.plugins.config.leaves import files_of, sources
from verl_turnkey.plugins.config.machine import git, hardware, versions
from verl_turnkey.plugins.config.schema import credit_modify, credit_params, estimator_of, loss_of, turnkey_config
from verl_turnkey.plugins.config.training import LogConfig
from verl_turnkey.plugins.credit.estimator import CreditStep
from verl_turnkey.plugins.credit.rows import Rows, read_rows, record_of
from verl_turnkey.plugins.credit.table import Numbers, credit_columns, of_verl, progress_advantage, token_columns
from verl_turnkey.plugins.credit.trainer_columns import tokens_of
from verl_turnkey.plugins.log import bounds
from verl_turnkey.plugins.log.bounds import logged_shares
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.log.schema import SCHEMA_VERSION
from verl_turnkey.plugins.log.sources import keep_copies, record
from verl_turnkey.plugins.log.writer import (
    UNNAMED,
    Counts,
    Tables,
    look_for,
    private,
    sha256,
    write_json,
    write_segment,
)
from verl_turnkey.plugins.notices import logger, warn_once
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.view.traces import warn_of_unsent

SECONDS = 10.0
"""how long training waits for the disk before it starts"""


def write_start(config: DictConfig, resumed_from: int) -> None:
    """Write ``run.json`` and ``segments/<segment>.json``, if the run has a log; without them if the disk refuses.

    ``resumed_from``: the step of the checkpoint that was loaded, 0 without one.
    """
    log = turnkey_config(config).log
    if log.trajectories is None:
        return
    folder, segment = Path(log.trajectories), log.segment or UNNAMED
    masked_config = masked(OmegaConf.to_container(config, resolve=True))
    facts = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "versions": versions(),
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "hardware": {
            **hardware(),
            "nodes": config.trainer.get("nnodes"),
            "per_node": config.trainer.get("n_gpus_per_node"),
        },
        "panel": validation_panel(config),
        **_shares(config),
        "config": masked_config,
    }

    def write() -> None:
        try:
            write_json(private(folder) / "run.json", {**about(config), "config": masked_config})
            start = {**facts, "files": _files(config)}
            write_segment(folder, segment, start)
            files = record({**sources(config), **_packages()})
            write_segment(folder, segment, {**start, "sources": files})
            keep_copies(files, folder)
        except Exception as error:  # the log may be incomplete, the run goes on
            logger.warning(
                "turnkey.log.trajectories lacks part of the description of the run, which %s cannot write: %s: %s",
                *(socket.gethostname(), type(error).__name__, error),
            )

    thread = threading.Thread(target=write, name="start of the trajectory log", daemon=True)
    thread.start()
    thread.join(SECONDS)


def about(config: DictConfig) -> dict[str, Any]:
    """What readers of the tables need: schema, method and parameters."""
    turnkey = turnkey_config(config)
    estimator, loss = estimator_of(config), loss_of(config)
    params = credit_params(config, turnkey)
    return {
        "schema": SCHEMA_VERSION,
        "project": config.trainer.get("project_name"),
        "experiment": config.trainer.get("experiment_name"),
        "method": str(config.algorithm.adv_estimator) if estimator is None else estimator.name,
        "params": asdict(params) if is_dataclass(params) else {},  # pyright: ignore[reportArgumentType]
        "modify": [
            {"name": modifier.spec.name, **asdict(modifier.params)} for modifier in credit_modify(config, turnkey)
        ],
        **_shares(config),
        "panel": validation_panel(config),
        "loss": str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode")) if loss is None else loss.name,
    }


def _shares(config: DictConfig) -> dict[str, float]:
    """The logged shares; of other groups only failed episodes are in the log."""
    shares = logged_shares(config)
    return {"share": shares.training, "validation_share": shares.validation}


def _files(config: DictConfig) -> dict[str, str]:
    """Path of each file of tasks -> its sha256."""
    paths = [Path(path) for key in ("train_files", "val_files") for path in listed(config, key)]
    return {str(path): sha256(path) for path in paths if path.is_file()}


def _packages() -> dict[str, dict[str, Path | str]]:
    """Group of entry points -> the packages that it names, as those of ``turnkey.modules``."""
    return {
        f"verl_turnkey.{kind}": files_of("turnkey.modules", [entry.module for entry in of_kind], Path())
        for kind, of_kind in entries().items()
    }


METRICS = "turnkey/log/"
FINISH_SECONDS = 5.0
"""how long a rank that ends waits for its rows"""


class Tee:
    """Wraps verl's loggers; ``transform`` may change the metrics of a step before they are logged."""

    def __init__(self, inner: Any, transform: Callable[[Mapping[str, Any], int], Mapping[str, Any]]) -> None:
        self._inner, self._transform = inner, transform

    def log(self, data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        self._inner.log(data=self._transform(data, step), step=step, backend=backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TrainingLog:
    """The trainer's part of the trajectory log, if there is one."""

    def __init__(self, trainer: PPOTrainer, options: LogConfig) -> None:
        self._trainer, self._options = trainer, options
        self._segment = options.segment or UNNAMED
        self._share = bounds.logged_shares(trainer.config).training
        self.tables = Tables(options.trajectories, self._segment, "trainer") if options.trajectories else None
        """None: there is no log"""
        self.tidying: threading.Thread | None = None
        self._pending: dict[Any, int] = {}  # outstanding answers, each with its process
        self._counts: dict[int, Counts] = {}
        self.begin_step()

    def over(self, loggers: Any) -> Any:
        """verl's loggers, wrapped so that their metrics are in the log, too."""
        return loggers if self.tables is None else Tee(loggers, self._log_metrics)

    def record_updates(self) -> None:
        """Make the actor's ranks write what an update does to each turn."""
        if self.tables is not None:
            where = (self._options.trajectories, self._segment)
            workers = self._trainer.actor_rollout_wg.workers
            ray.get([worker.__ray_call__.remote(updates.install, *where) for worker in workers])

    def look_for(self, players: Sequence[Any]) -> None:
        """Make all processes that write to the log warn if their node does not see its folder."""
        if self.tables is not None:
            for worker in (*players, *self._trainer.actor_rollout_wg.workers):
                worker.__ray_call__.remote(look_for, self._options.trajectories, self._segment)

    def begin_step(self) -> None:
        """A step begins: its batches number their rows and groups consecutively."""
        self._first_row, self._numbers = 0, Numbers()

    @contextmanager
    def of_run(self, players: Sequence[Any]) -> Iterator[None]:
        """Complete the log when verl's loop ends, also by an error, which the log may explain."""
        self.look_for(players)
        try:
            yield
        finally:
            of_players = [worker.__ray_call__.remote(loop_worker.finish) for worker in players]
            if pending := [*of_players, *self.flush(FINISH_SECONDS)]:
                answered, _ = ray.wait(pending, num_returns=len(pending), timeout=2 * loop_worker.FINISH_SECONDS)
                unsent = 0
                for ref in {*answered} & {*of_players}:
                    with suppress(RayError):  # dead processes are reported elsewhere
                        unsent += ray.get(ref)
                warn_of_unsent(unsent, self._options.otlp)
            if self.tables is not None:
                self.tables.drain(FINISH_SECONDS)

    def credit(self, step: CreditStep, fields: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Write the credit of the batch to the log; returns the columns that say whose turn each token is.

        ``fields``: verl's fields of the rows.
        """
        if self.tables is None:
            return {}
        try:
            return self._write_credit(step, fields)
        except Exception as error:  # the log may be incomplete, the run goes on
            warn_once(f"the credit of a batch is not in turnkey.log.trajectories: {type(error).__name__}: {error}")
            return {}

    def _write_credit(self, step: CreditStep, fields: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        assert self.tables is not None
        rows, credit, kl = step.rows or _derived(step, fields), step.credit, None
        if rows is None:
            return {}
        if credit is None:
            credit, kl = of_verl(rows, fields, self._trainer.use_critic)
        elif rows.kl is not None:
            kl = -rows.kl
        steps = rows.steps
        chosen = np.array([bounds.chosen(group, self._share) for group in steps.ids["group"]], dtype=bool)[steps.group]
        step_number = self._trainer.global_steps
        numbering = {"train_step": step_number, "first_row": self._first_row, "numbers": self._numbers}
        further = {"kl": kl, "progress": progress_advantage(rows, fields)}
        self.tables.put("credit", step_number, credit_columns(rows, credit, chosen=chosen, **further, **numbering))
        if (tokens := step.tokens or tokens_of(fields, rows.turns, step_number)) is not None:
            lists = token_columns(rows, credit, tokens, train_step=step_number, chosen=chosen)
            self.tables.put("tokens", step_number, lists)
        of_turns = updates.columns(rows, self._first_row, chosen)
        self._first_row += len(step.keys)
        return of_turns

    def _log_metrics(self, data: Mapping[str, Any], step: int) -> Mapping[str, Any]:
        """Write the metrics of a step to the log, and delete old texts; returns them with those of the log itself."""
        assert self.tables is not None
        self._gather()
        # Rows and seconds of the trainer and, from their last answers, of all other processes.
        totals = map(sum, zip(self.tables.counts, *self._counts.values(), strict=True))
        of_log = {f"{METRICS}{name}": float(total) for name, total in zip(Counts._fields, totals, strict=True)}
        data = {**data, **of_log}
        numbers = {name: number for name, value in data.items() if (number := _number(value)) is not None}
        columns: dict[str, Any] = {"train_step": np.full(len(numbers), step, np.int32), "name": [*numbers]}
        columns["value"] = np.array([*numbers.values()], np.float64)
        self.tables.put("steps", step, columns)
        keep = self._options.keep_texts
        if keep is not None and not (self.tidying and self.tidying.is_alive()):  # in the background: the disk may hang
            texts = (self._options.trajectories, step, keep)
            self.tidying = threading.Thread(target=bounds.keep_texts, args=texts, daemon=True)
            self.tidying.start()
        return data

    def flush(self, drain: float = 0.0) -> list[Any]:
        """Make the ranks write what they recorded and all processes report counts; returns the outstanding answers."""
        if self.tables is None:
            return []
        self._gather()
        ranks = self._trainer.actor_rollout_wg.workers
        refs = [worker.__ray_call__.remote(updates.hand_over, drain) for worker in ranks]
        players = internals.loop_workers(self._trainer.agent_loop_manager)
        refs += [worker.__ray_call__.remote(loop_worker.log_counts) for worker in players]
        # Ranks by position; agent-loop workers by identity, since their order rotates.
        owners = [*range(len(ranks)), *map(id, players)]
        self._pending |= dict(zip(refs, owners, strict=True))
        return refs

    def keep(self) -> None:
        """Write what the rollouts and this process still hold, when the run ends early."""
        if self.tables is not None:
            # verl makes them after the first weights are sent
            players = internals.loop_workers(getattr(self._trainer, "agent_loop_manager", None))
            pending = [worker.__ray_call__.remote(loop_worker.finish) for worker in players]
            if pending:
                ray.wait(pending, num_returns=len(pending), timeout=loop_worker.FINISH_SECONDS)
            self.tables.drain(FINISH_SECONDS)

    def _gather(self) -> None:
        if not self._pending:
            return
        answered, _ = ray.wait([*self._pending], num_returns=len(self._pending), timeout=0)
        for ref in answered:
            owner = self._pending.pop(ref)
            with suppress(RayError):  # dead processes are reported elsewhere
                self._counts[owner] = ray.get(ref)


def _derived(step: CreditStep, columns: Mapping[str, torch.Tensor]) -> Rows | None:
    """The turns of rows without records, under an estimator of verl's; None if some rows have one."""
    if any(record_of(fields) is not None for fields in step.extra_fields):
        return None
    read = step.keys, step.tags, step.extra_fields, step.response_mask
    return read_rows(*read, scores=columns["rm_scores"], values=step.values)


def _number(value: Any) -> float | None:
    """A metric as a number; None for anything but a scalar."""
    scalar = isinstance(value, Real) or (isinstance(value, np.ndarray | torch.Tensor) and math.prod(value.shape) == 1)
    with suppress(TypeError, ValueError):  # an array of something else
        return float(value) if scalar else None
    return None
