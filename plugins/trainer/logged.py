"""What the trainer writes into the trajectory log: the credit of each turn, the metrics of each step.

The actor's ranks write what an update does to each turn (:mod:`verl_turnkey.plugins.actor.updates`); the trainer tells
them which turn is whose.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig

from verl_turnkey.plugins.actor import updates
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit.estimator import CreditStep
from verl_turnkey.plugins.credit.row_turns import record_of
from verl_turnkey.plugins.credit.rows import Rows, read_rows
from verl_turnkey.plugins.credit.table import Numbers, credit_columns, of_verl
from verl_turnkey.plugins.log import bounds
from verl_turnkey.plugins.log.segments import UNNAMED, look_for
from verl_turnkey.plugins.log.writer import Counts, Tables
from verl_turnkey.plugins.notices import warn_once
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.verl_api import internals

METRICS = "turnkey/log/"
FINISH_SECONDS = 5.0
"""for which a rank that ends waits for its rows"""


class Tee:
    """verl's loggers; ``beside`` sees what they are told first, and returns what they are told."""

    def __init__(self, inner: Any, beside: Callable[[Mapping[str, Any], int], Mapping[str, Any]]) -> None:
        self._inner, self._beside = inner, beside

    def log(self, data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        self._inner.log(data=self._beside(data, step), step=step, backend=backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Logged:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`."""

    config: DictConfig
    turnkey: TurnkeyConfig
    actor_rollout_wg: Any
    agent_loop_manager: Any
    use_critic: bool
    global_steps: int
    _tables: Tables | None = None
    """None: there is no log"""
    _first_row: int = 0
    """rows of the batches of this step before the current one"""
    _tidying: threading.Thread | None = None

    def _open_log(self, config: DictConfig) -> None:
        log = self.turnkey.log
        self._segment = log.segment or UNNAMED
        if log.trajectories:
            self._tables = Tables(log.trajectories, self._segment, "trainer")
            self._share = bounds.logged_shares(config).training
        self._numbers = Numbers()
        self._pending: dict[Any, int] = {}  # answers that are on their way, each with its process
        self._counts: dict[int, Counts] = {}

    @property
    def logger(self) -> Any:
        """verl's loggers, which ``fit`` sets."""
        return self._logger

    @logger.setter
    def logger(self, verls: Any) -> None:
        self._logger = verls if self._tables is None else Tee(verls, self._log_metrics)

    def _record_updates(self) -> None:
        if self._tables is not None:
            where = (self.turnkey.log.trajectories, self._segment)
            workers = self.actor_rollout_wg.workers
            ray.get([worker.__ray_call__.remote(updates.install, *where) for worker in workers])

    def _look_for_log(self, players: Sequence[Any]) -> None:
        """Have all processes that write to the log warn if their node does not see its folder."""
        if self._tables is not None:
            for worker in (*players, *self.actor_rollout_wg.workers):
                worker.__ray_call__.remote(look_for, self.turnkey.log.trajectories, self._segment)

    def _begin_log(self) -> None:
        """A step begins: its batches number their rows and groups on."""
        self._first_row, self._numbers = 0, Numbers()

    # --- credit -------------------------------------------------------------------------------------------------------

    def _log_credit(self, step: CreditStep, told: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Write the credit of the batch to the log; returns the columns that say whose turn each token is.

        ``told``: verl's fields of the rows.
        """
        if self._tables is None:
            return {}
        try:
            return self._write_credit(step, told)
        except Exception as error:  # the log costs itself, never the run
            warn_once(f"the credit of a batch is not in turnkey.log.trajectories: {type(error).__name__}: {error}")
            return {}

    def _write_credit(self, step: CreditStep, told: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        assert self._tables is not None
        rows, credit, kl = step.rows, step.credit, None
        if credit is None:
            rows = rows or _derived(step, told["rm_scores"])
            if rows is None:
                return {}
            credit, kl = of_verl(rows, told, self.use_critic)
        elif self.config.algorithm.use_kl_in_reward:
            kl = rows.reward_before_kl - rows.steps.reward
        steps = rows.steps
        chosen = np.array([bounds.chosen(group, self._share) for group in steps.ids["group"]], dtype=bool)[steps.group]
        made_of = {"train_step": self.global_steps, "first_row": self._first_row, "numbers": self._numbers}
        columns = credit_columns(rows, credit, kl=kl, chosen=chosen, **made_of)
        self._tables.put("credit", self.global_steps, columns)
        found = updates.columns(rows, self._first_row, chosen)
        self._first_row += len(step.keys)
        return found

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _log_metrics(self, data: Mapping[str, Any], step: int) -> Mapping[str, Any]:
        """Write the metrics of a step to the log; returns them with those of the log itself."""
        assert self._tables is not None
        data = {**data, **self._metrics_of_log()}
        numbers = {name: value for name, found in data.items() if (value := _number(found)) is not None}
        columns = {"train_step": np.full(len(numbers), step, np.int32), "name": [*numbers]}
        self._tables.put("steps", step, columns | {"value": np.array([*numbers.values()], np.float64)})
        self._tidy(step)
        return data

    def _tidy(self, step: int) -> None:
        """Delete texts of long ago, in the background: the disk may hang."""
        log = self.turnkey.log
        if log.keep_texts is not None and not (self._tidying and self._tidying.is_alive()):
            given = (log.trajectories, step, log.keep_texts)
            self._tidying = threading.Thread(target=bounds.keep_texts, args=given, daemon=True)
            self._tidying.start()

    def _metrics_of_log(self) -> dict[str, float]:
        """Rows and seconds of the trainer and, as of their last answer, of all other processes."""
        self._gather()
        own = self._tables.counts
        total = [sum(column) for column in zip(own, *self._counts.values(), strict=True)]
        return {f"{METRICS}{name}": float(value) for name, value in zip(own._fields, total, strict=True)}

    def _flush_log(self, drain: float = 0.0) -> list[Any]:
        """Have the ranks write what they recorded, and all tell their counts; nobody has to wait for these answers."""
        if self._tables is None:
            return []
        self._gather()
        refs = [worker.__ray_call__.remote(updates.hand_over, drain) for worker in self.actor_rollout_wg.workers]
        players = internals.loop_workers(self.agent_loop_manager)
        refs += [worker.__ray_call__.remote(loop_worker.log_counts) for worker in players]
        # Ranks by their place; the agent-loop workers take turns at the first one.
        owners = [*range(len(refs) - len(players)), *map(id, players)]
        self._pending |= dict(zip(refs, owners, strict=True))
        return refs

    def _keep_log(self) -> None:
        """Write what the rollouts and this process hold, where the run ends without its end being reached."""
        if self._tables is not None:
            players = internals.loop_workers(self.agent_loop_manager)
            left = [worker.__ray_call__.remote(loop_worker.finish) for worker in players]
            if left:
                ray.wait(left, num_returns=len(left), timeout=loop_worker.FINISH_SECONDS)
            self._tables.drain(FINISH_SECONDS)

    def _gather(self) -> None:
        if not self._pending:
            return
        done, _ = ray.wait([*self._pending], num_returns=len(self._pending), timeout=0)
        for ref in done:
            owner = self._pending.pop(ref)
            with suppress(ray.exceptions.RayError):  # a process that died says so elsewhere
                self._counts[owner] = ray.get(ref)


def _derived(step: CreditStep, scores: torch.Tensor) -> Rows | None:
    """The turns of rows without records, under an estimator of verl's; None if some rows have one."""
    if any(record_of(fields) is not None for fields in step.extra_fields):
        return None
    return read_rows(step.keys, step.tags, step.extra_fields, step.response_mask, scores=scores, values=step.values)


def _number(value: Any) -> float | None:
    """A metric as a number; None for anything but a scalar."""
    scalar = isinstance(value, Real) or (isinstance(value, np.ndarray | torch.Tensor) and math.prod(value.shape) == 1)
    with suppress(TypeError, ValueError):  # an array of something else
        return float(value) if scalar else None
    return None
