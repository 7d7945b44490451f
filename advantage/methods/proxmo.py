"""ProxMO: outcomes weighted by the group's success rate, and steps compared with steps in states of similar text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Bools, Floats, Ints, Norm, equal, group_stats, joint_codes, ordinals
from verl_turnkey.advantage.methods._episode_level import Scope, Singleton, episode_level, penalties
from verl_turnkey.advantage.methods._similarity import step_texts, within_images
from verl_turnkey.advantage.params import ConfigError, NotNegative, Positive, Range, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

BLOCK = 2**22  # entries of a similarity matrix held at once
CHUNK = 4096  # rows whose vectors are held at once


@dataclass(frozen=True)
class ProxmoParams(Ranged):
    """Parameters of ``proxmo``; the defaults are the paper's."""

    gamma: Unit = 0.95  # discount of the step returns
    alpha: Positive = 4.0  # sharpness of the outcome weight's dependence on the success rate
    beta: NotNegative = 0.1  # strength of the outcome weight; 0: off
    temperature: Positive = 0.1  # of the softmax over similarities; lower: only the most similar states count
    step_advantage_w: NotNegative = 1.0  # omega: weight of the step level
    norm: Norm = "mean_std"  # of the episode level: divide by the group's sample std (paper), or not (released code)
    success_rate: Literal["trajectories", "clamped_score"] = "trajectories"
    """share of solved trajectories, or the mean score over step rows cut to [0, 1] (released code)"""
    neighbours: Literal["same_step", "all_steps"] = "same_step"
    """compared states: those of the same step number, or all of the group (released code)"""
    scope: Scope = "outcomes"
    """statistics over outcomes, penalties subtracted from their own step's advantage; or, as in released code, with
    penalties included: over step rows (steps), or over one value per trajectory, its first step's (trajectories)"""
    singleton: Singleton = "zero"  # episode-level advantage in a group of one: 0, or its raw score (released code)
    max_features: Annotated[int, Range(lambda x: x > 0, "an integer > 0")] = 1024  # words of the tf-idf vocabulary
    epsilon: Positive = 1e-6  # added to the std
    compares_texts: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("sklearn",)


@register_estimator(
    "proxmo",
    params=ProxmoParams,
    needs=("anchor",),
    paper="ProxMO, arXiv:2602.19225",
    summary="weights outcomes by the success rate, and compares each step with the steps in states of similar text",
    tier="core",
)
def proxmo(batch: StepBatch, params: ProxmoParams) -> Credit:
    """Proximity-based advantage of every step.

    ::

        p      = success rate of the group
        f      = sigmoid((1 - p)^alpha) - 1/2   after success,   sigmoid(-p^alpha) - 1/2   after failure
        A_E'   = (1 + beta f) (R_i - mean_g) / F_g                      episode level
        w(t,j) = softmax over j of cos(x_t, x_j) / temperature          x: tf-idf of the observation texts
        A_S(t) = R(t) - sum_j w(t,j) R(j)                               step level
        A      = A_E' + step_advantage_w A_S - penalty

    The steps j are those of the same group with the same step number, t itself included; with
    ``neighbours="all_steps"`` all of the group; of states shown as images (``extra.images``) those with the same
    images. ``R(t)`` is the discounted return. The penalty of an invalid action changes no other step's advantage,
    unless ``scope`` is one of the released code's. The texts are ``text`` when given, else the anchors. A batch without
    any word (of two letters or more) has A_S = 0. Needs ``anchor``, and ``success`` for
    ``success_rate="trajectories"``; scikit-learn. ``Credit.returns`` is R(t) minus the penalty.

    Source: arXiv:2602.19225; released code ProxMO-RL. Where they differ: the code's success rate is the mean score over
    step rows cut to [0, 1] (``success_rate="clamped_score"``), which with rewards of 10 is 1 as soon as some rows
    succeed, so that the weights do not depend on the success rate; it compares all steps (``neighbours="all_steps"``),
    and leaves the episode level unscaled (``norm="mean"``) over step rows with penalties inside (``scope="steps"``,
    ``singleton="score"``). Our reading: "same step number", as third-party readers understand the paper; a group of one
    gets 0; a step whose text is None is not compared with any other.
    """
    returns = batch.returns(params.gamma)
    inside, after = penalties(batch, params.scope)
    episode = episode_level(batch, params.norm, params.scope, params.singleton, params.epsilon)
    rate, success = success_rates(batch, batch.score - inside, params.success_rate)
    weight = outcome_weight(rate[batch.group], success, params.alpha, params.beta)
    neighbourhood = batch.group
    if params.neighbours == "same_step":
        position = batch.step if batch.runs.tree is None else ordinals(batch.runs)
        neighbourhood, _ = joint_codes(batch.group, position)
    neighbourhood = within_images(batch, neighbourhood)
    step = proximity_level(batch, returns - inside, neighbourhood, params)
    metrics = {"credit/groups": float(batch.n_groups), "credit/success_rate": float(rate.mean()) if len(rate) else 0.0}
    has_text = np.array([text is not None for text in step_texts(batch)], dtype=bool)
    return Credit.of_parts(
        {"episode_level": weight * episode, "step_level": params.step_advantage_w * step},
        after,
        returns - batch.penalty,
        metrics=metrics,
        levels={"outcome_weight": weight},
        groups={"episode_level": batch.group, "step_level": np.where(has_text, neighbourhood, -1)},
    )


