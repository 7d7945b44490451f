"""Metrics of the rollouts of a step: those of the environment hosts, requested once, and the rollouts without a row.

A data row may set its number of rollouts (``__rollout_n__``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from tensordict import TensorDict

from verl_turnkey.plugins.checks.files import ROLLOUTS
from verl_turnkey.plugins.credit.rows import REPLAYED, split_key
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta

PREFIX = "hosts/"
TIMES = "rollout_s/"
SECONDS = 0.5  # workers and hosts that answer later are left out: no step waits for a metric


class HostMetrics:
    """What the hosts of the agent-loop ``workers`` measured since the last request."""

    def __init__(self, workers: Sequence[Any] = ()) -> None:
        self._workers = tuple(workers)
        self._pending: dict[int, Any] = {}

    def ask(self) -> None:
        """Request the readings, except from workers that have not answered yet; called after the rollouts of a step."""
        for worker in self._workers:
            if id(worker) not in self._pending:
                self._pending[id(worker)] = worker.__ray_call__.remote(loop_worker.measure)

    def read(self) -> dict[str, float]:
        """The answers as metrics; ``hosts/silent`` counts workers and hosts without one.

        Empty if no environment runs in a host.
        """
        refs = list(self._pending.values())
        answers, dead, late = _answers(refs)
        readings, gone, slow = _answers([reading for hosts, _ in answers for reading in hosts])
        self._pending = {worker: ref for worker, ref in self._pending.items() if ref in late}
        metrics = {f"{PREFIX}{name}": value for name, value in summary(readings).items()}
        if ended := [seconds for _, times in answers for seconds in times]:
            metrics |= {
                f"{TIMES}{name}": float(np.mean([seconds_of[name] for seconds_of in ended])) for name in ended[0]
            }
        silent = dead + gone + len(late) + len(slow)
        return metrics | {f"{PREFIX}silent": float(silent)} if metrics or silent else {}


def _answers(refs: list[Any]) -> tuple[list[Any], int, list[Any]]:
    """The answers so far, the number of errors, and the requests without an answer."""
    if not refs:
        return [], 0, []
    ready, late = ray.wait(refs, num_returns=len(refs), timeout=SECONDS)
    answers, dead = [], 0
    for ref in ready:
        try:
            answers.append(ray.get(ref))
        except RayError:
            dead += 1
    return answers, dead, late


def summary(hosts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of the readings of all hosts (``EnvHost.measure``), without their common prefix.

    Counts are sums over the hosts; ``open/max`` and ``waiting/max`` are those of the fullest one. Quantiles are over
    the calls of all hosts, in milliseconds; ``step_ms/p95_of_slowest`` is that of the host where it is largest.
    """
    if not hosts:
        return {}
    metrics = {"count": float(len(hosts))}
    for name in ("open", "waiting", "in_flight", "lost"):
        metrics[name] = float(sum(host[name] for host in hosts))
    for name in ("open", "waiting"):
        metrics[f"{name}/max"] = float(max(host[name] for host in hosts))
    for kind in ("step", "reset"):
        every = np.concatenate([host[kind] for host in hosts]) * 1e3
        metrics[f"{kind}s"] = float(len(every))
        if len(every):
            p50, p95, most = np.quantile(every, [0.5, 0.95, 1.0]).tolist()
            metrics |= {f"{kind}_ms/p50": p50, f"{kind}_ms/p95": p95, f"{kind}_ms/max": most}
    if slow := [float(np.quantile(host["step"], 0.95)) for host in hosts if len(host["step"])]:
        metrics["step_ms/p95_of_slowest"] = max(slow) * 1e3
    return metrics


REMEMBERED = 100_000
"""prompts whose number of rollouts is kept; those of dropped groups never come back"""


class RolloutCounter:
    """Remembers the prompts that a replay buffer samples, including those without any row.

    Args:
        buffer: verl's replay buffer, or a user's, which may lack ``_materialize_batch``.
        prompts: number of prompts in a batch.
        rollouts: number of rollouts of a prompt that sets none.
    """

    def __init__(self, buffer: Any, prompts: int, rollouts: int) -> None:
        self._prompts, self._rollouts = prompts, rollouts
        self._of_prompt: dict[str, int] = {}
        self._varies = False
        self._sampled: list[str] = []
        self._materialize = getattr(buffer, "_materialize_batch", None)
        if self._materialize is not None:
            buffer._materialize_batch = self._on_batch

    def submit(self, batch: TensorDict) -> None:
        """Store the numbers of rollouts that the prompts of ``batch`` set."""
        if ROLLOUTS in batch:
            self._varies = True
            self._of_prompt.update(zip(map(str, batch["uid"]), map(int, batch[ROLLOUTS]), strict=True))
            while len(self._of_prompt) > REMEMBERED:
                del self._of_prompt[next(iter(self._of_prompt))]

    def _on_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        assert self._materialize is not None
        if partition_id == "train":
            self._sampled = list(selected_prompt_uids)
        return self._materialize(partition_id, selected_prompt_uids, partition_snapshot)

    def missing(self, batch: KVBatchMeta, left_out: Counter[str], step: int) -> dict[str, float]:
        """The metric of the rollouts of the current batch without a row, and a warning if there are any.

        An agent loop that raises leaves no row: verl then silently trains on the rest of its group. ``left_out``:
        rollouts with rows of the groups that are not trained.
        """
        played = [
            key
            for key, tag in zip(batch.keys, batch.tags, strict=True)
            if not tag.get("is_padding", False) and not tag.get(REPLAYED, False)
        ]
        with_rows = Counter(group for group, _ in {split_key(key)[:2] for key in played}) + left_out
        prompts = {*self._sampled, *with_rows}
        self._sampled = []
        expected = self._rollouts * max(0, self._prompts - len(prompts))
        for uid in prompts:
            # After a resume, the number that a prompt had set is unknown.
            expected += self._of_prompt.pop(uid, with_rows[uid] if self._varies else self._rollouts)
        missing = max(0, expected - with_rows.total())
        if missing:
            logger.warning(
                "%d of %d episodes of step %d left no row: the agent loop raised, see the log of its worker",
                *(missing, missing + with_rows.total(), step),
            )
        return {"episode/missing": float(missing)}
