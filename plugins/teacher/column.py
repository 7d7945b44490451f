"""The columns ``teacher_log_prob`` and ``has_teacher``: a forward pass of the actor over prompts with a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.utils.padding import response_from_nested

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.config.scorers import HAS_TEXT, TEACHER_LOG_PROB
from verl_turnkey.plugins.teacher.rows import (
    FIELDS,
    Row,
    TextIds,
    TextWriter,
    places,
    read_rows,
    selected,
    splice,
    tail_of,
)
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, Partition, partition_of

# Further forward passes of the actor, over rows of our own.
#
# verl computes the old log-probabilities with the weights that the batch is trained from; ``separate_async`` puts these
# in place for that call alone. So the passes run right after this call, not after the trainer's method around it.

PARTITION = Partition("turnkey_teacher")
"""of the queue, for the rows of these passes; the replay buffer does not read it"""
MODEL_INPUTS = (
    *("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask", "attention_mask"),
    "multi_modal_inputs",
)


class AfterOldLogProbs:
    """Runs ``passes`` once verl has put ``log_probs`` into the queue; each takes the batch and returns metrics."""

    def __init__(self, *passes: Callable[[KVBatchMeta], dict[str, float]]) -> None:
        self._passes = passes
        self._metrics: dict[str, Any] | None = None
        """of the step whose old log-probabilities are being computed"""

    @contextmanager
    def during(self, metrics: dict[str, Any]) -> Iterator[None]:
        """While verl computes the old log-probabilities of a batch."""
        self._metrics = metrics
        try:
            yield
        finally:
            self._metrics = None

    def after_call(self, method: str, batch: KVBatchMeta) -> None:
        """Called after each worker call; the passes' own calls come here, too."""
        if method == "compute_log_prob" and self._metrics is not None:
            metrics, self._metrics = self._metrics, None
            for score in self._passes:
                metrics.update(score(batch))


class Forward:
    """The log-probabilities of rows under the weights of the old log-probabilities, or of the reference policy."""

    def __init__(self, trainer: Any, weights: Literal["old", "ref"] = "old") -> None:
        self._trainer, self._weights = trainer, weights
        self._config: DictConfig = trainer.config

    @property
    def _of_reference(self) -> bool:
        """Whether the rows go to the group of the reference policy."""
        return self._weights == "ref" and not self._trainer.ref_in_actor

    def multiple(self) -> int:
        """The number of rows must be a multiple of this: ranks get equally many, in whole fixed micro-batches."""
        part = self._config.actor_rollout_ref["ref" if self._of_reference else "rollout"]
        ranks = internals.data_parallel_size(self._trainer.actor_rollout_wg)
        return ranks if part.log_prob_use_dynamic_bsz else ranks * int(part.log_prob_micro_batch_size_per_gpu)

    def log_probs(self, rows: dict[str, Row]) -> dict[str, torch.Tensor]:
        """Log-probabilities (L,) of the response tokens of each row, by its key."""
        keys = [*rows]
        lengths = [len(row["input_ids"]) for row in rows.values()]
        ranks = internals.data_parallel_size(self._trainer.actor_rollout_wg)
        workload = calculate_workload(torch.tensor(lengths)).tolist()
        by_rank: Any = get_seqlen_balanced_partitions(workload, k_partitions=ranks, equal_size=True)
        keys = [keys[j] for indices in by_rank for j in indices]
        tags = [{"status": "success", "seq_len": len(rows[key]["input_ids"])} for key in keys]
        try:
            batch = PARTITION.write_rows(keys, [rows[key] for key in keys], tags)
            batch.extra_info = {
                "calculate_entropy": False,
                "compute_loss": False,
                "temperature": self._config.actor_rollout_ref.rollout.temperature,
            }
            if self._of_reference:
                self._trainer.ref_policy_wg.compute_ref_log_prob(batch)
            else:
                if self._weights == "ref":
                    batch.extra_info["no_lora_adapter"] = True
                self._trainer.actor_rollout_wg.compute_log_prob(batch)
            data = PARTITION.read(keys, ["log_probs", "response_mask"])
        finally:
            PARTITION.clear(keys)
        answers = response_from_nested(data["log_probs"], data["response_mask"])
        return dict(zip(keys, answers.unbind(), strict=True))


def rows_of(column: Any) -> list[Any]:
    """The rows of a field of the queue."""
    return list(column.unbind()) if isinstance(column, torch.Tensor) else column.tolist()


