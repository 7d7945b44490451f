"""Effective rank of the hidden states of each row's own tokens: three numbers, from the old policy's forward pass.

VERL (arXiv:2509.23808) measures the states after the final norm. ``H`` (T, D): T own tokens of the row; ``erank`` is
the exponential of the entropy of the singular values, as shares of their sum::

    ER  = erank(H)
    m_j = erank(H[:j s + 1])                   s: stride; H of the last ``window`` tokens
    d_j = m_j - mean(m_1, ..., m_(j-1))
    ERV = mean of d_j,  ERA = mean of d_j - d_(j-1)

all of centered matrices, in float64: float32 counts its noise as rank. A hook of the model's final norm keeps the
states of a micro-batch, and the engine's ``prepare_model_outputs`` adds the numbers to what the worker returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_turnkey.advantage import Modification
from verl_turnkey.losses.turns import row_offsets
from verl_turnkey.plugins.credit.trainer_columns import OF_RANK, RANK, STRIDE, WINDOW
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta

EMBEDDINGS = ("embed_tokens", "wte", "embed_in")
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
EPS = 1e-8
NOISE = 100 * torch.finfo(torch.float64).eps
"""eigenvalues below this share of the largest, times the number of rows, are 0"""


def effective_rank(gram: torch.Tensor) -> torch.Tensor:
    """erank of centered states with the Gram matrix ``gram`` (T, T) float64; 0 of fewer than two states."""
    if len(gram) < 2:
        return gram.new_zeros(())
    values = torch.linalg.eigvalsh(gram)
    values = torch.where(values > values[-1].clamp(min=0) * len(gram) * NOISE, values, 0).sqrt()
    p = values / (values.sum() + EPS)
    return torch.exp(-(p * torch.log(p + EPS)).sum())


def _centered_gram(gram: torch.Tensor) -> torch.Tensor:
    """The Gram matrix of the centered states, from that of the states."""
    return gram - gram.mean(0, keepdim=True) - gram.mean(1, keepdim=True) + gram.mean()


def rank_numbers(states: torch.Tensor, stride: int, window: int) -> torch.Tensor:
    """ER, ERV and ERA of ``states`` (T, D): (3,) float64."""
    states = states.double()
    centered = states - states.mean(0) if len(states) else states
    whole = centered @ centered.T if len(states) <= states.shape[1] else centered.T @ centered
    if len(whole) == 0 or len(states) < 2:
        return states.new_zeros(3)
    last = centered[-window:]
    gram = last @ last.T
    ranks = [effective_rank(_centered_gram(gram[: t + 1, : t + 1])) for t in range(stride, len(last), stride)]
    d = [ranks[j] - torch.stack(ranks[:j]).mean() for j in range(1, len(ranks))]
    velocity = torch.stack(d).mean() if d else states.new_zeros(())
    acceleration = (d[-1] - d[0]) / (len(d) - 1) if len(d) > 1 else states.new_zeros(())
    return torch.stack([effective_rank(whole), velocity, acceleration])


def install(process: Any) -> None:
    """Run inside a process of the actor: passes with :data:`STRIDE` return the field ``turnkey_rank`` from now on."""
    measure(internals.actor_worker(process).actor.engine)


def measure(engine: Any) -> None:
    """Give the ``engine`` the hook."""
    kept: list[torch.Tensor] = []
    norm = final_norm(engine.module)
    norm.register_forward_hook(lambda module, inputs, output: kept.append(output) if engine.turnkey_measures else None)
    engine.turnkey_measures = False
    engine.prepare_model_inputs = partial(_before, engine, engine.prepare_model_inputs, kept)
    engine.prepare_model_outputs = partial(_after, engine, engine.prepare_model_outputs, kept)


def final_norm(model: Any) -> Any:
    """The norm after the last layer of a (wrapped) language model.

    Raises:
        RuntimeError: there is no module with both one of :data:`EMBEDDINGS` and one of :data:`NORMS`.
    """
    for module in model.modules():  # an encoder of images has no embeddings of tokens
        children = dict(module.named_children())
        norms = [children[name] for name in NORMS if name in children]
        if norms and any(name in children for name in EMBEDDINGS):
            return norms[0]
    raise RuntimeError(
        f"rank_shaping: {type(model).__name__} has no final norm: expected one of {', '.join(NORMS)} in the module "
        f"that has one of {', '.join(EMBEDDINGS)}"
    )


def _before(engine: Any, inner: Callable[..., Any], kept: list[torch.Tensor], micro_batch: TensorDict) -> Any:
    kept.clear()
    engine.turnkey_measures = STRIDE in micro_batch
    return inner(micro_batch=micro_batch)


def _after(engine: Any, inner: Callable[..., Any], kept: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    outputs = inner(*args, **kwargs)
    if not engine.turnkey_measures:
        return outputs
    engine.turnkey_measures = False
    micro_batch = kwargs["micro_batch"] if "micro_batch" in kwargs else args[2]
    (states,) = kept
    kept.clear()
    stride, window = (int(tu.get_non_tensor_data(micro_batch, key, None)) for key in (STRIDE, WINDOW))
    numbers = [rank_numbers(rows, stride, window) for rows in own_states(states, micro_batch)]
    return outputs | {RANK: torch.stack(numbers)}


def own_states(states: torch.Tensor, micro_batch: TensorDict) -> list[torch.Tensor]:
    """The states at each row's own tokens, (T, D) each.

    ``states``: (1, tokens, D) packed, or (B, L, D) padded on the right.
    """
    ids, mask = micro_batch["input_ids"], micro_batch["response_mask"]
    starts = row_offsets(ids)[:-1].tolist()
    rows = []
    for i, (row, own) in enumerate(zip(ids.unbind(), mask.unbind(), strict=True)):
        whole = states[0, starts[i] : starts[i] + len(row)] if len(states) == 1 else states[i, : len(row)]
        rows.append(whole[len(row) - len(own) :][own.bool()])
    return rows


class RankPass:
    """Marks the pass for the workers; without a modifier that reads ranks it does nothing."""

    def __init__(self, modify: Sequence[Modification]) -> None:
        params: Any = next((modifier.params for modifier in modify if OF_RANK & {*modifier.columns}), None)
        self.measured = params is not None
        self._marks = {STRIDE: params.stride, WINDOW: params.window} if self.measured else {}
        self._waits = False

    @contextmanager
    def during(self, batch: KVBatchMeta) -> Iterator[None]:
        """While verl computes the old log-probabilities of ``batch``."""
        self._waits = self.measured
        try:
            yield
        finally:
            self._waits = False
            for name in self._marks:
                (batch.extra_info or {}).pop(name, None)

    def before_forward(self, method: str, batch: KVBatchMeta) -> None:
        """Called before each worker call; the first one of :meth:`during` measures."""
        if self._waits and method == "compute_log_prob":
            self._waits = False
            batch.extra_info = (batch.extra_info or {}) | self._marks
