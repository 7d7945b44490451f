"""What an update does to each turn, for the table ``updates`` of the log: importance ratios, clipping, entropy.

The trainer writes to the queue the position of each row in its batch, and of each token's turn in its row. Inside an
actor worker, verl's loss function gets both with the model's output. For each micro-batch a few numbers per token are
copied to the CPU at once, and reduced there; of the ranks that hold the same rows (model or sequence parallelism), only
the first does so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl_turnkey.losses import TokenLoss
from verl_turnkey.losses.clipping import clamp_log_ratio, clipped
from verl_turnkey.losses.turns import like, row_offsets
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.log.writer import Counts, Tables
from verl_turnkey.plugins.notices import warn_once
from verl_turnkey.plugins.verl_api import internals

ROW, TURN = "turnkey_row_id", "turnkey_turn_in_row"
"""columns of the queue: (B,) int64 index of the row in the trainer's batch; (B, L) int64 nested, -1 on other tokens"""
STEP = "turnkey_train_step"
"""entry of a batch's ``extra_info``"""

_terms: ContextVar[list[TokenLoss] | None] = ContextVar("turnkey_terms", default=None)
_recorder: Recorder | None = None


def note(term: TokenLoss) -> None:
    """Called by our policy losses: the running loss reports its terms by token."""
    if (terms := _terms.get()) is not None:
        terms.append(term)


def columns(rows: Rows, first_row: int, chosen: np.ndarray) -> TensorDict:
    """The columns that the trainer writes to the queue: :data:`ROW` and :data:`TURN` of each row of a batch.

    ``first_row``: rows of the step's batches before this one; ``chosen`` (S,) bool: the turns that are recorded.
    """
    of_step = torch.from_numpy(np.append(np.where(chosen, rows.turn, -1), -1))
    size = len(rows.turns.index)
    turn = like(of_step[rows.turns.index.values()], rows.turns.index)
    return TensorDict({ROW: torch.arange(size) + first_row, TURN: turn}, batch_size=size)


class Recorder:
    """The turns of this rank's micro-batches, until :meth:`put` hands them to the writer."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._step: int | None = None
        self._passes: Counter[int] = Counter()  # micro-batches that held a row, in this step
        self._turns: list[dict[str, np.ndarray]] = []

    def add(self, step: int, turns: dict[str, np.ndarray]) -> None:
        """Add the turns of a micro-batch (:func:`of_turns`); a row that occurs again is in its next epoch."""
        if step != self._step:
            self.put()
            self._step, self._passes = step, Counter()
        rows = turns["row_id"].tolist()
        turns["epoch"] = np.array([self._passes[row] for row in rows], dtype=np.int32)
        self._passes.update(set(rows))
        self._turns.append(turns)

    def put(self) -> None:
        parts, self._turns = [turns for turns in self._turns if len(turns["row_id"])], []
        if not parts:
            return
        assert self._step is not None
        columns: dict[str, Any] = {name: np.concatenate([turns[name] for turns in parts]) for name in parts[0]}
        columns = {name: column for name, column in columns.items() if not np.isnan(column).all()}
        columns["train_step"] = np.full(len(columns["row_id"]), self._step, dtype=np.int32)
        self.tables.put("updates", self._step, columns)


def install(process: Any, folder: str, segment: str) -> None:
    """Run inside a process of the actor: its updates are recorded from now on."""
    global _recorder
    actor = internals.actor_worker(process).actor
    if not actor.engine.is_mp_src_rank_with_outputs():
        return
    _recorder = Recorder(Tables(folder, segment, f"rank{dist.get_rank()}"))
    internals.wrap_loss(actor, _recorded, _recorder)


def hand_over(process: Any, drain: float = 0.0) -> Counts:
    """Run inside a process of the actor once an update is over: the writer gets its rows; wait up to ``drain`` s."""
    if _recorder is None:
        return Counts()
    _recorder.put()
    if drain:
        _recorder.tables.drain(drain)
    return _recorder.tables.counts


def _recorded(
    inner: Callable[..., Any],
    recorder: Recorder,
    model_output: Mapping[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    *,
    config: Any,
    **_: Any,
) -> Any:
    token = _terms.set(terms := [])
    try:
        result = inner(model_output=model_output, data=data, dp_group=dp_group)
    finally:
        _terms.reset(token)
    if ROW in data and "log_probs" in model_output:
        try:
            tokens = of_tokens(model_output, data, terms[-1] if terms else None, _verls_clip(config))
            recorder.add(int(data[STEP]), of_turns(tokens.cpu().numpy()))
        except Exception as error:  # a fault of the log must not end the run
            warn_once(f"an update is not in turnkey.log.trajectories: {type(error).__name__}: {error}")
    return result


def _verls_clip(config: Any) -> tuple[float, float] | None:
    """The clip bounds of verl's ``vanilla``; its other losses clip something else, or nothing."""
    if config.policy_loss.get("loss_mode", "vanilla") != "vanilla":
        return None
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