def joined(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """One tensor of the rows' tokens; None where no row has any."""
    present = [row for row in rows if row is not None]
    return torch.cat(present) if present else None


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def contrast(
    gap: torch.Tensor | None, advantage: torch.Tensor, mask: torch.Tensor, placebo: torch.Tensor | None = None
) -> float | None:
    """Mean gap of tokens with a positive advantage minus the mean gap of tokens with a negative one; None without both.

    ::

        mean of D over {A > 0}  -  mean of D over {A < 0},      D - D(placebo) in the place of D where there is one

    A single mean says little: under the policy's own samples E[D] = -KL(policy || teacher), so a text that says nothing
    true has a negative mean as well. In the difference that cancels, as far as it is the same for both kinds of tokens.

    Args:
        gap, advantage, mask, placebo: (N,) of N tokens; tokens whose mask is 0 do not count.
    """
    if gap is None:
        return None
    gap = (gap if placebo is None else gap - placebo).double()
    good, bad = (gap[mask.bool() & sign] for sign in (advantage > 0, advantage < 0))
    return (good.mean() - bad.mean()).item() if len(good) and len(bad) else None


def gap_metrics(rows: Pairs, control: Pairs) -> dict[str, float]:
    """Mean of the gap and of its size over the model's tokens; of ``control``, rows sent without a text, the size.

    ``rows``, ``control``: gap and mask (L,) of each row. The control's size is the noise of computing the same
    number twice in other company; without such rows there is no metric.
    """
    metrics: dict[str, float] = {}
    if rows:
        values = torch.cat([gap[mask.bool()] for gap, mask in rows]).double()
        metrics |= {"teacher/gap/mean": values.mean().item(), "teacher/gap_abs/mean": values.abs().mean().item()}
    if control:
        values = torch.cat([gap[mask.bool()] for gap, mask in control]).double()
        metrics["teacher/gap_abs/control"] = values.abs().mean().item()
    return metrics


CONTROL_SHARE = 16
"""rows with a text for each row that is only there for the control"""


class Teacher:
    """Writes the columns of a batch once verl has its old log-probabilities; without a source it does nothing."""

    def __init__(self, trainer: Any, turnkey: TurnkeyConfig) -> None:
        self._trainer, self._options = trainer, turnkey.teacher
        self._config: DictConfig = trainer.config
        self._writer = None if self._options.source is None else TextWriter(self._config, turnkey)
        self._forward = Forward(trainer, turnkey.teacher.weights)
        self._ids: TextIds | None = None
        self._tail: list[int] = []
        self._gaps: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """by key of the rows with a text: teacher minus old log-probabilities (L,), and those of the placebo"""

    def after_advantage(self, batch: KVBatchMeta) -> dict[str, float]:
        """How far the gaps and the advantages agree."""
        return self.contrast(batch, self._trainer.advantage_step.untaught)

    def contrast(self, batch: KVBatchMeta, credit: torch.Tensor | None = None) -> dict[str, float]:
        """The metric ``teacher/contrast``, once the advantages are in the queue.

        ``credit``: jagged, in the rows' order: what the signs are taken from in the place of the advantages.
        """
        if not self._gaps:
            return {}
        at = [i for i, key in enumerate(batch.keys) if key in self._gaps]
        keys = [batch.keys[i] for i in at]
        data = partition_of(batch).read(keys, ["advantages", "response_mask"])
        rows = None if credit is None else credit.unbind()
        signs = data["advantages"].values() if rows is None else torch.cat([rows[i] for i in at])
        gap, placebo = (joined([self._gaps[key][n] for key in keys]) for n in (0, 1))
        value = contrast(gap, signs, data["response_mask"].values(), placebo)
        return {} if value is None else {"teacher/contrast": value}

    def after_old_log_probs(self, batch: KVBatchMeta) -> dict[str, float]:
        """Write the columns of a batch whose old log-probabilities verl has just computed; returns metrics."""
        started, writer = perf_counter(), self._writer
        self._gaps = {}
        if writer is None:
            return {}
        self._learn()
        queue = partition_of(batch)
        needed = {*FIELDS, *writer.columns, *MODEL_INPUTS, "log_probs"}
        names = queue.fields(batch.keys)  # a source that is a function may read any of them
        data = queue.read(batch.keys, [name for name in names if name in needed or writer.spec is None])
        mask = data["response_mask"]
        old = list(response_from_nested(data.pop("log_probs"), mask).unbind())
        inputs = [name for name in MODEL_INPUTS if name in data]
        columns = {name: rows_of(data.get(name)) for name in inputs}
        prompts = [row.tolist() for row in columns["prompts"]]
        rows = read_rows(batch.keys, batch.tags, data.exclude("position_ids", "multi_modal_inputs"), self._tokenizer)
        chosen = selected(rows, self._options.rows)
        self._check_turns(chosen, writer)
        began = perf_counter()
        texts, errors = writer.write(chosen)
        source_seconds = perf_counter() - began
        at = dict(zip(rows, places([batch.keys[i] for i in rows], [prompts[i] for i in rows], self._tail), strict=True))
        assert self._ids is not None
        encoded = {i: self._ids.ids(text) for i, text in texts.items() if at[i] is not None}
        plain = {i: {name: column[i] for name, column in columns.items()} for i in encoded}
        sent: dict[str, Row] = {}
        for i, (ids, _) in encoded.items():
            place = at[i]
            assert place is not None
            sent[f"text_{i}"] = splice(plain[i], ids, place)
            if self._options.placebo:
                sent[f"placebo_{i}"] = splice(plain[i], self._ids.placebo(len(ids)), place)
        controls = self._controls(plain, len(sent))
        sent |= {f"control_{n}": plain[i] for n, i in enumerate(controls)}
        answers = self._forward.log_probs(sent) if sent else {}
        column = [answers.get(f"text_{i}", old[i]) for i in range(len(old))]
        for i in encoded:
            placebo = answers.get(f"placebo_{i}")
            self._gaps[batch.keys[i]] = (column[i] - old[i], None if placebo is None else placebo - old[i])
        has_text = torch.zeros(len(old), dtype=torch.bool)
        has_text[[*encoded]] = True
        teacher = torch.nested.as_nested_tensor(column, layout=torch.jagged)
        queue.write(batch.keys, {TEACHER_LOG_PROB: teacher, HAS_TEXT: has_text})
        masks = mask.unbind()
        control = [(answers[f"control_{n}"] - old[i], masks[i]) for n, i in enumerate(controls)]
        return {
            "teacher/rows_with_text": float(len(encoded)),
            "teacher/rows_without_text": float(len(rows) - len(encoded)),
            "teacher/no_place": float(len(texts) - len(encoded)),
            "teacher/text_errors": float(errors),
            "teacher/cut_texts": float(sum(cut for _, cut in encoded.values())),
            "teacher/text_tokens": float(sum(len(ids) for ids, _ in encoded.values())),
            **gap_metrics([(self._gaps[batch.keys[i]][0], masks[i]) for i in encoded], control if self._noisy else []),
            "teacher/source_seconds": source_seconds,
            "teacher/seconds": perf_counter() - started,
        }

    @property
    def _tokenizer(self) -> Any:
        return self._trainer.tokenizer

    @property
    def _noisy(self) -> bool:
        """Whether the gap of a row without a text is noise; by the reference's weights it is not."""
        return self._options.weights == "old"

    def _learn(self) -> None:
        if self._ids is None:
            kwargs: Any = OmegaConf.to_container(
                self._config.data.get("apply_chat_template_kwargs") or OmegaConf.create()
            )
            self._tail = tail_of(self._tokenizer, **kwargs)
            self._ids = TextIds(self._tokenizer, self._options)

    def _check_turns(self, rows: dict[int, Any], writer: TextWriter) -> None:
        """Also for agent loops of a user's own, of which the driver cannot know whether they merge turns."""
        if writer.spec is None or not writer.spec.per_turn:
            return
        for row in rows.values():
            if len(row.steps) != 1:
                raise ConfigError(
                    f"turnkey.teacher.source={writer.spec.name} gives a text per turn, but row {row.key} holds "
                    f"{len(row.steps)} turns, of which later ones would see the text of earlier ones: set "
                    "turnkey.rollout.layout=steps"
                )

    def _controls(self, rows: dict[int, Row], number: int) -> list[int]:
        """Rows that are sent without a text, to fill all ranks and fixed micro-batches: by the old weights their gap
        measures noise."""
        if not number:
            return []
        multiple = self._forward.multiple()
        fill = -number % multiple
        if not fill and number >= CONTROL_SHARE * multiple and self._noisy:
            fill = multiple
        shortest = sorted(rows, key=lambda i: len(rows[i]["input_ids"]))
        return [shortest[n % len(shortest)] for n in range(fill)]
