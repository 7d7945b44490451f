"""The columns ``teacher_log_prob`` and ``has_teacher``: a forward pass of the actor over prompts with a text."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.workers.utils.padding import response_from_nested

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.config.scorers import HAS_TEXT, TEACHER_LOG_PROB
from verl_turnkey.plugins.teacher.forward import MODEL_INPUTS, Forward, joined, rows_of
from verl_turnkey.plugins.teacher.gap import contrast, gap_metrics
from verl_turnkey.plugins.teacher.rows import FIELDS, TextWriter, read_rows, selected
from verl_turnkey.plugins.teacher.splice import Row, TextIds, places, splice, tail_of
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, partition_of

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

    def score(self, batch: KVBatchMeta) -> dict[str, float]:
        """Write the columns of a batch whose old log-probabilities verl has just computed; returns metrics."""
        started, writer = perf_counter(), self._writer
        self._gaps = {}
        if writer is None:
            return {}
        self._learn()
        queue = partition_of(batch)
        known = {*FIELDS, *writer.columns, *MODEL_INPUTS, "log_probs"}
        every = queue.fields(batch.keys)
        wanted = [name for name in every if name in known or writer.spec is None]  # a function may read any column
        data = queue.read(batch.keys, wanted)
        mask = data["response_mask"]
        old = list(response_from_nested(data.pop("log_probs"), mask).unbind())
        inputs = [name for name in MODEL_INPUTS if name in data]
        columns = {name: rows_of(data.get(name)) for name in inputs}
        prompts = [row.tolist() for row in columns["prompts"]]
        rows = read_rows(batch.keys, batch.tags, data.exclude("position_ids", "multi_modal_inputs"), self._tokenizer)
        chosen = selected(rows, self._options.rows)
        self._check_turns(chosen, writer)
        began = perf_counter()
        texts = writer.write(chosen)
        source_seconds = perf_counter() - began
        at = dict(zip(rows, places([batch.keys[i] for i in rows], [prompts[i] for i in rows], self._tail), strict=True))
        assert self._ids is not None
        encoded = {i: self._ids.ids(text) for i, text in texts.by_row.items() if at[i] is not None}
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
            "teacher/no_place": float(len(texts.by_row) - len(encoded)),
            "teacher/text_errors": float(texts.errors),
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