@torch.no_grad()
def of_tokens(
    model_output: Mapping[str, Any], data: TensorDict, term: TokenLoss | None, clip: tuple[float, float] | None
) -> torch.Tensor:
    """(6, tokens) float32 on the device: row, turn, whether it is trained, ratio, clipped, entropy; nan: unknown.

    Args:
        model_output: verl's, nested over prompts and responses: the entry of a token is about the next one.
        data: a micro-batch as verl passes it to a loss; its nested columns are over the responses.
        term: the terms of our loss; None: another loss, with a ratio per token.
        clip: its clip bounds, if known.
    """
    mask = data["response_mask"]
    lengths, flat = row_offsets(mask).diff(), mask.values()
    row = torch.repeat_interleave(lengths, output_size=len(flat))
    place = torch.arange(len(flat), device=flat.device) - row_offsets(mask)[:-1][row]
    ends = (row_offsets(data["prompts"]).diff() + lengths).cumsum(0)
    at = (ends - lengths - 1)[row] + place

    def of_response(output: torch.Tensor) -> torch.Tensor:
        return (output.values() if output.is_nested else output)[at].float()

    unknown = torch.full(flat.shape, torch.nan, device=flat.device)
    if term is not None and term.ratio is not None:
        ratio = term.ratio[row, place]
    else:
        ratio = clamp_log_ratio(of_response(model_output["log_probs"]) - data["old_log_probs"].values()).exp()
    outside = unknown
    if term is not None:
        outside = unknown if term.clipped is None else term.clipped[row, place]
    elif clip is not None:
        outside = clipped(ratio, data["advantages"].values(), *clip)
    if (entropy := model_output.get("entropy")) is not None:
        entropy = of_response(entropy)
    else:  # the loss uses none: the policy's at the beginning of the step, if the trainer has computed it
        entropy = data["entropy"].values() if "entropy" in data else unknown
    columns = (data[ROW].reshape(-1)[row], data[TURN].values(), flat, ratio, outside, entropy)
    return torch.stack([column.float() for column in columns])


def of_turns(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Means and maxima over the trained tokens of each turn, by name of the column; ``tokens`` of :func:`of_tokens`.

    A turn's tokens follow each other. Turns without a trained token are left out.
    """
    tokens = tokens[:, (tokens[1] >= 0) & (tokens[2] > 0)].astype(np.float64)
    begins = np.flatnonzero(np.diff(tokens[:2], axis=1, prepend=-1).any(0))
    size = np.diff(begins, append=tokens.shape[1])

    def mean(column: np.ndarray) -> np.ndarray:
        return np.add.reduceat(column, begins) / size if len(begins) else column

    row, turn, _, ratio, outside, entropy = tokens
    statistics = {"ratio": mean(ratio), "clip_share": mean(outside), "entropy": mean(entropy)}
    statistics["ratio_max"] = np.maximum.reduceat(ratio, begins) if len(begins) else ratio
    return {
        "row_id": row[begins].astype(np.int32),
        "turn_in_row": turn[begins].astype(np.int32),
        **{name: column.astype(np.float32) for name, column in statistics.items()},
    }