def success_rates(batch: StepBatch, score: Floats, how: str) -> tuple[Floats, Bools]:
    """Success rate of each group (n_groups,), and whether each row counts as a success (S,); ``score``: row scores."""
    if how == "clamped_score":
        stats = group_stats(score, batch.group, batch.n_groups)
        alone = stats.size == 1  # the released code takes 0 there
        return np.where(alone, 0.0, np.clip(stats.mean, 0.0, 1.0)), (score > 0.5) & ~equal(score, np.float64(0.5))
    if "success" not in batch.given:
        raise ConfigError(
            'proxmo.success_rate="trajectories" needs the column "success": the agent loop must set the record field '
            '"success", or set turnkey.credit.success_rate=clamped_score'
        )
    solved = np.bincount(batch.trajectory, batch.success, batch.n_trajectories) > 0
    group = batch.group[batch.first_rows]
    trajectories = np.bincount(group, minlength=batch.n_groups)
    return np.bincount(group, solved, batch.n_groups) / trajectories, solved[batch.trajectory]


def outcome_weight(rate: Floats, success: Bools, alpha: float, beta: float) -> Floats:
    """``1 + beta f``: above 1 for a success among failures, below 1 for a failure among successes."""
    exponent = np.where(success, (1 - rate) ** alpha, -(rate**alpha))
    return 1 + beta * (1 / (1 + np.exp(-exponent)) - 0.5)


def proximity_level(batch: StepBatch, returns: Floats, neighbourhood: Ints, params: ProxmoParams) -> Floats:
    """``A_S`` (S,); rows with equal text have equal weights, so similarities are taken between distinct texts."""
    step = np.zeros(len(batch))
    texts = step_texts(batch)
    with_text = np.flatnonzero([text is not None for text in texts])
    named = [str(texts[row]) for row in with_text]
    index = {text: code for code, text in enumerate(sorted(set(named)))}  # sorted: whatever the order of the rows
    vectors = _tf_idf(named, list(index), params.max_features)
    if vectors is None:
        return step
    text = np.full(len(batch), -1)
    text[with_text] = [index[name] for name in named]
    order = with_text[np.lexsort((returns[with_text], text[with_text], neighbourhood[with_text]))]
    borders = np.flatnonzero(np.diff(neighbourhood[order], prepend=-1))
    for chunk in _chunks(np.split(order, borders[1:])):
        codes = np.unique(text[np.concatenate(chunk)])
        dense = vectors[codes].toarray()
        for rows in chunk:
            if returns[rows].min() == returns[rows].max():
                continue
            distinct, local, count = np.unique(text[rows], return_inverse=True, return_counts=True)
            total = np.bincount(local, returns[rows])
            kernels = _kernels(dense[np.searchsorted(codes, distinct)], params.temperature)
            baseline = np.concatenate([(kernel @ total) / (kernel @ count) for kernel in kernels])[local]
            step[rows] = np.where(equal(returns[rows], baseline), 0.0, returns[rows] - baseline)
    return step


def _chunks(neighbourhoods: list[Ints]) -> Iterator[list[Ints]]:
    """Neighbourhoods together while they hold few rows: taking vectors out of a sparse matrix one by one is slow."""
    chunk: list[Ints] = []
    for rows in neighbourhoods:
        if chunk and sum(map(len, chunk)) + len(rows) > CHUNK:
            yield chunk
            chunk = []
        chunk.append(rows)
    if chunk:
        yield chunk


def _kernels(vectors: Floats, temperature: float) -> Iterator[Floats]:
    """exp(cos / temperature) between all texts, up to a factor per row, in blocks of rows."""
    texts = len(vectors)
    rows = max(1, BLOCK // texts)
    for start in range(0, texts, rows):
        scaled = (vectors[start : start + rows] @ vectors.T) / temperature
        yield np.exp(scaled - scaled.max(1, keepdims=True))


def _tf_idf(texts: list[str], distinct: list[str], max_features: int) -> csr_matrix | None:
    """Unit vectors of the ``distinct`` texts, by the document frequencies of ``texts``; None when they hold no word."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise ImportError('proxmo compares texts with scikit-learn: pip install "verl-turnkey[proxmo]"') from None
    vectorizer = TfidfVectorizer(max_features=max_features)
    try:
        vectorizer.fit(texts)
    except ValueError as error:
        if "empty vocabulary" not in str(error):
            raise
        return None
    vectors: Any = vectorizer.transform(distinct)
    return vectors
