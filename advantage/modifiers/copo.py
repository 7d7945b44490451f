"""COPO: where a group's answers agree, its mean outcome against other groups replaces the method's credit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.columns import encode
from verl_turnkey.advantage.group_ops import Floats, Ints, compared, joint_codes, mean
from verl_turnkey.advantage.methods._episode_level import outcomes
from verl_turnkey.advantage.methods._step_columns import filled
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import Finite, NotNegative, Ranged


@dataclass(frozen=True)
class CopoParams(Ranged):
    """Parameters of ``copo``, the method and the modifier."""

    gamma: NotNegative = 20.0  # steepness of the weight
    rho: Finite = 1.5  # entropy of the answers at which both parts weigh alike; log of the group size is the largest


@register_modifier(
    "copo",
    params=CopoParams,
    needs=("extra.answer",),
    paper="COPO, arXiv:2508.04138",
    summary="where a group's answers agree, compares the group's mean outcome with other groups instead",
)
def copo(batch: StepBatch, params: CopoParams, estimate: Estimate) -> Credit:
    """Consistency-aware credit.

    ::

        H(g) = - sum of p log p over the distinct final answers of the group
        w(g) = 1 / (1 + exp(-gamma (H(g) - rho)))
        A    = w A + (1 - w) (mean_g R - mean) / (std + 1e-6)     mean, sample std: of the groups' means in the batch

    The answer of a trajectory is the ``extra.answer`` of its last step that has one (None, nan and an empty text are
    none); trajectories without one agree.
    A constant group is not 0: it gets the second part.

    Source: arXiv:2508.04138, from notes. Its losses are weighted; weighing advantages is the same while no token is
    clipped. It compares the prompts of a mini-batch, this those of the batch.
    """
    credit = estimate(batch)
    _, stats = outcomes(batch, "outcomes")
    entropy = _entropies(batch.group[batch.first_rows], _answers(batch), batch.n_groups)
    w = 1 / (1 + np.exp(np.clip(-params.gamma * (entropy - params.rho), -500, 500)))
    whole = np.zeros(batch.n_groups, dtype=np.int64)  # the batch as a single group
    between = compared(stats.mean, whole, 1)
    weight = w[batch.group]
    advantage = weight * credit.advantage + (1 - weight) * between[batch.group]
    metrics = {"weight/mean": mean(w), "entropy/mean": mean(entropy)}
    return replace(credit, advantage=advantage, metrics=metrics, levels={"method_weight": weight})


def _answers(batch: StepBatch) -> Ints:
    """Code of each trajectory's answer (n_trajectories,); 0 without one."""
    column = batch.extra["answer"].tolist()
    has = filled(batch, "answer")
    last: dict[int, object] = {}
    for row in batch.runs.order.tolist():
        if has[row] and not (isinstance(column[row], str) and column[row] == ""):
            last[int(batch.trajectory[row])] = column[row]
    labels, _ = encode("extra.answer", list(last.values()), none_allowed=False)
    answers = np.zeros(batch.n_trajectories, dtype=np.int64)
    answers[np.array(list(last), dtype=np.int64)] = labels + 1
    return answers


def _entropies(group: Ints, answer: Ints, n: int) -> Floats:
    """Entropy of the answers of each group (n,), trajectories counted once."""
    codes, distinct = joint_codes(group, answer)
    counts = np.bincount(codes, minlength=distinct)
    owner = np.zeros(distinct, dtype=np.int64)
    owner[codes] = group
    order = np.lexsort((counts, owner))  # sums in sorted order: the rows' does not matter
    share = counts[order] / np.bincount(group, minlength=n)[owner[order]]
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1))
    result = np.zeros(n)
    if distinct:
        result[owner[order][starts]] = np.abs(np.add.reduceat(-share * np.log(share), starts))
    return result
