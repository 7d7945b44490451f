"""``turnkey.update.observation_coefficient``: the policy also learns to predict what the environment answers (ECHO).

A conversation in one row holds the observations as context. Beside any policy loss, the actor minimises

    coefficient x mean over the tokens of observations of -log pi(token | all before it)

arXiv:2605.24517. The tokens of the chat template around an observation do not count, and neither do the first prompt
and an observation after the last turn, which is in no row. The mean is over the batch of an update, as in the code of
prime-rl, whatever the mini-batches, micro-batches and ranks; the paper's coefficient is 0.05.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from verl_turnkey.losses.turns import like, row_offsets
from verl_turnkey.plugins.actor.weighing import MINI_BATCHES
from verl_turnkey.plugins.credit.metrics import LEARNED, OBSERVED
from verl_turnkey.plugins.credit.row_turns import Runs
from verl_turnkey.plugins.verl_api import internals


def columns(
    coefficient: float,
    extra_fields: Sequence[Mapping[str, Any]],
    tags: Sequence[Mapping[str, Any]],
    response_mask: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What the trainer writes to the queue, and metrics; neither with a coefficient of 0.

    Args:
        extra_fields, tags: of the batch's B rows; those whose tag says ``is_padding`` are left out.
        response_mask: (B, L) nested, as the agent loop wrote it.
    """
    if not coefficient:
        return {}, {}
    runs, offsets = Runs.of(response_mask), row_offsets(response_mask).tolist()
    observed = torch.zeros(offsets[-1])
    for row, fields in enumerate(extra_fields):
        turns: Sequence[Sequence[Sequence[int]]] = fields.get(OBSERVED) or ()
        if tags[row].get("is_padding", False) or len(turns) != runs.count[row]:
            continue
        for turn, spans in enumerate(turns, start=int(runs.first[row])):
            for first, end in spans:
                if runs.start[turn] + first >= offsets[row]:  # else it is in the prompt
                    observed[runs.start[turn] + first : runs.start[turn] + end] = 1
    number = observed.sum()
    return {LEARNED: like(observed / number.clamp(min=1), response_mask)}, {"rows/observation_tokens": number.item()}


def learn(process: Any, coefficient: float) -> None:
    """Run inside a process of the actor: its loss has the term from now on."""
    internals.wrap_loss(internals.actor_worker(process).actor, _with_observations, coefficient)


def _with_observations(
    inner: Callable[..., Any],
    coefficient: float,
    model_output: Mapping[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    **_: Any,
) -> Any:
    loss, metrics = inner(model_output=model_output, data=data, dp_group=dp_group)
    share = data.select(LEARNED).to_padded_tensor()[LEARNED]
    log_prob = torch.where(share > 0, no_padding_2_padding(model_output["log_probs"], data), 0.0)
    # verl adds up the losses of micro-batches and averages gradients over the ranks.
    cross_entropy = -(share * log_prob).sum() * (int(data[MINI_BATCHES]) * data["dp_size"])
    metrics["actor/observation_loss"] = Metric(value=cross_entropy.detach(), aggregation=AggregationType.SUM)
    return loss + coefficient * cross_entropy, metrics
