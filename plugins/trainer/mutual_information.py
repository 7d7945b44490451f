"""How much responses depend on their prompts: RAGEN-2's proxy of the mutual information (arXiv:2604.06268).

A policy whose responses have become a template that fits every prompt may still have a high entropy. The proxy detects
this: each response is scored after the prompts of other tasks as well as after its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from verl_turnkey.envs.model_texts import FAMILIES
from verl_turnkey.plugins.config.scorers import MutualInformationConfig
from verl_turnkey.plugins.credit.rows import Runs, split_key
from verl_turnkey.plugins.teacher.column import MODEL_INPUTS, Forward, rows_of
from verl_turnkey.plugins.teacher.rows import FIELDS, Row, read_rows, runs_of
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, partition_of


def prompt_information(log_probs: NDArray[np.float64], lengths: NDArray[np.int64]) -> dict[str, float]:
    """The metrics of N responses after N prompts; MI = mean_i(l_ii - log mean_j exp(l_ij)), at most log N.

    ``log_probs`` (N, N): of response i, summed over its tokens, after prompt j, in nats; ``lengths`` (N,): its tokens.

    ``per_token`` replaces the sums by means over tokens: it is less noisy, but not a mutual information. RAGEN-2's
    z-score is left out: it divides by the standard deviation of the same sample.
    """
    after_own, number = np.diag(log_probs), len(log_probs)
    means = log_probs / lengths[:, None]
    return {
        "sequence": float((after_own - _log_mean(log_probs)).mean()),
        "per_token": float((np.diag(means) - _log_mean(means)).mean()),
        "bound": float(np.log(number)),
        "entropy": float(-after_own.mean()),
        "retrieval": float((log_probs.argmax(1) == np.arange(number)).mean()),
        "chance": 1 / number,
    }


def _log_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.logaddexp.reduce(values, axis=1) - np.log(values.shape[1])


class MutualInformation:
    """Computes the metrics right after verl's old log-probabilities, at the steps of ``every``."""

    def __init__(self, trainer: Any, options: MutualInformationConfig) -> None:
        self._trainer, self._options, self._forward = trainer, options, Forward(trainer)

    def after_old_log_probs(self, batch: KVBatchMeta) -> dict[str, float]:
        """The metrics over a first turn of each task; none at other steps, or with fewer than two tasks."""
        step, every = self._trainer.global_steps, self._options.every
        if not every or (step != 1 and step % every):
            return {}
        started = perf_counter()
        turns = self._first_turns(batch, np.random.default_rng(step))
        if len(turns) < 2:
            return {}
        pairs = [(i, j) for i in range(len(turns)) for j in range(len(turns))]
        fill = -len(pairs) % self._forward.multiple()
        rows = {f"{i}_{j}": turns[i].after(turns[j]) for i, j in pairs} | {
            f"fill_{n}": turns[0].after(turns[0]) for n in range(fill)
        }
        answers = self._forward.log_probs(rows)
        sums = np.array([float(answers[f"{i}_{j}"][turns[i].scored].double().sum()) for i, j in pairs])
        lengths = np.array([turn.scored.stop - turn.scored.start for turn in turns])
        values = prompt_information(sums.reshape(len(turns), -1), lengths)
        values |= {"prompts": float(len(turns)), "seconds": perf_counter() - started}
        return {f"mutual_information/{name}": value for name, value in values.items()}

    def _first_turns(self, batch: KVBatchMeta, rng: np.random.Generator) -> list[_Turn]:
        """The first turn of a random episode for each of up to ``prompts`` random tasks; none with images."""
        queue, tokenizer = partition_of(batch), self._trainer.tokenizer
        names = [name for name in queue.fields(batch.keys) if name in {*FIELDS, *MODEL_INPUTS}]
        data = queue.read(batch.keys, names)
        columns = {name: rows_of(data.get(name)) for name in MODEL_INPUTS if name in names}
        runs = Runs.of(data["response_mask"])
        rows = read_rows(batch.keys, batch.tags, data.exclude("position_ids", "multi_modal_inputs"), tokenizer)
        tasks: dict[str, list[_Turn]] = {}
        for i in rows:
            task, _, index = split_key(batch.keys[i])
            row = {name: column[i] for name, column in columns.items()}
            if index == 0 and not row.pop("multi_modal_inputs", None):
                start, length = runs_of(runs, i)[0]
                ids = row["responses"][: start + length]
                scored = slice(start, start + length)
                if self._options.tokens == "thoughts":
                    scored = thoughts(ids.tolist(), tokenizer)
                if scored is not None:
                    tasks.setdefault(task, []).append(_Turn(row, ids[: scored.stop], scored))
        chosen = rng.permutation(sorted(tasks))[: self._options.prompts]
        return [tasks[task][rng.integers(len(tasks[task]))] for task in chosen]


class _Turn(NamedTuple):
    """A first turn: its row, the ids of its response up to the last scored one, and which of them are scored."""

    row: Row
    ids: torch.Tensor
    scored: slice

    def after(self, other: _Turn) -> Row:
        """This response after the other's prompt, as a row of the queue."""
        prompt, position = other.row["prompts"], other.row["position_ids"][..., : len(other.row["prompts"])]
        further = position[..., -1:] + torch.arange(1, len(self.ids) + 1, dtype=position.dtype)
        mask = torch.zeros_like(self.ids)
        mask[self.scored] = 1
        ids = torch.cat([prompt, self.ids])
        row = {"input_ids": ids, "prompts": prompt, "responses": self.ids, "response_mask": mask, "loss_mask": mask}
        row |= {"position_ids": torch.cat([position, further], -1), "attention_mask": torch.ones_like(ids)}
        return {name: value.to(self.row[name].dtype) for name, value in row.items() if name in self.row}


def thoughts(ids: Sequence[int], tokenizer: Any) -> slice | None:
    """The tokens of ``ids`` between the first marks of thoughts; None without any.

    Thoughts that the generation prompt opened begin with the first token.
    """

    def characters(number: int) -> int:
        return len(tokenizer.decode(ids[:number]))

    text, counts = tokenizer.decode(ids), range(len(ids) + 1)
    for family in FAMILIES:
        end = text.find(family.end)
        begin = text.find(family.begin, 0, max(end, 0))
        if end >= 0 and (begin >= 0 or family.alone):
            first = bisect_left(counts, begin + len(family.begin) if begin >= 0 else 0, key=characters)
            stop = bisect_right(counts, end, key=characters) - 1
            return slice(first, stop) if first < stop else None
    return None
